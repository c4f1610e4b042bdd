"""The build cache: exported, fused fp32 graphs by content hash, so that a second precision or target starts from there, and where
finished engines are, so that the same engine in another place is a copy.

Place    $XDG_CACHE_HOME/forgeline/canonical/<key>, oldest entries dropped past `max_bytes`
Entry    model.onnx + weights.bin, spec.json (ModelSpec), fusion.json, tokenizer/, checksums.json; written atomically, safe
         between processes; made anew when it is not as it was written
Engines  $XDG_CACHE_HOME/forgeline/engines/<key>: a digest and a path, the last MAX_ENGINES of them; whether it still is
         that engine is for the reader to check
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from builder.bundle import tree_bytes
from builder.staging import LOCK_FILE
from runtime.contract import cache_root, file_sha256

MAX_BYTES = 40 << 30
MAX_ENGINES = 256
CHECKSUMS_FILE = "checksums.json"
REMEDY = "set XDG_CACHE_HOME to another place, or build with --no-cache"


def canonical_entry(key: str) -> Path:
    return cache_root() / "canonical" / key[:32]


def seal(entry: Path) -> None:
    """Keep what `is_whole` compares with."""
    files = sorted(file for file in entry.rglob("*") if file.is_file() and file.name != LOCK_FILE)
    checksums = {str(file.relative_to(entry)): file_sha256(file) for file in files}
    (entry / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=2), encoding="utf-8")


def is_whole(entry: Path) -> bool:
    """Whether every file of the entry is as it was written: half a second per gigabyte."""
    try:
        checksums = json.loads((entry / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        return all(file_sha256(entry / name) == expected for name, expected in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False


def touch(entry: Path) -> None:
    """Mark as just used."""
    os.utime(entry)


def prune(root: Path, *, keep: Path, max_bytes: int = MAX_BYTES) -> list[Path]:
    """Drop the least recently used entries of `root` until it holds at most `max_bytes`; never drops `keep`."""
    entries = sorted((e for e in root.iterdir() if e.is_dir() and not e.name.startswith(".")), key=lambda e: e.stat().st_mtime)
    sizes = {entry: tree_bytes(entry) for entry in entries}
    total, dropped = sum(sizes.values()), []
    for entry in entries:
        if total <= max_bytes:
            break
        if entry == keep:
            continue
        shutil.rmtree(entry, ignore_errors=True)
        total -= sizes[entry]
        dropped.append(entry)
    return dropped


def keep_engine(key: str, engine: Path, digest: str) -> None:
    """Nothing when the cache cannot be written: the engine is finished."""
    place = _engines() / key[:32]
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, encoding="utf-8", delete=False) as file:
            file.write(f"{digest}\n{os.path.abspath(engine)}")
        os.replace(file.name, place)
        for old in sorted(place.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-MAX_ENGINES]:
            old.unlink(missing_ok=True)


def engine_with(key: str) -> tuple[Path, str] | None:
    """Where an engine of that key was last written, and the digest that was kept with it."""
    try:
        digest, _, engine = (_engines() / key[:32]).read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return Path(engine), digest


def _engines() -> Path:
    return cache_root() / "engines"
