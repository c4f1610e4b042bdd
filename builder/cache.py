"""The build cache: exported, fused fp32 graphs by content hash, so that a second precision or target starts from there.

Place    $XDG_CACHE_HOME/forgeline/canonical/<key>, oldest entries dropped past `max_bytes`
Entry    model.onnx + weights.bin, spec.json (ModelSpec), fusion.json, tokenizer/; written atomically, safe between processes
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from builder.bundle import tree_bytes
from runtime.contract import cache_root

MAX_BYTES = 40 << 30
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
