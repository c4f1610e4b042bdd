"""The CUDA calls an executor makes, as one small object. Knows nothing of engines or steps.

`api` is `cuda.bindings.runtime` of the cuda-python package (`cuda_runtime()` imports it), or in tests a fake that records the
calls. Everything enqueues on the stream it is given; only `synchronize` and `wait` block. Addresses are integers.

Raises   CudaError with the name of the call and of the error
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import EngineError

Bytes = npt.NDArray[np.uint8]


class CudaError(EngineError):
    """A CUDA call failed; the device cannot be relied on afterwards."""


def cuda_runtime() -> Any:
    """cuda-python's runtime bindings. Raises EngineError when the package is missing."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise EngineError(
            f"engines for NVIDIA GPUs need cuda-python, which cannot be imported ({error}); `pip install 'forgeline[gpu]'`"
        ) from error
    return runtime


class Graph:
    """A captured and instantiated sequence of GPU work; what it was captured with must not move or change."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Cuda:
    """Device 0 of this process; CUDA_VISIBLE_DEVICES chooses which GPU that is."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def _call(self, name: str, *arguments: Any) -> Any:
        """cuda-python returns (error, value …)."""
        error, *values = getattr(self.api, name)(*arguments)
        if int(error) != 0:
            raise CudaError(f"{name} failed with {getattr(error, 'name', error)}; restart the process, and see `runtime doctor`")
        return values[0] if len(values) == 1 else tuple(values)

    # ------------------------------------------------------------------------------------------------------- device

    def num_devices(self) -> int:
        """0 also where there is no driver, or one too old."""
        try:
            error, count = self.api.cudaGetDeviceCount()
        except (RuntimeError, OSError):  # what the bindings raise when they cannot find the driver's library
            return 0
        return int(count) if int(error) == 0 else 0

    def compute_capability(self) -> int:
        """major * 10 + minor."""
        kinds = self.api.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMajor, 0)
        return 10 * int(major) + int(self._call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMinor, 0))

    def device_name(self) -> str:
        name = self._call("cudaGetDeviceProperties", 0).name
        return name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total)."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    # ------------------------------------------------------------------------------------------------------- memory

    def allocate(self, size: int) -> int:
        """Device memory, 256-byte aligned."""
        return int(self._call("cudaMalloc", max(size, 1)))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_host(self, size: int) -> tuple[int, Bytes]:
        """Pinned memory: its address, and the same as an array. `free_host` it only when the array is no longer used."""
        address = int(self._call("cudaHostAlloc", max(size, 1), self.api.cudaHostAllocDefault))
        return address, np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(address))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def to_device(self, target: int, source: int, size: int, stream: Any) -> None:
        """From pinned memory, which must stay as it is until the stream gets there."""
        self._call("cudaMemcpyAsync", target, source, size, self.api.cudaMemcpyKind.cudaMemcpyHostToDevice, stream)

    def to_host(self, target: int, source: int, size: int, stream: Any) -> None:
        self._call("cudaMemcpyAsync", target, source, size, self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost, stream)

    def on_device(self, target: int, source: int, size: int, stream: Any) -> None:
        self._call("cudaMemcpyAsync", target, source, size, self.api.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream)

    def clear(self, target: int, size: int, stream: Any) -> None:
        self._call("cudaMemsetAsync", target, 0, size, stream)

    # ------------------------------------------------------------------------------------------------ order of work

    def create_stream(self) -> Any:
        """One that does not wait for the default stream."""
        return self._call("cudaStreamCreateWithFlags", self.api.cudaStreamNonBlocking)

    def destroy_stream(self, stream: Any) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        self._call("cudaStreamSynchronize", stream)

    def create_event(self) -> Any:
        return self._call("cudaEventCreateWithFlags", self.api.cudaEventDisableTiming)

    def destroy_event(self, event: Any) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait(self, event: Any) -> None:
        """Block until the stream has passed the last `record`."""
        self._call("cudaEventSynchronize", event)

    # ------------------------------------------------------------------------------------------------------- graphs

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[list[Graph]]:
        """Work enqueued inside is recorded, not run; the list then holds its graph, instantiated and uploaded.

        Thread-local mode: other threads may allocate meanwhile, this one may neither allocate nor wait.
        """
        graphs: list[Graph] = []
        self._call("cudaStreamBeginCapture", stream, self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            yield graphs
        except BaseException:
            with contextlib.suppress(CudaError):  # leave capture mode; what went wrong inside is the error to show
                self._call("cudaGraphDestroy", self._call("cudaStreamEndCapture", stream))
            raise
        recorded = self._call("cudaStreamEndCapture", stream)
        executable = self._call("cudaGraphInstantiate", recorded, 0)
        self._call("cudaGraphDestroy", recorded)
        self._call("cudaGraphUpload", executable, stream)
        graphs.append(Graph(executable))

    def launch(self, graph: Graph, stream: Any) -> None:
        self._call("cudaGraphLaunch", graph.handle, stream)

    def destroy_graph(self, graph: Graph) -> None:
        self._call("cudaGraphExecDestroy", graph.handle)
