"""One execution context of one bucket: bound once, run once, captured, then only replayed.

    Context(…)     profile, shapes, addresses and the shared activation memory, set once
    warm_up        one run outside capture, which TensorRT needs after every change of shape
    capture        the same run recorded as a CUDA graph
    run            the graph where there is one, else the engine itself

A graph keeps the addresses and shapes it was captured with, so nothing of a captured context may be set again; `bind` asserts it.
Contexts share one block of activation memory, which is safe because all of them run on one stream.

Raises   EngineError when TensorRT refuses a setting or a run; its own log says why
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime import contract
from runtime.errors import EngineError
from runtime.executors.cuda import Cuda, Graph
from runtime.executors.tensorrt_step import StepBuffer, StepShape


@dataclass(frozen=True)
class Memory:
    """Where everything a context touches lies; the same for all contexts of an engine."""

    step: StepBuffer
    fixed: Mapping[str, int]  # I/O tensor → address: outputs, pool pointers
    activations: int
    activation_bytes: int

    def addresses(self, names: tuple[str, ...], shape: StepShape) -> dict[str, int]:
        return {name: self.fixed[name] if name in self.fixed else self.step.address(name, shape) for name in names}


def input_shapes(
    names: tuple[str, ...], shape: StepShape, table_width: int, pointers: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Shapes of those of the engine's inputs that `names` lists."""
    shapes: dict[str, tuple[int, ...]] = {name: (length,) for name, length in shape.vector_lengths().items()}
    shapes[contract.BLOCK_TABLE] = (shape.num_seqs, table_width)
    return {name: shapes.get(name, pointers) for name in names}


class Context:
    """`handle` is an IExecutionContext with user-managed memory."""

    def __init__(self, cuda: Cuda, handle: Any, profile: int, stream: Any, memory: Memory) -> None:
        self.cuda = cuda
        self.handle = handle
        self.stream = stream
        self.memory = memory
        self.graph: Graph | None = None
        self.shape: StepShape | None = None
        must(handle.set_optimization_profile_async(profile, int(stream)), f"optimization profile {profile}")
        handle.set_device_memory(memory.activations, memory.activation_bytes)

    def bind(self, shape: StepShape, shapes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> None:
        """Set input shapes and all addresses; `names` are the engine's I/O tensors. Never after `capture`."""
        assert self.graph is None, "a captured context keeps its shapes and addresses"
        if shape == self.shape:
            return
        for name, dims in shapes.items():
            must(self.handle.set_input_shape(name, dims), f"shape {dims} of {name}")
        for name, address in self.memory.addresses(names, shape).items():
            must(self.handle.set_tensor_address(name, address), f"the address of {name}")
        self.shape = shape

    def enqueue(self) -> None:
        must(self.handle.execute_async_v3(int(self.stream)), f"a step of {self.shape}")

    def capturable(self) -> bool:
        """TensorRT-RTX can say so for a context; TensorRT leaves it to the attempt."""
        ask = getattr(self.handle, "is_stream_capturable", None)
        return bool(ask(int(self.stream))) if ask is not None else True

    def warm_up_and_capture(self) -> None:
        """Inputs must be on their way to the device. Returns when the graph is ready; without one when it cannot be captured."""
        self.enqueue()
        self.cuda.synchronize(self.stream)
        if self.capturable():
            with self.cuda.capture(self.stream) as graphs:
                self.enqueue()
            (self.graph,) = graphs

    def run(self) -> None:
        if self.graph is not None:
            self.cuda.launch(self.graph, self.stream)
        else:
            self.enqueue()

    def close(self) -> None:
        if self.graph is not None:
            self.cuda.destroy_graph(self.graph)
        self.graph = self.handle = None


def must(accepted: object, what: str) -> None:
    if not accepted:
        raise EngineError(f"TensorRT refused {what}; its log above says why, and rebuilding the engine on this machine may help")
