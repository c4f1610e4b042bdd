"""The build cache: exported, fused fp32 graphs by content hash, so that a second precision or target starts from there, and where
finished engines are, so that the same engine in another place is a copy.

Place    $XDG_CACHE_HOME/forgeline/canonical/<key>, oldest entries dropped past `max_bytes`
Entry    model.onnx + weights.bin, spec.json (ModelSpec), fusion.json, tokenizer/; written atomically, safe between processes
Engines  $XDG_CACHE_HOME/forgeline/engines/<key>: a digest and a path, the last MAX_ENGINES of them; whether it still is
         that engine is for the reader to check
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from builder.bundle import tree_bytes
from runtime.contract import cache_root

MAX_BYTES = 40 << 30
MAX_ENGINES = 256
REMEDY = "set XDG_CACHE_HOME to another place, or build with --no-cache"


def canonical_entry(key: str) -> Path:
    return cache_root() / "canonical" / key[:32]


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
