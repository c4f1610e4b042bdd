"""A CUDA device that exists on paper: records calls, checks their order and arguments, moves real bytes.

FakeCudaRuntime stands for `cuda.bindings.runtime`; fake_tensorrt.py adds TensorRT. Both share one FakeGpu.

Memory       device addresses lead nowhere: only the fake can follow them, so the host cannot read device memory by accident.
             New memory holds 0xA5. Pinned memory is real, at its real address
Time         work on a stream happens when somebody waits for it and not before, so a buffer that is refilled too early, or a
             result that is read too early, shows up as a wrong token
Rules        broken ones raise RuleBroken at once, where CUDA would fail later, silently, or not today: no allocation and no
             waiting during capture, which is thread-local; graphs are uploaded before they are launched; copies stay inside
             live allocations and on the side that their kind says
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POISON = 0xA5


class RuleBroken(AssertionError):
    pass


def require(condition: object, rule: str) -> None:
    if not condition:
        raise RuleBroken(rule)


@dataclass
class Allocation:
    address: int
    array: np.ndarray

    @property
    def end(self) -> int:
        return self.address + len(self.array)


@dataclass
class Stream:
    number: int
    work: list[Callable[[], None]] = field(default_factory=list)
    recording: list[Callable[[], None]] | None = None
    captured_from: list[Any] = field(default_factory=list)

    def __int__(self) -> int:
        return self.number


class FakeGpu:
    def __init__(self, *, capability: int = 89, memory_bytes: int = 8 << 30, num_devices: int = 1) -> None:
        self.capability = capability
        self.memory_bytes = memory_bytes
        self.num_devices = num_devices
        self.calls: list[str] = []
        self.device: dict[int, Allocation] = {}
        self.host: dict[int, Allocation] = {}
        self.streams: dict[int, Stream] = {}
        self._next_address = 0x7_0000_0000_0000

    # memory

    def used_bytes(self) -> int:
        return sum(len(allocation.array) for allocation in self.device.values())

    def allocate(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // 4096) * 4096 + (1 << 20)
        # Nothing in these tests touches all of a large block, so the system never supplies most of its pages.
        array = np.zeros(size, np.uint8) if size > 1 << 24 else np.full(size, POISON, np.uint8)
        self.device[address] = Allocation(address, array)
        return address

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """A view of `size` bytes of device or pinned memory."""
        for allocation in (*self.device.values(), *self.host.values()):
            if allocation.address <= address < allocation.end or (size == 0 and address == allocation.end):
                require(address + size <= allocation.end, f"{size} bytes at {address:#x} run past their allocation")
                return allocation.array[address - allocation.address :][:size]
        raise RuleBroken(f"{address:#x} is not, or no longer, allocated")

    def array_at(self, address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes_at(address, size).view(dtype).reshape(shape)

    # streams

    def capturing(self) -> bool:
        return any(stream.recording is not None for stream in self.streams.values())

    def outside_capture(self, what: str) -> None:
        require(not self.capturing(), f"{what} during capture")

    def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        place = self.streams[int(stream)]
        (place.work if place.recording is None else place.recording).append(work)

    def run(self, stream: Any) -> None:
        place = self.streams[int(stream)]
        while place.work:
            place.work.pop(0)()


class _Enum(enum.IntEnum):
    pass


class cudaError_t(_Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100


class cudaMemcpyKind(_Enum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(_Enum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class cudaDeviceAttr(_Enum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


@dataclass
class FakeGraph:
    work: list[Callable[[], None]]
    contexts: list[Any]
    uploaded: bool = False


@dataclass
class Properties:
    name: bytes = b"Paper GPU\0\0"


class FakeCudaRuntime:
    """Functions return tuples that begin with an error, as cuda-python's do."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    cudaDeviceAttr = cudaDeviceAttr
    cudaHostAllocDefault = 0
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and name[4:5].isupper() and callable(value := object.__getattribute__(self, name)):
            if not isinstance(value, type):
                self.gpu.calls.append(name)
            return value
        return object.__getattribute__(self, name)

    @staticmethod
    def _ok(*values: Any) -> tuple[Any, ...]:
        return (cudaError_t.cudaSuccess, *values)

    def cudaGetDeviceCount(self):
        if not self.gpu.num_devices:
            return cudaError_t.cudaErrorNoDevice, None
        return self._ok(self.gpu.num_devices)

    def cudaDeviceGetAttribute(self, attr, device):
        values = divmod(self.gpu.capability, 10)
        return self._ok(values[attr - cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor])

    def cudaGetDeviceProperties(self, device):
        return self._ok(Properties())

    def cudaMemGetInfo(self):
        return self._ok(self.gpu.memory_bytes - self.gpu.used_bytes(), self.gpu.memory_bytes)

    def cudaMalloc(self, size):
        self.gpu.outside_capture("cudaMalloc")
        if size + self.gpu.used_bytes() > self.gpu.memory_bytes:
            return cudaError_t.cudaErrorMemoryAllocation, None
        return self._ok(self.gpu.allocate(size))

    def cudaFree(self, devPtr):
        self.gpu.outside_capture("cudaFree")
        require(devPtr in self.gpu.device, f"cudaFree of {devPtr:#x}, which is not allocated")
        del self.gpu.device[devPtr]
        return self._ok()

    def cudaHostAlloc(self, size, flags):
        self.gpu.outside_capture("cudaHostAlloc")
        array = np.full(size, POISON, np.uint8)
        self.gpu.host[array.ctypes.data] = Allocation(array.ctypes.data, array)
        return self._ok(array.ctypes.data)

    def cudaFreeHost(self, ptr):
        self.gpu.outside_capture("cudaFreeHost")
        ctypes.memset(ptr, 0xEE, len(self.gpu.host[ptr].array))
        del self.gpu.host[ptr]
        return self._ok()

    def cudaMemcpyAsync(self, dst, src, count, kind, stream):
        gpu = self.gpu
        sides = {1: (gpu.device, gpu.host), 2: (gpu.host, gpu.device), 3: (gpu.device, gpu.device)}[kind]
        for address, side in zip((dst, src), sides, strict=True):
            found = any(a.address <= address and address + count <= a.end for a in side.values())
            require(found, f"copy of {count} bytes with an address on the wrong side, or outside an allocation: {address:#x}")

        def copy() -> None:
            gpu.bytes_at(dst, count)[:] = gpu.bytes_at(src, count)

        gpu.enqueue(stream, copy)
        return self._ok()

    def cudaMemsetAsync(self, devPtr, value, count, stream):
        self.gpu.bytes_at(devPtr, count)

        def fill() -> None:
            if not (value == 0 and count > 1 << 24):
                self.gpu.bytes_at(devPtr, count)[:] = value

        self.gpu.enqueue(stream, fill)
        return self._ok()

    def cudaStreamCreateWithFlags(self, flags):
        require(flags == self.cudaStreamNonBlocking, "a stream that waits for the default stream")
        stream = Stream(0x51 + len(self.gpu.streams))
        self.gpu.streams[stream.number] = stream
        return self._ok(stream)

    def cudaStreamDestroy(self, stream):
        require(not stream.work, "a stream is destroyed before its work is done")
        return self._ok()

    def cudaStreamSynchronize(self, stream):
        self.gpu.outside_capture("cudaStreamSynchronize")
        self.gpu.run(stream)
        return self._ok()

    def cudaEventCreateWithFlags(self, flags):
        return self._ok({"recorded_on": None, "passed": True})

    def cudaEventDestroy(self, event):
        return self._ok()

    def cudaEventRecord(self, event, stream):
        event["recorded_on"], event["passed"] = stream, False
        self.gpu.enqueue(stream, lambda: event.update(passed=True))
        return self._ok()

    def cudaEventSynchronize(self, event):
        self.gpu.outside_capture("cudaEventSynchronize")
        stream = event["recorded_on"]
        while not event["passed"]:
            stream.work.pop(0)()
        return self._ok()

    def cudaStreamBeginCapture(self, stream, mode):
        self.gpu.outside_capture("cudaStreamBeginCapture")
        require(mode == cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal, "capture in another mode than thread-local")
        stream.recording, stream.captured_from = [], []
        return self._ok()

    def cudaStreamEndCapture(self, stream):
        graph = FakeGraph(stream.recording, list(stream.captured_from))
        stream.recording = None
        return self._ok(graph)

    def cudaGraphInstantiate(self, graph, flags):
        self.gpu.outside_capture("cudaGraphInstantiate")
        for context in graph.contexts:
            context.frozen = True
        return self._ok(FakeGraph(graph.work, graph.contexts))

    def cudaGraphDestroy(self, graph):
        return self._ok()

    def cudaGraphUpload(self, graphExec, stream):
        graphExec.uploaded = True
        return self._ok()

    def cudaGraphLaunch(self, graphExec, stream):
        require(graphExec.uploaded, "a graph is launched before it was uploaded")
        require(graphExec.contexts, "an empty graph is launched")
        for work in graphExec.work:
            self.gpu.enqueue(stream, work)
        return self._ok()

    def cudaGraphExecDestroy(self, graphExec):
        for context in graphExec.contexts:
            context.frozen = False
        return self._ok()
