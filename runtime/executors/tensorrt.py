"""Runs an engine of target tensorrt or tensorrt-rtx: one padded, captured step per `execute`. One thread at a time.

    step ──► bucket ──► one copy host → device ──► (tokens of the last step, device → device) ──► graph ──► next_token → host

Everything is allocated and every bucket captured when the engine is loaded, so that a step neither allocates nor captures. All
work is on one stream: that orders copies, graphs and the activation memory that the contexts share.

Pipelining   `submit` may start a step while the one before still runs: `feedback` says which input ids are tokens the host has
             not seen yet, and the device copies them itself. `execute` is `submit` then `collect`
Logits       stay on the device until somebody reads `StepOutput.logits`; plain greedy never does

Raises   EngineError, ManifestMismatch when loading; UnsupportedFeature for a step larger than every profile
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plugins.paged_attention.tensorrt_op import KV_POINTERS
from runtime import contract
from runtime.batch import StepInputs
from runtime.contract import Manifest
from runtime.executors.base import StepOutput
from runtime.executors.tensorrt_buckets import Bucket, Buckets, read_profiles
from runtime.executors.tensorrt_context import Context, Memory, input_shapes
from runtime.executors.tensorrt_load import Backend, default_backend, open_engine
from runtime.executors.tensorrt_pools import DevicePools, check_fits
from runtime.executors.tensorrt_step import NUM_STAGING, StepBuffer

log = logging.getLogger("forgeline.tensorrt")

_TOKEN_BYTES = 8  # next_token is int64


class DeviceOutput(StepOutput):
    """Copies logits from the device when they are first read, which must be before the next `submit`."""

    logits_at_hand = False
    _source: tuple[TensorRTExecutor, int, int]
    _logits: npt.NDArray[np.float32] | None

    def __init__(self, executor: TensorRTExecutor, step: int, num_rows: int, next_token: npt.NDArray[np.int64]) -> None:
        object.__setattr__(self, "next_token", next_token)
        object.__setattr__(self, "_source", (executor, step, num_rows))
        object.__setattr__(self, "_logits", None)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        logits = self._logits
        if logits is None:
            executor, step, num_rows = self._source
            logits = executor.fetch_logits(step, num_rows)
            object.__setattr__(self, "_logits", logits)
        return logits


@dataclass(frozen=True)
class _Started:
    step: int
    slot: int
    num_rows: int


class TensorRTExecutor:
    def __init__(
        self,
        engine_dir: str | os.PathLike[str],
        manifest: Manifest,
        num_blocks: int,
        *,
        backend: Backend | None = None,
    ) -> None:
        backend = backend or default_backend(manifest)
        self._cuda = cuda = backend.cuda
        self._loaded = open_engine(Path(engine_dir), manifest, backend)
        self.block_size = manifest.kv_cache.block_size
        self.num_blocks = num_blocks
        self.vocab_size = manifest.model.vocab_size
        self.min_prefill_tokens = 1
        self._stream = cuda.create_stream()
        self._loaded.load_weights(self._stream)

        engine = self._loaded.engine
        names = tuple(engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
        self._names = names
        self._inputs = tuple(name for name in names if name == KV_POINTERS or name in contract.STEP_INPUTS)
        profiles = read_profiles(engine)
        self._buckets = Buckets(
            profiles,
            manifest.buckets,
            max_num_seqs=manifest.max_num_seqs,
            max_num_batched_tokens=manifest.max_num_batched_tokens,
        )
        largest = self._buckets.largest
        self._table_width = profiles[0].table_width
        self._step = StepBuffer(cuda, largest, self._table_width)
        self._rows = largest.num_logits
        self._logits = cuda.allocate(self._rows * self.vocab_size * 4)
        self._tokens = cuda.allocate(self._rows * _TOKEN_BYTES)
        self._host_tokens = [cuda.allocate_host(self._rows * _TOKEN_BYTES) for _ in range(NUM_STAGING)]
        self._host_logits: tuple[int, npt.NDArray[np.uint8]] | None = None
        self._done = [cuda.create_event() for _ in range(NUM_STAGING)]
        activation_bytes = max(1, engine.device_memory_size_v2)
        activations = cuda.allocate(activation_bytes)
        check_fits(manifest, num_blocks, *cuda.memory_bytes())
        self._pools = DevicePools(cuda, manifest, num_blocks, self._stream)
        self._layers = len(manifest.model.layers)
        fixed = {KV_POINTERS: self._pools.pointers, contract.LOGITS: self._logits, contract.NEXT_TOKEN: self._tokens}
        self._memory = Memory(self._step, fixed, activations, activation_bytes)
        self._contexts: dict[Bucket, Context] = {}
        self._eager: dict[int, Context] = {}  # by profile
        self._started: deque[_Started] = deque()
        self._num_steps = 0
        self._capture_all()
        self._loaded.kernels.save()

    # ------------------------------------------------------------------------------------------------------ loading

    def _capture_all(self) -> None:
        for bucket in self._buckets.all():
            context = self._context(bucket.profile)
            self._bind(context, bucket)
            self._step.send(_no_tokens(), bucket.shape, 0, self._stream)
            context.warm_up_and_capture()
            self._contexts[bucket] = context
            if context.graph is None:
                log.warning("steps of %s run without a CUDA graph: the context cannot be captured", bucket.shape)

    def _context(self, profile: int) -> Context:
        return Context(self._cuda, self._loaded.create_context(), profile, self._stream, self._memory)

    def _bind(self, context: Context, bucket: Bucket) -> None:
        shapes = input_shapes(self._inputs, bucket.shape, self._table_width, (self._layers, 2))
        context.bind(bucket.shape, shapes, self._names)

    def _eager_context(self, inputs: StepInputs) -> tuple[Context, Bucket]:
        bucket = self._buckets.eager(inputs)
        if bucket.profile not in self._eager:
            self._eager[bucket.profile] = self._context(bucket.profile)
        context = self._eager[bucket.profile]
        self._bind(context, bucket)
        return context, bucket

    # ------------------------------------------------------------------------------------------------------ running

    def execute(self, inputs: StepInputs) -> StepOutput:
        self.submit(inputs)
        return self.collect()

    def submit(self, inputs: StepInputs, feedback: Sequence[tuple[int, int]] = ()) -> None:
        """Start a step. (index, row) in `feedback`: input id `index` is the token of row `row` of the step before."""
        assert len(self._started) < NUM_STAGING, "collect a step before starting a third"
        bucket = self._buckets.choose(inputs)
        if bucket is not None:
            context = self._contexts[bucket]
        else:
            context, bucket = self._eager_context(inputs)
        slot = self._num_steps % NUM_STAGING
        self._step.send(inputs, bucket.shape, slot, self._stream)
        ids = self._step.address(contract.INPUT_IDS, bucket.shape)
        for index, row, count in runs(feedback):
            self._cuda.on_device(
                ids + index * _TOKEN_BYTES, self._tokens + row * _TOKEN_BYTES, count * _TOKEN_BYTES, self._stream
            )
        context.run()
        num_rows = len(inputs.logits_indices)
        if num_rows:
            self._cuda.to_host(self._host_tokens[slot][0], self._tokens, num_rows * _TOKEN_BYTES, self._stream)
        self._cuda.record(self._done[slot], self._stream)
        self._num_steps += 1
        self._started.append(_Started(self._num_steps, slot, num_rows))

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was started and not collected."""
        started = self._started.popleft()
        self._cuda.wait(self._done[started.slot])
        tokens = self._host_tokens[started.slot][1][: started.num_rows * _TOKEN_BYTES].view(np.int64)
        return DeviceOutput(self, started.step, started.num_rows, tokens.copy())

    def fetch_logits(self, step: int, num_rows: int) -> npt.NDArray[np.float32]:
        """A view that the next call overwrites."""
        assert step == self._num_steps, "logits must be read before the next step starts"
        if self._host_logits is None:
            self._host_logits = self._cuda.allocate_host(self._rows * self.vocab_size * 4)
        address, array = self._host_logits
        size = num_rows * self.vocab_size * 4
        if num_rows:
            self._cuda.to_host(address, self._logits, size, self._stream)
            self._cuda.synchronize(self._stream)
        return array[:size].view(np.float32).reshape(num_rows, self.vocab_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._pools.copy_blocks(copies, self._stream)

    def kv_cache_bytes(self) -> int:
        return self._pools.num_bytes

    def contexts(self) -> list[Context]:
        """Of the buckets."""
        return list(self._contexts.values())

    def close(self) -> None:
        cuda = self._cuda
        cuda.synchronize(self._stream)
        for context in (*self._contexts.values(), *self._eager.values()):
            context.close()
        self._contexts.clear()
        self._eager.clear()
        self._loaded.close()
        self._pools.close()
        self._step.close()
        for address in (self._logits, self._tokens, self._memory.activations):
            cuda.free(address)
        for address, _ in (*self._host_tokens, *([self._host_logits] if self._host_logits else ())):
            cuda.free_host(address)
        for event in self._done:
            cuda.destroy_event(event)
        cuda.destroy_stream(self._stream)


def runs(feedback: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(index, row, count) of stretches in which both go up by one: a batch that did not change is a single copy."""
    stretches: list[tuple[int, int, int]] = []
    for index, row in feedback:
        if stretches:
            first, first_row, count = stretches[-1]
            if (index, row) == (first + count, first_row + count):
                stretches[-1] = (first, first_row, count + 1)
                continue
        stretches.append((index, row, 1))
    return stretches


def _no_tokens() -> StepInputs:
    """A step that is all padding."""
    values: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in contract.INPUT_DTYPES.items()}
    values[contract.BLOCK_TABLE] = np.zeros((0, 1), np.int32)
    values[contract.QUERY_START_LOC] = np.zeros(1, np.int32)
    return StepInputs(**values)
