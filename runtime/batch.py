"""From a scheduling decision to the arrays of one step. Owns reusable host buffers; knows nothing about executors.

Shapes   as in contract.py: T = Σ num_scheduled_tokens, B = len(requests), R = rows that produce a token
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Arrays for one `Executor.execute`, valid until the next call of `BatchBuilder.build`.

    One that cannot be written to keeps its values for good, so an executor that meets it again need not copy it again.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int64]


class BatchBuilder:
    """Keeps what does not change from step to step: a row whose block table only grew costs its new blocks, not its length, and
    arrays that came out as in the step before are those of the step before.

    Relies on `Request.block_table` being a new list whenever it does anything but grow.
    """

    def __init__(self, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self._ids = np.empty(max_num_batched_tokens, np.int64)
        self._positions = np.empty(max_num_batched_tokens, np.int64)
        self._slots = np.empty(max_num_batched_tokens, np.int32)
        self._table = np.zeros((1, 1), np.int32)
        self._sources: list[list[int]] = []  # the list each row of _table was filled from …
        self._lengths: list[int] = []  # … and how much of it
        self._built_table = np.zeros((0, 0), np.int32)
        self._built: dict[str, tuple[list[int], npt.NDArray]] = {}

    def build(self, batch: ScheduledBatch) -> StepInputs:
        """The inputs of a batch that has at least one row."""
        size = self.block_size
        total = batch.num_tokens
        if total > len(self._ids):  # a whole prompt past the budget, with chunked prefill off
            self._ids, self._positions = np.empty(total, np.int64), np.empty(total, np.int64)
            self._slots = np.empty(total, np.int32)
        filled = self._fill_table([request.block_table for request in batch.requests])
        starts, seq_lens, sampling = [0], [], []
        ids: list[int] = []  # of the run of single-token rows that ends at the current one
        positions: list[int] = []
        slots: list[int] = []
        end = 0
        for row, (request, count) in enumerate(zip(batch.requests, batch.num_scheduled_tokens, strict=True)):
            first = request.num_computed_tokens
            if count == 1:
                ids.append(request.token_ids[first])
                positions.append(first)
                slots.append(request.block_table[first // size] * size + first % size)
            else:
                self._write_run(end, ids, positions, slots)
                place = slice(end, end + count)
                where = np.arange(first, first + count)
                self._ids[place] = request.token_ids[first : first + count]
                self._positions[place] = where
                self._slots[place] = self._table[row, where // size] * size + where % size
            end += count
            starts.append(end)
            seq_lens.append(first + count)
            if first + count == request.num_tokens:
                sampling.append(end - 1)
        if len(ids) == total:  # made anew: to write into arrays, numpy gives the interpreter's lock to the output thread
            input_ids, at, slot_mapping = np.array(ids, np.int64), np.array(positions, np.int64), np.array(slots, np.int32)
        else:
            self._write_run(end, ids, positions, slots)
            input_ids, at, slot_mapping = self._ids[:total], self._positions[:total], self._slots[:total]
        shape = rows, width = len(batch.requests), max(self._lengths[: len(batch.requests)])
        if filled or self._built_table.shape != shape:
            self._built_table = self._table[:rows, :width].copy()
            self._built_table.flags.writeable = False
        return StepInputs(
            input_ids=input_ids,
            positions=at,
            slot_mapping=slot_mapping,
            block_table=self._built_table,
            query_start_loc=self._array("query_start_loc", starts, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            logits_indices=self._array("logits_indices", sampling, np.int64),
        )

    def _array(self, name: str, values: list[int], dtype: type[np.integer]) -> npt.NDArray:
        """The array that was made of these values in the step before, or a new one."""
        before, array = self._built.get(name, (None, None))
        if array is None or before != values:
            array = np.array(values, dtype)
            array.flags.writeable = False
            self._built[name] = values, array
        return array

    def _write_run(self, end: int, ids: list[int], positions: list[int], slots: list[int]) -> None:
        """Write the collected single-token rows, which end before index `end`, and empty the lists."""
        if ids:
            place = slice(end - len(ids), end)
            self._ids[place], self._positions[place], self._slots[place] = ids, positions, slots
            ids.clear()
            positions.clear()
            slots.clear()

    def _fill_table(self, tables: Sequence[list[int]]) -> bool:
        """Whether anything was written."""
        written = False
        rows, width = len(tables), max(map(len, tables))
        if rows > self._table.shape[0] or width > self._table.shape[1]:
            grown = np.zeros((max(rows, self._table.shape[0]), max(2 * width, self._table.shape[1])), np.int32)
            grown[: self._table.shape[0], : self._table.shape[1]] = self._table
            self._table = grown
        for row, blocks in enumerate(tables):
            length = len(blocks)
            if row == len(self._sources):
                self._sources.append([])
                self._lengths.append(0)
            filled = self._lengths[row]
            if self._sources[row] is blocks and length >= filled:
                if length > filled:
                    self._table[row, filled:length] = blocks[filled:]
                    written = True
            else:
                self._table[row, :length] = blocks
                self._table[row, length:filled] = 0
                self._sources[row] = blocks
                written = True
            self._lengths[row] = length
        return written
