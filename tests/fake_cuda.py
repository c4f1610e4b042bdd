"""A GPU that exists on paper: records CUDA and TensorRT calls, checks their order and arguments, and computes real steps.

FakeCudaRuntime stands for `cuda.bindings.runtime`, FakeTensorRT for `tensorrt`. Both share one FakeGpu.

Memory       device addresses lead nowhere: only the fake can follow them, so the host cannot read device memory by accident.
             New memory holds 0xA5. Pinned memory is real, at its real address
Time         work on a stream happens when somebody waits for it and not before, so a buffer that is refilled too early, or a
             result that is read too early, shows up as a wrong token
Rules        broken ones raise RuleBroken at once, where CUDA would fail later, silently, or not today:
             capture    no allocation, no waiting, no setting of shapes, addresses, memory or profile; one plain run since the
                        last such setting; thread-local mode
             graphs     nothing of a context may be set again once a graph was captured from it, nothing it uses may be freed
             contexts   profile, activation memory, shapes within the profile, every address; tensors inside live allocations,
                        on 256-byte boundaries
Steps        the paper model of fakes.py. The key pool of every layer holds each slot's state, the value pool its position
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes import next_state

ALIGNMENT = 256
POISON = 0xA5
NUM_LAYERS = 2
SLOT_BYTES = 8  # of one layer and side: one head of four fp16 elements, read as an int64


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
    contexts: list[FakeContext]
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


class FakeContext:
    """An IExecutionContext with user-managed memory. TensorRT's setters return whether they accept."""

    def __init__(self, gpu: FakeGpu, engine: FakeEngine) -> None:
        self.gpu = gpu
        self.engine = engine
        self.frozen = False  # a graph was captured from it
        self.profile: int | None = None
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.ran_since_change = False

    def _setting(self, what: str) -> None:
        self.gpu.calls.append(what)
        self.gpu.outside_capture(what)
        require(not self.frozen, f"{what} of a context after a graph was captured from it")

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._setting("set_optimization_profile_async")
        require(stream_handle in self.gpu.streams, "a profile is set on an unknown stream")
        self.profile, self.shapes, self.ran_since_change = profile_index, {}, False
        return 0 <= profile_index < self.engine.num_optimization_profiles

    def set_device_memory(self, memory: int, size: int) -> None:
        self._setting("set_device_memory")
        require(memory % ALIGNMENT == 0, "activation memory that is not aligned")
        require(size >= self.engine.device_memory_size_v2, "less activation memory than the engine asks for")
        self.gpu.bytes_at(memory, size)
        self.memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._setting("set_input_shape")
        require(self.profile is not None, "a shape is set before a profile")
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name], self.ran_since_change = tuple(shape), False
        return len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._setting("set_tensor_address")
        require(memory % ALIGNMENT == 0, f"{name} is not on a {ALIGNMENT}-byte boundary")
        self.addresses[name] = memory
        return name in self.engine.names

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.gpu.calls.append("execute_async_v3")
        stream = self.gpu.streams[stream_handle]
        require(self.memory is not None, "a run without activation memory")
        self.gpu.bytes_at(*self.memory)
        for name in self.engine.names:
            require(name in self.addresses, f"a run without an address for {name}")
            if name in self.engine.inputs:
                require(name in self.shapes, f"a run without a shape for {name}")
        if stream.recording is not None:
            require(self.ran_since_change, "capture before a plain run with these shapes")
            stream.captured_from.append(self)
        else:
            self.ran_since_change = True
        shapes, addresses, memory = dict(self.shapes), dict(self.addresses), self.memory
        self.gpu.enqueue(stream_handle, lambda: self.engine.step(shapes, addresses, memory))
        return True


