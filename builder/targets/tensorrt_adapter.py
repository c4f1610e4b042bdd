"""The calls into TensorRT: `tensorrt` on data-centre GPUs, `tensorrt_rtx` on RTX GPUs, whose Python APIs are nearly the same.

What differs is here only: RTX builds for a named compute capability with no GPU in the machine; TensorRT builds for the GPU that
is there. RTX's ONNX parser opens `libtensorrt_rtx.so` by that name when it meets a plugin, and aborts the process when it does
not find it; its wheel has `libtensorrt_rtx.so.1` only, so a library of the first name that leads to the second is loaded
beforehand.

Raises   BuildError with TensorRT's own words when the library is missing, does not parse or does not build
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from builder.targets.buckets import Profile
from runtime.errors import BuildError

TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"
MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}  # target → module, also the name in Manifest.libraries
_PACKAGES = {TENSORRT: "tensorrt-cu13", TENSORRT_RTX: "tensorrt-rtx-cu13==1.7.1.116"}
RTX_ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120")


@lru_cache(maxsize=2)
def library(target: str) -> Any:
    """The module, ready to parse graphs with plugins."""
    name = MODULES[target]
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise BuildError(
            f"--target {target} needs the module {name}, which cannot be imported ({error}); pip install {_PACKAGES[target]}"
        ) from error
    if target == TENSORRT_RTX and platform.system() == "Linux":
        _load_alias(b"libtensorrt_rtx.so", b"libtensorrt_rtx.so.1")
    return module


# ------------------------------------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class NetworkFacts:
    layers: int
    plugins: tuple[str, ...]  # names of plugin layers
    precisions: dict[str, int]  # "layer type:output type" → layers


@dataclass(frozen=True)
class BuiltPlan:
    network: NetworkFacts
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class BuildOptions:
    workspace_bytes: int | None = None  # None: as much as there is
    timing_cache: Path | None = None  # read when it exists, then written; by tensorrt only
    optimization_level: int = 3  # 0 to 5
    detailed: bool = False  # keep layer names in the plan, for profilers


class Adapter:
    def __init__(self, target: str) -> None:
        self.target = target
        self.trt = library(target)
        self._log = _logger(self.trt)
        self._builder = self.trt.Builder(self._log)

    @property
    def version(self) -> str:
        return str(self.trt.__version__)

    @property
    def keeps_timings(self) -> bool:
        """TensorRT-RTX times nothing when it builds; its timing cache is deprecated since 1.2 and does nothing."""
        return self.target != TENSORRT_RTX

    def build(
        self, onnx: Path, plan: Path, profiles: Sequence[Profile], *, blocks_per_seq: int, arch: str, options: BuildOptions
    ) -> BuiltPlan:
        """Parse, build for one architecture, and write the serialized plan."""
        trt = self.trt
        self._log.errors.clear()
        network = self._builder.create_network(0)
        parser = trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(onnx)):
            reasons = "; ".join(parser.get_error(i).desc() for i in range(min(3, parser.num_errors)))
            raise BuildError(f"{trt.__name__} {self.version} does not parse the lowered graph: {reasons}; use --target cpu")
        facts = _facts(trt, network)
        config = self._builder.create_builder_config()
        self._choose_architecture(config, arch)
        config.max_aux_streams = 0  # one stream, so that a step is captured whole
        config.builder_optimization_level = options.optimization_level
        verbosity = trt.ProfilingVerbosity
        config.profiling_verbosity = verbosity.DETAILED if options.detailed else verbosity.LAYER_NAMES_ONLY
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        timings = options.timing_cache if self.keeps_timings else None
        self._read_timing_cache(config, timings)
        for profile in profiles:
            self._add_profile(config, profile, blocks_per_seq)
        start = time.perf_counter()
        serialized = self._builder.build_serialized_network(network, config)
        seconds = time.perf_counter() - start
        if serialized is None:
            reasons = "; ".join(self._log.errors[:3]) or "it gives no reason"
            raise BuildError(f"{trt.__name__} {self.version} cannot build for {arch}: {reasons}")
        plan.write_bytes(memoryview(serialized))
        self._write_timing_cache(config, timings)
        return BuiltPlan(facts, int(serialized.nbytes), seconds)

    def _choose_architecture(self, config: Any, arch: str) -> None:
        if self.target != TENSORRT_RTX:
            return
        capability = getattr(self.trt.ComputeCapability, arch.upper(), None)
        # Fails here, not at capture, when a layer would have to allocate while it runs.
        config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.num_compute_capabilities = 1
        if capability is None or not config.set_compute_capability(capability, 0):
            raise BuildError(
                f"{self.trt.__name__} {self.version} does not build for {arch}; it builds for {', '.join(RTX_ARCHITECTURES)}; "
                "use --target tensorrt for data-centre GPUs"
            )

    def _add_profile(self, config: Any, profile: Profile, blocks_per_seq: int) -> None:
        built = self._builder.create_optimization_profile()
        for name, (low, opt, high) in profile.shapes(blocks_per_seq).items():
            built.set_shape(name, low, opt, high)
        index = config.add_optimization_profile(built)
        assert index == profile.index, f"profile {profile.index} became {index}"

    def _read_timing_cache(self, config: Any, path: Path | None) -> None:
        if path is None:
            return
        cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise BuildError(
                f"{path} is not a timing cache of {self.trt.__name__} {self.version} for this GPU; remove it or name another file"
            )

    def _write_timing_cache(self, config: Any, path: Path | None) -> None:
        if path is not None and (cache := config.get_timing_cache()) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(memoryview(cache.serialize()))


def _facts(trt: Any, network: Any) -> NetworkFacts:
    plugins: list[str] = []
    precisions: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kind = str(layer.type).rsplit(".", 1)[-1]
        if layer.type == trt.LayerType.PLUGIN_V3:
            plugins.append(layer.name)
        out = str(layer.get_output(0).dtype).rsplit(".", 1)[-1] if layer.num_outputs else "none"
        precisions[f"{kind}:{out}"] += 1
    return NetworkFacts(network.num_layers, tuple(plugins), dict(sorted(precisions.items())))


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message.strip())

    return Logger()


# --------------------------------------------------------------------------------------------- a library of another name

_MACHINES = {"x86_64": 62, "aarch64": 183}
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 0, 1, 5, 6, 10, 11, 14
_HEADER, _PROGRAM_HEADER, _SYMBOL = 64, 56, 24


def _load_alias(name: bytes, target: bytes) -> None:
    """Load an empty library called `name` that depends on `target`; the linker then finds `target`'s symbols by `name`."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(shared_object(name, target, _MACHINES.get(platform.machine(), 62)))
        file.flush()
        ctypes.CDLL(file.name)


def shared_object(name: bytes, needed: bytes, machine: int) -> bytes:
    """The smallest ELF library: one loadable segment that holds a dynamic section with a name and a dependency, no symbols."""
    strings = b"\0" + name + b"\0" + needed + b"\0"
    dynamic_at = _HEADER + 2 * _PROGRAM_HEADER
    symbols_at = dynamic_at + 7 * 16
    strings_at = symbols_at + _SYMBOL
    size = strings_at + len(strings)
    entries = (
        (_DT_SONAME, 1), (_DT_NEEDED, 2 + len(name)), (_DT_STRTAB, strings_at), (_DT_STRSZ, len(strings)),
        (_DT_SYMTAB, symbols_at), (_DT_SYMENT, _SYMBOL), (_DT_NULL, 0),
    )  # fmt: skip
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = identity + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 1 << 16)
    locate = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    return header + load + locate + dynamic + bytes(_SYMBOL) + strings
