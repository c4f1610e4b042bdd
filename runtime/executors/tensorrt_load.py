"""From an engine directory to a deserialized TensorRT engine, or one sentence that says why not. Runs nothing.

Checked in this order, the cheap and certain first: library and its version, attention plugin, KV layout, GPU present, GPU
architecture, memory for the weights, what the plan says of itself. Only then is the plan read, by mapping it into memory.

Weights load asynchronously where the library can (`ICudaEngine.load_weights_async`): they are on their way while pools are
allocated and contexts made, in the order of the stream that will use them.
"""

from __future__ import annotations

import importlib
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import __version__
from runtime.contract import Manifest, check_library
from runtime.errors import EngineError, ManifestMismatch
from runtime.executors.cuda import Cuda, cuda_runtime
from runtime.executors.tensorrt_jit import CompiledKernels, cache_place
from runtime.executors.tensorrt_pools import RESERVE_BYTES, block_bytes

log = logging.getLogger("forgeline.tensorrt")

LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # target → module, also the name in manifest.libraries


@dataclass(frozen=True)
class Backend:
    """What the executor needs from outside; tests put fakes here."""

    trt: Any  # tensorrt or tensorrt_rtx
    cuda: Cuda
    register_plugin: Callable[[Any, Path], None]  # (trt, engine directory)
    plugin_sha256: str  # of the plugin that `register_plugin` registers


def check_gpu(manifest: Manifest, cuda: Cuda) -> int:
    """The GPU's compute capability. Raises EngineError without a GPU, ManifestMismatch for one the plan was not built for."""
    built = ", ".join(manifest.gpu_architectures)
    if not cuda.num_devices():
        raise EngineError(
            f"the engine needs an NVIDIA GPU ({built}) but CUDA finds none on this machine; run `runtime doctor`, or build with "
            "--target cpu"
        )
    capability = cuda.compute_capability()
    if f"sm{capability}" not in manifest.gpu_architectures:
        raise ManifestMismatch(
            f"the engine was built for {built} but this GPU, {cuda.device_name()}, is sm{capability}; rebuild with "
            f"--target-arch sm{capability}"
        )
    return capability


def check_plugin(manifest: Manifest, sha256: str) -> None:
    if manifest.plugin_sha256 != sha256:
        other = f", or install forgeline=={manifest.forgeline_version}" if manifest.forgeline_version != __version__ else ""
        raise ManifestMismatch(
            f"the engine was built with attention plugin {manifest.plugin_sha256[:12] or 'none'} but this version of forgeline "
            f"has {sha256[:12]}; rebuild the engine{other}"
        )


def check_weights_fit(manifest: Manifest, cuda: Cuda) -> None:
    free, total = cuda.memory_bytes()
    left = max(0, free - RESERVE_BYTES)
    if manifest.weight_bytes > left:
        need, mib, total_mib = (size / 2**20 for size in (manifest.weight_bytes, left, total))
        raise ManifestMismatch(
            f"the weights need {need:.0f} MiB but {mib:.0f} of the GPU's {total_mib:.0f} MiB are free, so 0 tokens of KV cache "
            "would fit; use a smaller precision or free memory on the GPU"
        )


def plan_path(engine_dir: Path, manifest: Manifest, capability: int) -> Path:
    """The plan of this architecture, where there is one for each; else the only one."""
    role = f"sm{capability}"
    if role not in manifest.plan and "model" not in manifest.plan:
        raise ManifestMismatch(
            f"the engine has no plan for {role}, only {', '.join(manifest.plan)}; rebuild with --target-arch {role}"
        )
    return engine_dir / manifest.plan.get(role, manifest.plan.get("model", ""))


