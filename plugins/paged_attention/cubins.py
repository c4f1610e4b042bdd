"""Kernels compiled ahead of time, as files: `<directory>/sm89/<name>.cubin` and `<name>.json`. Standard library only.

Written by aot.py where the compiler is, read by the TensorRT plugin where the GPU is. To launch one with the CUDA driver API:
load `binary.cubin` as a module, get the function `binary.symbol`, raise its dynamic shared memory limit to `shared_bytes` when
that exceeds 48 KiB, and pass `params` in order; block is (32 * num_warps, 1, 1). cuda_launch.py does.

Raises   FileNotFoundError, ValueError with the name, both values and the remedy
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.paged_attention.tuning import ARCHITECTURES

FORMAT = 1


@dataclass(frozen=True)
class KernelBinary:
    name: str
    arch: int
    symbol: str  # function name inside the cubin
    params: tuple[tuple[str, str], ...]  # (name, type): *fp16 … are device addresses, then i32, i64, fp32; scratch ones take 0
    constants: dict[str, Any]
    num_warps: int
    shared_bytes: int  # dynamic shared memory
    registers: int  # per thread
    spill_bytes: int  # stores + loads, 0 in anything that is written
    compiler: str
    source_sha256: str  # of the kernels' source files
    sha256: str  # of the cubin
    cubin: bytes = field(repr=False, default=b"")
    num_stages: int = 1


def save(binary: KernelBinary, directory: Path) -> Path:
    folder = directory / f"sm{binary.arch}"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{binary.name}.cubin", binary.cubin)
    facts = {key: value for key, value in dataclasses.asdict(binary).items() if key != "cubin"}
    path = folder / f"{binary.name}.json"
    _replace(path, (json.dumps({"format": FORMAT, **facts}, indent=2) + "\n").encode())
    return path


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all: builds share a directory."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def load(directory: Path, arch: int, name: str) -> KernelBinary:
    folder = directory / f"sm{arch}"
    path = folder / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"kernel {name} for sm{arch} is not in {directory}; compile it with "
            f"`python -m plugins.paged_attention.aot --out {directory} --arch sm{arch}`"
        )
    facts = json.loads(path.read_text(encoding="utf-8"))
    if (found := facts.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} has format {found} but this version reads {FORMAT}; compile the kernels again")
    facts["params"] = tuple((key, kind) for key, kind in facts["params"])
    cubin = (folder / f"{name}.cubin").read_bytes()
    if (digest := hashlib.sha256(cubin).hexdigest()) != facts["sha256"]:
        raise ValueError(
            f"{folder / name}.cubin was altered, sha256 {digest[:12]} is not the {facts['sha256'][:12]} it was built with; "
            "compile the kernels again"
        )
    return KernelBinary(**facts, cubin=cubin)


def arch_for(capability: int, available: tuple[int, ...] = ARCHITECTURES) -> int:
    """The best architecture to load on a GPU of `capability`: up to SM89 an older minor runs too, later ones only exactly."""
    usable = [arch for arch in available if arch == capability or (arch // 10 == capability // 10 == 8 and arch < capability)]
    if not usable:
        have = ", ".join(f"sm{arch}" for arch in available)
        raise ValueError(f"no kernels for sm{capability}, only for {have}; compile them with --arch sm{capability}")
    return max(usable)