class FakeEngine:
    """An ICudaEngine whose step is the paper model."""

    OUTPUTS = ("logits", "next_token")
    DTYPES = {  # noqa: RUF012
        "input_ids": "int64", "positions": "int64", "slot_mapping": "int32", "block_table": "int32", "query_start_loc": "int32",
        "seq_lens": "int32", "logits_indices": "int64", "kv_pointers": "int64",
    }  # fmt: skip
    device_memory_size_v2 = 1000

    def __init__(self, gpu: FakeGpu, profiles: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], **facts: int) -> None:
        """A profile is ((tokens, sequences, logits) at least, the same at most); facts: table_width, block_size, vocab_size."""
        self.gpu = gpu
        self.profiles = profiles
        self.table_width = facts["table_width"]
        self.block_size = facts["block_size"]
        self.vocab_size = facts["vocab_size"]
        self.inputs = tuple(self.DTYPES)
        self.names = (*self.inputs, *self.OUTPUTS)
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(profiles)
        self.weights_loaded = False
        self.shapes_run: list[tuple[int, int, int]] = []
        self.config: Any = None

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        def dims(tokens: int, seqs: int, logits: int) -> tuple[int, ...]:
            return {
                "block_table": (seqs, self.table_width), "query_start_loc": (seqs + 1,), "seq_lens": (seqs,),
                "logits_indices": (logits,), "kv_pointers": (NUM_LAYERS, 2),
            }.get(name, (tokens,))  # fmt: skip

        least, most = self.profiles[profile_index]
        return [dims(*least), dims(*most), dims(*most)]

    def create_runtime_config(self) -> Any:
        self.config = FakeRuntimeConfig()
        return self.config

    def create_execution_context(self, runtime_config: FakeRuntimeConfig) -> FakeContext:
        self.gpu.outside_capture("create_execution_context")
        require(runtime_config.strategy == "USER_MANAGED", "a context that allocates its own memory")
        return FakeContext(self.gpu, self)

    def load_weights_async(self, stream_reader: Any, stream: int) -> bool:
        self.gpu.calls.append("load_weights_async")
        require(stream_reader.seek(0, "SET") and stream_reader.read(4, stream) == b"plan", "the reader does not read the plan")
        require(stream_reader.seek(4, "END") and stream_reader.read(99, stream) == b"tail", "the reader does not reach the end")
        self.gpu.enqueue(stream, lambda: setattr(self, "weights_loaded", True))
        return True

    def step(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int], memory: tuple[int, int]) -> None:
        """What the GPU does when a run's turn comes: addresses and shapes are those at the time it was enqueued or captured."""
        gpu = self.gpu
        require(self.weights_loaded, "a step runs before the weights are there")
        gpu.bytes_at(*memory)[:] = POISON
        x = {name: gpu.array_at(addresses[name], shapes[name], self.DTYPES[name]) for name in self.inputs}
        num_tokens, num_seqs = len(x["input_ids"]), len(x["seq_lens"])
        self.shapes_run.append((num_tokens, num_seqs, len(x["logits_indices"])))
        starts = x["query_start_loc"].tolist()
        full = x["seq_lens"][-1] > 0  # no sequence is padding: nobody owns padded tokens
        require(starts[0] == 0 and (starts[-1] == num_tokens or full), f"sequences end at {starts[-1]} of {num_tokens} tokens")
        require(all(a <= b for a, b in itertools.pairwise(starts)), "query_start_loc goes down")
        totals = np.full(num_tokens, -(10**9), np.int64)  # of each token: the sum of states up to it
        for row in range(num_seqs):
            self._sequence(row, x, starts[row], starts[row + 1], totals)
        wanted = totals[x["logits_indices"]] % self.vocab_size
        rows = len(wanted)
        gpu.array_at(addresses["next_token"], (rows,), "int64")[:] = wanted
        logits = gpu.array_at(addresses["logits"], (rows, self.vocab_size), "float32")
        logits[:] = 0
        logits[np.arange(rows), wanted] = 1

    def _sequence(self, row: int, x: dict[str, np.ndarray], begin: int, end: int, totals: np.ndarray) -> None:
        length = int(x["seq_lens"][row])
        if length == 0:
            require((x["slot_mapping"][begin:end] == -1).all(), "padding that is stored somewhere")
            return
        first = length - (end - begin)
        blocks = x["block_table"][row, : -(-length // self.block_size)]
        slots = (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[:length]
        require(x["slot_mapping"][begin:end].tolist() == slots[first:].tolist(), f"row {row}: slots off the block table")
        require(x["positions"][begin:end].tolist() == list(range(first, length)), f"row {row}: positions")
        layers = []
        for keys, values in x["kv_pointers"].tolist():
            states, positions = (
                np.array([self._cell(pool, slot)[0] for slot in slots[:first]], np.int64) for pool in (keys, values)
            )
            require(positions.tolist() == list(range(first)), f"row {row} reads slots of other positions")
            layers.append(states.tolist())
        require(all(states == layers[0] for states in layers), "layers do not hold the same sequence")
        states = layers[0]
        for index, token in enumerate(x["input_ids"][begin:end].tolist(), first):
            require(0 <= token < self.vocab_size, f"row {row}: token {token}")
            states.append(next_state(states[-1] if states else 0, token))
            for keys, values in x["kv_pointers"].tolist():
                self._cell(keys, slots[index])[0] = states[-1]
                self._cell(values, slots[index])[0] = index
        totals[begin:end] = np.cumsum(states)[first:]

    def _cell(self, pool: int, slot: int) -> np.ndarray:
        return self.gpu.array_at(pool + int(slot) * SLOT_BYTES, (1,), "int64")


class FakeRuntimeConfig:
    strategy = "STATIC"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class FakeTensorRT:
    """The module. Give it the engine that its Runtime is to deserialize."""

    __name__ = "tensorrt"
    __version__ = "11.4.0"

    class ICudaEngine:
        load_weights_async = None  # of TensorRT versions that can

    class ExecutionContextAllocationStrategy:
        USER_MANAGED = "USER_MANAGED"

    class SeekPosition:
        SET, CUR, END = "SET", "CUR", "END"

    class IStreamReaderV2:
        def __init__(self) -> None:
            pass

    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            pass

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        outer = self

        class Runtime:
            defer_weights_loading = False

            def __init__(self, logger: Any) -> None:
                pass

            def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
                data = bytes(serialized_engine)
                outer.engine.weights_loaded = not self.defer_weights_loading
                return outer.engine if data.startswith(b"plan") else None

        self.Runtime = Runtime
