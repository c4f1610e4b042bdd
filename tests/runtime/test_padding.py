"""Padding of a step: few shapes, no single row, and rows of the real sequences as they were."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.batch import StepInputs
from runtime.padding import MAX_PADDING, num_lengths, pad, padded_length


def step(tokens: list[int], past: list[int]) -> StepInputs:
    """Sequences with `tokens` new tokens after `past`, sequence n in block n of 64 tokens; its table has block 20 + n too."""
    starts = np.cumsum([0, *tokens]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + t) for t, p in zip(tokens, past, strict=True)])
    rows = np.repeat(np.arange(len(tokens)), tokens)
    return StepInputs(
        input_ids=np.arange(100, 100 + starts[-1], dtype=np.int64),
        positions=positions,
        slot_mapping=(rows * 64 + positions).astype(np.int32),
        block_table=np.array([[n, 20 + n] for n in range(len(tokens))], np.int32),
        query_start_loc=starts,
        seq_lens=np.array([p + t for t, p in zip(tokens, past, strict=True)], np.int32),
        logits_indices=(starts[1:] - 1).astype(np.int64),
    )


@pytest.mark.parametrize(
    ("num_tokens", "length"),
    [(1, 2), (2, 2), (31, 31), (32, 32), (33, 40), (40, 40), (41, 48), (128, 128), (129, 160), (512, 512)],
)
def test_padded_length(num_tokens: int, length: int) -> None:
    assert padded_length(num_tokens) == length
    assert padded_length(num_tokens, least=1) == (1 if num_tokens == 1 else length)


def test_steps_up_to_2048_tokens_have_few_lengths() -> None:
    lengths = [padded_length(n) for n in range(1, 2049)]
    assert len(set(lengths)) == 31 + 12 + 60
    assert max(length - n for n, length in enumerate(lengths, start=1)) == MAX_PADDING
    assert lengths == sorted(lengths)
    assert [num_lengths(n) for n in range(1, 2049)] == [len(set(lengths[:n])) for n in range(1, 2049)]
    assert num_lengths(10**12) == 31_250_000_039  # at once


def test_a_step_that_needs_none_is_left_alone() -> None:
    inputs = step([1, 1], [5, 9])
    assert pad(inputs, 7, 64) is inputs
    single = step([1], [5])
    assert pad(single, 7, 64, least=1) is single


def test_one_row_gets_a_neighbour_in_the_scratch_block() -> None:
    padded = pad(step([1], [5]), 7, 64)
    assert padded.input_ids.tolist() == [100, 0]
    assert padded.positions.tolist() == [5, 0]
    assert padded.slot_mapping.tolist() == [5, 7 * 64]
    assert padded.block_table.tolist() == [[0, 20], [7, 0]]
    assert padded.query_start_loc.tolist() == [0, 1, 2]
    assert padded.seq_lens.tolist() == [6, 1]
    assert padded.logits_indices.tolist() == [0]
    assert [array.dtype for array in vars(padded).values()] == [array.dtype for array in vars(step([1], [5])).values()]


def test_a_long_step_gets_one_more_sequence() -> None:
    padded = pad(step([30, 5], [0, 2]), 9, 64)
    assert padded.input_ids.tolist() == [*range(100, 135), *[0] * 5]
    assert padded.positions.tolist() == [*range(30), *range(2, 7), *range(5)]
    assert padded.query_start_loc.tolist() == [0, 30, 35, 40]
    assert padded.seq_lens.tolist() == [30, 7, 5]
    assert padded.slot_mapping[35:].tolist() == [9 * 64 + n for n in range(5)]
    assert padded.block_table.tolist() == [[0, 20], [1, 21], [9, 0]]
    assert padded.logits_indices.tolist() == [29, 34]
