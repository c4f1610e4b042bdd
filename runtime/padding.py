"""Pads a ragged step with a sequence of nobody's, so that the CPU's kernels see few shapes and never a step of one row.

Why      OpenVINO's attention sums a step of a single row in another order than the same row in a batch. The difference is 1e-6,
         but layers that quantize their inputs on the fly round it up: logits of SmolLM2 int8 moved by 1.07. And every number of
         tokens a quantized layer meets for the first time costs 0.6 MB of generated kernels that stay.
         bf16 sums in another order for any other number of rows, so its steps of one row stay alone (`least` 1).
Shapes   up to EXACT tokens as they are (decodes), then multiples of 8 up to 128, then of 32: at most 31 tokens of padding
"""

from __future__ import annotations

import numpy as np

from runtime.batch import StepInputs

EXACT = 32
MAX_PADDING = 31


def padded_length(num_tokens: int, least: int = 2) -> int:
    """Tokens of the step to run."""
    if num_tokens <= EXACT:
        return max(least, num_tokens)
    multiple = 8 if num_tokens <= 128 else 32
    return -(-num_tokens // multiple) * multiple


def num_lengths(max_tokens: int) -> int:
    """How many lengths steps of 1 to `max_tokens` tokens are padded to."""
    by_8, by_32 = min(max_tokens, 128) - EXACT, max_tokens - 128
    return max(1, min(max_tokens, EXACT) - 1) + -(-max(0, by_8) // 8) + -(-max(0, by_32) // 32)


def pad(inputs: StepInputs, scratch_block: int, block_size: int, least: int = 2) -> StepInputs:
    """`inputs` with a last sequence of new tokens 0 in `scratch_block` where padding is due; rows of logits stay the same."""
    num_tokens = len(inputs.input_ids)
    extra = padded_length(num_tokens, least) - num_tokens
    if extra == 0:
        return inputs
    assert extra <= min(MAX_PADDING, block_size), f"{extra} tokens of padding for blocks of {block_size}"
    own = np.arange(extra)
    rows, width = inputs.block_table.shape
    block_table = np.zeros((rows + 1, width), np.int32)
    block_table[:rows] = inputs.block_table
    block_table[rows, 0] = scratch_block
    return StepInputs(
        input_ids=np.concatenate([inputs.input_ids, np.zeros(extra, np.int64)]),
        positions=np.concatenate([inputs.positions, own]),
        slot_mapping=np.concatenate([inputs.slot_mapping, (scratch_block * block_size + own).astype(np.int32)]),
        block_table=block_table,
        query_start_loc=np.append(inputs.query_start_loc, np.int32(num_tokens + extra)),
        seq_lens=np.append(inputs.seq_lens, np.int32(extra)),
        logits_indices=inputs.logits_indices,
    )