class LoadedEngine:
    """A deserialized plan. Keeps alive what TensorRT keeps pointers to: runtime, logger, mapped file, reader."""

    def __init__(self, trt: Any, path: Path, kernels: CompiledKernels) -> None:
        """Weights are left to `load_weights` when the library can defer them."""
        self._trt = trt
        self.kernels = kernels
        with open(path, "rb") as file:
            self._blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._check_validity(path)
        self.deferred = hasattr(trt.ICudaEngine, "load_weights_async") and hasattr(trt.Runtime, "defer_weights_loading")
        if self.deferred:
            self._runtime.defer_weights_loading = True
        self.engine = self._runtime.deserialize_cuda_engine(self._blob)
        if self.engine is None:
            raise EngineError(f"{trt.__name__} cannot read {path}; its log above says why; rebuild the engine on this machine")
        self._reader: Any = None

    def _check_validity(self, path: Path) -> None:
        """TensorRT-RTX reads from a plan's header whether it runs here."""
        ask = getattr(self._runtime, "get_engine_validity", None)
        if ask is not None:
            validity, diagnostics = ask(self._blob)
            if validity == self._trt.EngineValidity.INVALID:
                raise ManifestMismatch(
                    f"{self._trt.__name__} says that {path} does not run on this GPU and driver (diagnostics {diagnostics:#x}); "
                    "rebuild the engine for it"
                )

    def load_weights(self, stream: Any) -> None:
        """In stream order, without waiting; nothing to do when they are there already."""
        if self.deferred and not self.engine.weights_loaded:
            self._reader = plan_reader(self._trt, self._blob)
            if not self.engine.load_weights_async(self._reader, int(stream)):
                raise EngineError(f"{self._trt.__name__} could not load the engine's weights; its log above says why")

    def create_context(self) -> Any:
        """One whose activation memory the caller supplies, and which leaves CUDA graphs to the caller."""
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(config, "cuda_graph_strategy"):  # TensorRT-RTX: kernels for the bucket's shape now, not behind our back
            config.cuda_graph_strategy = self._trt.CudaGraphStrategy.DISABLED
            config.dynamic_shapes_kernel_specialization_strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        self.kernels.attach(config)
        context = self.engine.create_execution_context(config)
        if context is None:
            raise EngineError(f"{self._trt.__name__} cannot create an execution context; the GPU may be out of memory")
        return context

    def close(self) -> None:
        self.engine = self._reader = self._runtime = None
        self._blob.close()


def plan_reader(trt: Any, blob: Any) -> Any:
    """An IStreamReaderV2 over bytes."""

    class PlanReader(trt.IStreamReaderV2):
        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)
            self._at = 0

        def read(self, num_bytes: int, _stream: int) -> bytes:
            data = blob[self._at : self._at + num_bytes]
            self._at += len(data)
            return data

        def seek(self, offset: int, where: Any) -> bool:
            if where == trt.SeekPosition.END:
                self._at = len(blob) - abs(offset)
            else:
                self._at = offset + (self._at if where == trt.SeekPosition.CUR else 0)
            return 0 <= self._at <= len(blob)

    return PlanReader()


def default_backend(manifest: Manifest) -> Backend:
    """The installed library, cuda-python and this package's plugin. Raises EngineError naming what is missing."""
    module = LIBRARIES[manifest.target]
    try:
        trt = importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise EngineError(
            f"target {manifest.target} needs {module} {manifest.libraries.get(module, '')}, which cannot be imported ({error}); "
            f"install {module.replace('_', '-')}-cu13, or see `runtime doctor`"
        ) from error
    from plugins.paged_attention import tensorrt as plugin

    def register(library: Any, engine_dir: Path) -> None:
        plugin.register(library, kernels=engine_dir / manifest.plan["kernels"])

    return Backend(trt, Cuda(cuda_runtime()), register, plugin.sha256())


def check(manifest: Manifest, backend: Backend) -> int:
    """Everything that can be known without reading the plan; the GPU's compute capability."""
    check_library(manifest, LIBRARIES[manifest.target], backend.trt.__version__)
    check_plugin(manifest, backend.plugin_sha256)
    block_bytes(manifest)
    capability = check_gpu(manifest, backend.cuda)
    check_weights_fit(manifest, backend.cuda)
    return capability


def free_bytes_beside_weights(manifest: Manifest, backend: Backend | None = None) -> int:
    """Of GPU memory, before the engine is loaded. Raises what loading would."""
    backend = backend or default_backend(manifest)
    check(manifest, backend)
    return max(0, backend.cuda.memory_bytes()[0] - manifest.weight_bytes - RESERVE_BYTES)


def open_engine(engine_dir: Path, manifest: Manifest, backend: Backend) -> LoadedEngine:
    """All checks, then the plan."""
    capability = check(manifest, backend)
    backend.register_plugin(backend.trt, engine_dir)
    path = plan_path(engine_dir, manifest, capability)
    checksum = manifest.checksums.get(path.relative_to(engine_dir).as_posix(), "")
    return LoadedEngine(backend.trt, path, CompiledKernels(cache_place(checksum)))
