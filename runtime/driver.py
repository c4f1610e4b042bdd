"""What the NVIDIA driver says of itself and of its GPUs, through its C library. Needs no package and no GPU; starts no work.

Raises   nothing: what cannot be found out is empty, and `Driver.problem` says why
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
VERSION_FILE = Path("/proc/driver/nvidia/version")
_MAJOR, _MINOR, _NUM_SMS = 75, 76, 16  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int  # major * 10 + minor
    num_sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    version: str = ""  # of the kernel module, e.g. 580.95.05
    cuda: str = ""  # the newest CUDA it runs, e.g. 13.0
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class _CallFailed(Exception):
    pass


def read_driver(load: Callable[[str], Any] = ctypes.CDLL, version_file: Path = VERSION_FILE) -> Driver:
    """`load` opens the library; tests pass a stand-in."""
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version_file.read_text(encoding="utf-8"))
        version = match.group(1) if match else ""
    except OSError:
        version = ""
    try:
        library = load(LIBRARY)
    except OSError:
        return Driver(version, problem=f"{LIBRARY} is not on this machine: no NVIDIA driver is installed")
    cuda = ""
    try:
        number = _int(library, "cuDriverGetVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        _call(library, "cuInit", 0)
        return Driver(version, cuda, tuple(_gpu(library, index) for index in range(_int(library, "cuDeviceGetCount"))))
    except _CallFailed as error:
        return Driver(version, cuda, problem=str(error))


def _call(library: Any, name: str, *arguments: Any) -> None:
    if error := int(getattr(library, name)(*arguments)):
        reason = {100: "no GPU is visible", 803: "driver and library versions differ", 999: "the GPU does not answer"}.get(error)
        raise _CallFailed(f"{name} failed with CUDA error {error}" + (f": {reason}" if reason else ""))


def _int(library: Any, name: str, *arguments: Any) -> int:
    value = ctypes.c_int()
    _call(library, name, ctypes.byref(value), *arguments)
    return value.value


def _gpu(library: Any, index: int) -> Gpu:
    device = _int(library, "cuDeviceGet", index)
    name = ctypes.create_string_buffer(100)
    _call(library, "cuDeviceGetName", name, len(name), device)
    memory = ctypes.c_size_t()
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor, sms = (_int(library, "cuDeviceGetAttribute", kind, device) for kind in (_MAJOR, _MINOR, _NUM_SMS))
    return Gpu(name.value.decode(errors="replace"), 10 * major + minor, sms, memory.value)
