"""A TensorRT that exists on paper: contexts that check how they are used, an engine whose steps can be worked out by hand.

FakeTensorRT stands for the module `tensorrt`. Rig puts GPU, library, engine directory and manifest together.

Rules        broken ones raise RuleBroken:
             capture    no setting of shapes, addresses, memory or profile; one plain run since the last such setting
             graphs     nothing of a context may be set again once a graph was captured from it, nothing it uses may be freed
             contexts   profile, activation memory, shapes within the profile, every address; tensors inside live allocations,
                        on 256-byte boundaries
Steps        the paper model of fakes.py. The key pool of every layer holds each slot's state, the value pool its position
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_cuda import POISON, FakeCudaRuntime, FakeGpu, require
from fakes import expected_tokens, next_state

from builder.targets.buckets import decode_buckets, profiles
from runtime.batch import StepInputs
from runtime.contract import KVSpec, LayerSpec, Manifest, ModelSpec, PrecisionSpec
from runtime.executors.cuda import Cuda
from runtime.executors.tensorrt import TensorRTExecutor
from runtime.executors.tensorrt_load import Backend
from runtime.executors.tensorrt_pools import LAYOUT

ALIGNMENT = 256
NUM_LAYERS = 2
SLOT_BYTES = 8  # of one layer and side: one head of four fp16 elements, read as an int64
VOCAB, BLOCK, WIDTH, NUM_BLOCKS = 97, 4, 16, 64
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 100
SHAPES = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (64, 8, 8), (100, 8, 8)]


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


def make_manifest(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "schema_version": 1, "forgeline_version": "0.1.0", "created": "", "target": "tensorrt",
        "model": ModelSpec("paper", "Paper", "paper", VOCAB, 8, (LayerSpec(1, 1, 4),) * NUM_LAYERS, BLOCK * WIDTH),
        "precision": PrecisionSpec("fp16", "fp16", "fp16", "fp16", "fp16"),
        "kv_cache": KVSpec("f16", "f16", BLOCK, LAYOUT, 2 * NUM_LAYERS * SLOT_BYTES),
        "max_model_len": BLOCK * WIDTH, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "libraries": {"tensorrt": "11.4.0"}, "plan": {"model": "plan/model.plan"}, "checksums": {}, "weight_bytes": 1 << 20,
        "gpu_architectures": ("sm80", "sm89"), "buckets": decode_buckets(MAX_NUM_SEQS), "plugin_sha256": "c0ffee",
    }  # fmt: skip
    return Manifest(**{**facts, **changes})


class Rig:
    """A GPU, a TensorRT, an engine directory, and executors made of them."""

    def __init__(self, directory: Path, **gpu: Any) -> None:
        self.directory = directory
        (directory / "plan").mkdir()
        (directory / "plan" / "model.plan").write_bytes(b"plan" + bytes(100) + b"tail")
        self.gpu = FakeGpu(**gpu)
        bounds = [
            tuple((built.num_tokens[side], built.num_seqs[side], built.num_logits[side]) for side in (0, 2))
            for built in profiles(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)  # what the builder gives an engine
        ]
        self.engine = FakeEngine(self.gpu, bounds, table_width=WIDTH, block_size=BLOCK, vocab_size=VOCAB)
        self.registered: list[Path] = []
        self.trt = FakeTensorRT(self.engine)
        self.cuda = Cuda(FakeCudaRuntime(self.gpu))
        self.backend = Backend(self.trt, self.cuda, lambda _, place: self.registered.append(place), "c0ffee")

    def executor(self, kind: type[TensorRTExecutor] = TensorRTExecutor, num_blocks: int = NUM_BLOCKS, **facts: Any) -> Any:
        return kind(self.directory, make_manifest(**facts), num_blocks, backend=self.backend)

    def calls_of(self, work: Callable[[], Any]) -> list[str]:
        before = len(self.gpu.calls)
        work()
        return self.gpu.calls[before:]


def step(rows: list[tuple[list[int], int, list[int]]], wanted: list[int] | None = None) -> StepInputs:
    """`rows` are (new tokens, tokens cached, blocks); logits of the last token of each row unless `wanted` says which."""
    ids, positions, slots, starts, lens = [], [], [], [0], []
    table = np.zeros((len(rows), max(len(blocks) for _, _, blocks in rows)), np.int32)
    for row, (tokens, cached, blocks) in enumerate(rows):
        table[row, : len(blocks)] = blocks
        for position, token in enumerate(tokens, cached):
            ids.append(token)
            positions.append(position)
            slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(ids))
        lens.append(cached + len(tokens))
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int32),
        block_table=table,
        query_start_loc=np.array(starts, np.int32),
        seq_lens=np.array(lens, np.int32),
        logits_indices=np.array([end - 1 for end in starts[1:]] if wanted is None else wanted, np.int64),
    )


def placed(prompts: list[list[int]]) -> list[tuple[list[int], int, list[int]]]:
    """Rows of new sequences, each in blocks of its own, from the last block down."""
    rows, free = [], list(range(NUM_BLOCKS))
    for prompt in prompts:
        rows.append((prompt, 0, [free.pop() for _ in range(-(-len(prompt) // BLOCK))]))
    return rows


def token_after(tokens: list[int]) -> int:
    return expected_tokens(tokens, 1, VOCAB)[0]
