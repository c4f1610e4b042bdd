"""How a step's work is split: plan_splits, interpreted, with numbers worked out on paper; and the grids that bound it."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import run_plan

from plugins.paged_attention import tuning
from plugins.paged_attention.tuning import AttentionVariant


def test_decodes_that_fill_the_machine_are_not_split(interpreter):
    # 8 slots, 8 sequences of 4 tiles: one round of 4 tiles beats any split, which would add rounds or merging.
    plan = interpreter.call(run_plan, ((1, 64),) * 8, block_tokens=4, slots=8)
    assert plan == [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 8 + [-9]]


def test_one_long_sequence_uses_every_slot(interpreter):
    # 64 tiles over 8 slots: 8 splits of 8 tiles.
    plan = interpreter.call(run_plan, ((1, 1024),), block_tokens=4, slots=8)
    assert plan == [[0, 8], [0, 1], [8, -9]]


def test_splits_follow_the_length(interpreter):
    # 40 tiles on 4 slots. In 1 round: splits of 10, 4 + 1 items, which is 2 rounds of (10 + 2); in 2: splits of 5, 7 + 1 items,
    # 2 rounds of (5 + 2) and so on; 8 rounds of less are dearer.
    plan = interpreter.call(run_plan, ((1, 560), (1, 80)), block_tokens=4, slots=4)
    assert plan == [[0, 7, 8], [0, 1, 2], [7, 1, -9]]


def test_a_prompt_has_a_block_for_every_few_tokens(interpreter):
    # 9 new tokens in blocks of 4 are 3 blocks; the other sequences have one each, the empty one included.
    plan = interpreter.call(run_plan, ((9, 9), (1, 0), (2, 16)), block_tokens=4, slots=64)
    assert plan == [[0, 3, 4, 5], [0, 3, 4, 5], [1, 1, 1, -9]]


def test_sequences_outside_the_query_range_get_no_work(interpreter):
    plan = interpreter.call(run_plan, ((9, 9), (1, 20), (2, 16), (1, 8)), block_tokens=4, slots=64, query_lens=(1, 1))
    assert plan[0] == [0, 0, 1, 1, 2]
    assert plan[1] == [0, 0, 1, 1, 2]


def test_a_window_limits_the_tiles_that_are_counted(interpreter):
    # window 16 in tiles of 16 with blocks of 4 tokens: at most ceil(20 / 16) + 1 = 3 tiles, so nothing is worth splitting by 2.
    plan = interpreter.call(run_plan, ((1, 1600),), block_tokens=4, slots=8, window=16, fixed_tiles=2)
    assert plan[2][0] == 2
    plan = interpreter.call(run_plan, ((1, 1600),), block_tokens=4, slots=8, fixed_tiles=2)
    assert plan[2][0] == 50


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_covers_all_blocks_and_fits_its_grid(interpreter, seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(int(rng.integers(1, 11))):
        count = int(rng.choice([1, 1, 3, 40]))
        rows.append((count, 0 if rng.random() < 0.1 else count + int(rng.integers(0, 900))))
    slots, block_tokens = int(rng.integers(1, 30)), int(rng.choice([2, 4, 16]))
    plan = interpreter.call(run_plan, tuple(rows), block_tokens=block_tokens, slots=slots)
    blocks = [-(-count // block_tokens) for count, _ in rows]
    splits = plan[2][:-1]
    assert plan[1] == [0, *np.cumsum(blocks)]
    assert plan[0] == [0, *np.cumsum([b * s for b, s in zip(blocks, splits, strict=True)])]
    assert all(1 <= s <= max(1, -(-length // (16 * tuning.MIN_TILES))) for s, (_, length) in zip(splits, rows, strict=True))
    grid = tuning.attention_grid(
        num_tokens=sum(count for count, _ in rows), num_seqs=len(rows), num_heads=16, num_kv_heads=1, head_dim=64,
        block_m=16 * block_tokens, resident_programs=slots,
    )  # fmt: skip
    assert grid.block_tokens == block_tokens and grid.slots == slots
    assert plan[0][-1] <= grid.work_items
    assert plan[1][-1] <= grid.blocks


def test_grid_of_a_decode_step():
    # 32 query heads on 8 KV heads: 4 heads share a program, so 16 rows hold 4 tokens. 264 resident programs are 33 per KV head.
    grid = tuning.attention_grid(
        num_tokens=64, num_seqs=64, num_heads=32, num_kv_heads=8, head_dim=128, block_m=16, resident_programs=264, max_query_len=1
    )
    assert (grid.block_tokens, grid.parts, grid.slots, grid.blocks) == (4, 8, 33, 64)
    assert grid.work_items == 33 * 4 + 64
    assert (grid.merge_rows, grid.rows_per_program) == (4, 1)
    assert grid.partial_bytes == 196 * 8 * 16 * 128 * 4
    assert grid.lse_bytes == 196 * 8 * 16 * 4
    assert grid.plan_bytes == 1024  # 3 * 65 * 4 = 780, rounded up
    assert grid.workspace_bytes == grid.plan_bytes + grid.partial_bytes + grid.lse_bytes


def test_grid_with_fixed_splits_holds_the_longest_sequence():
    grid = tuning.attention_grid(
        num_tokens=4, num_seqs=4, num_heads=8, num_kv_heads=8, head_dim=64, block_m=16, resident_programs=100, fixed_splits=5
    )
    assert grid.work_items == 4 * 5


@pytest.mark.parametrize(
    "arch, registers, shared, warps, blocks",
    [
        (90, 154, 38916, 4, 3),  # registers: 160 * 128 = 20480 of 65536
        (90, 32, 100 << 10, 4, 2),  # shared memory: 101 KiB of 228
        (89, 32, 0, 4, 12),  # threads: 1536 / 128
        (75, 32, 0, 1, 16),  # blocks
        (80, 255, 0, 8, 1),
    ],
)
def test_occupancy(arch, registers, shared, warps, blocks):
    assert tuning.blocks_per_sm(arch, registers=registers, shared_bytes=shared, num_warps=warps) == blocks


def test_turing_has_no_bf16():
    assert not AttentionVariant("decode", 64, "bf16", "bf16", "bf16", 64).supported(75)
    assert not AttentionVariant("decode", 64, "fp16", "bf16", "fp8", 64).supported(75)
    assert AttentionVariant("decode", 64, "fp16", "fp8", "fp8", 64).supported(75)
    assert AttentionVariant("decode", 64, "bf16", "bf16", "bf16", 64).supported(80)
