"""The inputs of one step in device memory, padded to a shape, brought there by one copy from pinned memory.

    ┌─ vectors of the step ─────────────────────┐┌─ block table ──────────────┐
    … input_ids │ positions │ … │ seq_lens       ││ row 0 │ row 1 │ …           │       one device buffer
                                                 ^ split

The vectors are packed against `split` from below, so that they and the changed rows of the table are one range and one copy. The
table stays on the device: rows that did not change since the last step are not sent, which is most steps of decoding. Addresses
depend on the shape only, never on the step.

Padding      tokens of slot -1 that belong to sequences of length 0: kernels store nothing for them and give them zeros. With no
             sequence left they belong to none, and their rows hold anything: no layer mixes rows, and no logits are taken there
Staging      two pinned buffers in turn: the host fills one while the copy out of the other may be under way
Alignment    256 bytes, as TensorRT asks of its tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime import contract
from runtime.batch import StepInputs
from runtime.executors.cuda import Bytes, Cuda

ALIGNMENT = 256
NUM_STAGING = 2
NO_SLOT = -1


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StepShape:
    """What a step is padded to."""

    num_tokens: int
    num_seqs: int
    num_logits: int

    def holds(self, inputs: StepInputs) -> bool:
        return (
            len(inputs.input_ids) <= self.num_tokens
            and len(inputs.seq_lens) <= self.num_seqs
            and len(inputs.logits_indices) <= self.num_logits
        )

    def vector_lengths(self) -> dict[str, int]:
        return {
            contract.INPUT_IDS: self.num_tokens,
            contract.POSITIONS: self.num_tokens,
            contract.SLOT_MAPPING: self.num_tokens,
            contract.QUERY_START_LOC: self.num_seqs + 1,
            contract.SEQ_LENS: self.num_seqs,
            contract.LOGITS_INDICES: self.num_logits,
        }


@dataclass(frozen=True)
class Place:
    offset: int  # bytes before `split`, negative
    length: int
    dtype: np.dtype


def vector_places(shape: StepShape) -> tuple[dict[str, Place], int]:
    """Where each vector lies, and how many bytes before `split` they begin."""
    sizes = {}
    for name, length in shape.vector_lengths().items():
        dtype = np.dtype(contract.INPUT_DTYPES[name])
        sizes[name] = (length, dtype, aligned(length * dtype.itemsize))
    begin = sum(size for _, _, size in sizes.values())
    places, offset = {}, -begin
    for name, (length, dtype, size) in sizes.items():
        places[name] = Place(offset, length, dtype)
        offset += size
    return places, begin


class StepBuffer:
    """Owns the device buffer, its pinned staging and the host's copy of the block table."""

    def __init__(self, cuda: Cuda, largest: StepShape, table_width: int) -> None:
        self.table_width = table_width
        self._cuda = cuda
        self._row_bytes = 4 * table_width
        self._split = vector_places(largest)[1]
        size = self._split + largest.num_seqs * self._row_bytes
        self._device = cuda.allocate(size)
        self._staging = [cuda.allocate_host(size) for _ in range(NUM_STAGING)]
        self._table = np.zeros((largest.num_seqs, table_width), np.int32)  # what the device has, once the stream gets there
        self._unsent = largest.num_seqs  # rows of it the device has never been sent

    def address(self, name: str, shape: StepShape) -> int:
        """Of one of contract.STEP_INPUTS, for steps of this shape."""
        offset = 0 if name == contract.BLOCK_TABLE else vector_places(shape)[0][name].offset
        return self._device + self._split + offset

    def send(self, inputs: StepInputs, shape: StepShape, slot: int, stream: Any) -> None:
        """Fill staging buffer `slot`, which no copy may be reading, and enqueue its copy to the device."""
        assert shape.holds(inputs), f"a step of {len(inputs.input_ids)} tokens does not fit {shape}"
        address, staging = self._staging[slot]
        places, begin = vector_places(shape)
        views = {name: _view(staging, self._split + place.offset, place) for name, place in places.items()}
        fill_vectors(views, inputs, shape)
        rows = self._update_table(inputs.block_table)
        end = rows * self._row_bytes
        staging[self._split : self._split + end] = self._table[:rows].reshape(-1).view(np.uint8)
        first = self._split - begin
        self._cuda.to_device(self._device + first, address + first, begin + end, stream)

    def _update_table(self, table: npt.NDArray[np.int32]) -> int:
        """Take over the step's rows; how many rows, from the first, have to be sent. What lies right of a row is not read."""
        rows, width = table.shape
        assert width <= self.table_width, f"a sequence of {width} blocks, in an engine for {self.table_width}"
        changed = np.flatnonzero((self._table[:rows, :width] != table).any(axis=1))
        self._table[:rows, :width] = table
        count = max(int(changed[-1]) + 1 if len(changed) else 0, self._unsent)
        self._unsent = 0
        return count

    def close(self) -> None:
        self._cuda.free(self._device)
        for address, _ in self._staging:
            self._cuda.free_host(address)
        self._staging = []


def _view(staging: Bytes, offset: int, place: Place) -> npt.NDArray[Any]:
    return staging[offset : offset + place.length * place.dtype.itemsize].view(place.dtype)


def fill_vectors(views: Mapping[str, npt.NDArray[Any]], inputs: StepInputs, shape: StepShape) -> None:
    """The step, then padding: one token for each unused sequence while they last, what remains for the last of them."""
    num_tokens, num_seqs = len(inputs.input_ids), len(inputs.seq_lens)
    for name, filler in (
        (contract.INPUT_IDS, 0),
        (contract.POSITIONS, 0),
        (contract.SLOT_MAPPING, NO_SLOT),
        (contract.SEQ_LENS, 0),
        (contract.LOGITS_INDICES, 0),
    ):
        values = getattr(inputs, name)
        views[name][: len(values)] = values
        views[name][len(values) :] = filler
    starts = views[contract.QUERY_START_LOC]
    starts[: num_seqs + 1] = inputs.query_start_loc
    unused = shape.num_seqs - num_seqs
    starts[num_seqs + 1 :] = np.minimum(num_tokens + 1 + np.arange(unused), shape.num_tokens)
    if unused:
        starts[-1] = shape.num_tokens
