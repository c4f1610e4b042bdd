"""What is on this machine that Forgeline could use: CPU, driver, GPUs, libraries, Triton's server. Fails on nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from dataclasses import dataclass

from runtime.driver import Driver, read_driver
from runtime.errors import ForgelineError

# module to import ("" = do not: heavy, or no module), distributions whose version counts
LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "openvino": ("openvino", ("openvino",)),
    "onnxruntime": ("onnxruntime", ("onnxruntime", "onnxruntime-gpu")),
    "tokenizers": ("tokenizers", ("tokenizers",)),
    "numpy": ("numpy", ("numpy",)),
    "tensorrt": ("tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")),
    "tensorrt_rtx": ("tensorrt_rtx", ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx")),
    "cuda-python": ("cuda.bindings.runtime", ("cuda-bindings", "cuda-python")),
    "triton (kernel compiler)": ("", ("triton",)),
    "torch": ("", ("torch",)),
    "transformers": ("", ("transformers",)),
    "onnx": ("", ("onnx",)),
    "nvidia-pytriton": ("", ("nvidia-pytriton",)),
}


@dataclass(frozen=True)
class Library:
    version: str = ""  # "" = not installed
    problem: str = ""  # why it does not import

    @property
    def usable(self) -> bool:
        return bool(self.version) and not self.problem


@dataclass(frozen=True)
class Machine:
    python: str
    system: str
    cpu: str
    cpu_features: tuple[str, ...]  # those that matter to matrix products
    num_cpus: int
    memory_bytes: int
    driver: Driver
    libraries: dict[str, Library]
    server: str  # tritonserver's path, or why there is none
    has_server: bool

    def has(self, *names: str) -> bool:
        return all(self.libraries[name].usable for name in names)

    def missing(self, *names: str) -> str:
        parts = [f"{name}: {self.libraries[name].problem or 'not installed'}" for name in names if not self.has(name)]
        return "; ".join(parts)


def read_library(module: str, distributions: tuple[str, ...]) -> Library:
    """Version by the package's metadata, and by importing it whether it really loads."""
    version = ""
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    if not module:
        return Library(version)
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        return Library(version, f"cannot be imported ({error})" if version else "")
    except Exception as error:  # a broken installation may raise anything, and the report goes on
        return Library(version or "?", f"fails when imported ({type(error).__name__}: {str(error).splitlines()[0]})")
    return Library(version or str(getattr(imported, "__version__", "?")))


def read_machine() -> Machine:
    cpu, features = _cpu()
    server, has_server = _server()
    return Machine(
        python=platform.python_version(),
        system=platform.platform(terse=True),
        cpu=cpu,
        cpu_features=features,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        driver=read_driver(),
        libraries={name: read_library(*where) for name, where in LIBRARIES.items()},
        server=server,
        has_server=has_server,
    )


def _cpu() -> tuple[str, tuple[str, ...]]:
    name, flags = platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
                    break
    except OSError:
        pass
    interesting = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "bf16", "i8mm")
    return name, tuple(flag for flag in interesting if flag in flags)


def _server() -> tuple[str, bool]:
    from runtime.serving.installation import find_server

    try:
        return str(find_server().binary), True
    except ForgelineError as error:
        return str(error), False
