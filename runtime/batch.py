"""From a scheduling decision to the arrays of one step. Owns reusable host buffers; knows nothing about executors.

Shapes   as in contract.py: T = Σ num_scheduled_tokens, B = len(requests), R = rows that produce a token
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.request import Request


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's work. `copies` (source, destination) blocks must be copied before the step writes (copy-on-write)."""

    requests: tuple[Request, ...] = ()
    num_scheduled_tokens: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Request, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def samples(self, row: int) -> bool:
        """Whether this step computes the request's last known token, so that its logits give a new one."""
        request = self.requests[row]
        return request.num_computed_tokens + self.num_scheduled_tokens[row] == request.num_tokens

    def __bool__(self) -> bool:
        return bool(self.requests)


@dataclass(frozen=True)
class StepInputs:
    """Arrays for one `Executor.execute`, valid until the next call of `BatchBuilder.build`."""

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int64]


class BatchBuilder:
    def __init__(self, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self._ids = np.empty(max_num_batched_tokens, np.int64)
        self._positions = np.empty(max_num_batched_tokens, np.int64)
        self._slots = np.empty(max_num_batched_tokens, np.int32)

    def build(self, batch: ScheduledBatch) -> StepInputs:
        size = self.block_size
        rows = len(batch.requests)
        starts = np.zeros(rows + 1, np.int32)
        np.cumsum(batch.num_scheduled_tokens, out=starts[1:])
        seq_lens = np.empty(rows, np.int32)
        width = max(len(request.block_table) for request in batch.requests)
        table = np.zeros((rows, width), np.int32)
        sampling: list[int] = []
        for row, (request, count) in enumerate(zip(batch.requests, batch.num_scheduled_tokens, strict=True)):
            begin, first = int(starts[row]), request.num_computed_tokens
            blocks = request.block_table
            table[row, : len(blocks)] = blocks
            seq_lens[row] = first + count
            if count == 1:  # decode: no array work
                self._ids[begin] = request.token_ids[first]
                self._positions[begin] = first
                self._slots[begin] = blocks[first // size] * size + first % size
            else:
                end = begin + count
                positions = np.arange(first, first + count)
                self._ids[begin:end] = request.token_ids[first : first + count]
                self._positions[begin:end] = positions
                self._slots[begin:end] = table[row, positions // size] * size + positions % size
            if batch.samples(row):
                sampling.append(begin + count - 1)
        total = int(starts[-1])
        return StepInputs(
            input_ids=self._ids[:total],
            positions=self._positions[:total],
            slot_mapping=self._slots[:total],
            block_table=table,
            query_start_loc=starts,
            seq_lens=seq_lens,
            logits_indices=np.array(sampling, np.int64),
        )
