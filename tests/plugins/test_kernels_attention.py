"""The attention kernels against the reference, interpreted on the CPU.

Tolerance: fp16 rounds q, the probabilities and the output to 2^-11; relative error in the norm stays under 1e-3. Quantized pools
have the same bound, because the reference reads the same quantized values.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_cases import DECODE, PREFILL, Case, expected, make_inputs, relative_error, replace, run_attention, run_decode

from plugins.paged_attention import reference
from plugins.paged_attention.tuning import Tiles

KV_KINDS = (
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("fp8soft", "fp8soft"),
    ("int8", "int8"),
    ("fp16", "fp8"),
    ("bf16", "int8"),
    ("int8", "fp8soft"),
)
HEADS = ((2, 2), (8, 2), (8, 1), (6, 1))  # groups of 1, 4, 8, and MQA with a group that does not divide BLOCK_M
BATCHES = (
    ((1, 37), (1, 0), (1, 5), (1, 90)),  # decode, with padding
    ((1, 70), (5, 5), (1, 0), (7, 40)),  # mixed
    ((3, 50), (3, 3)),  # verification of drafts
    ((1, 1),),
)
FEATURES = ({}, {"window": 24}, {"softcap": 5.0}, {"sinks": True}, {"window": 20, "softcap": 3.0, "sinks": True})


def _cases() -> list[Case]:
    """Every KV format × page size × grouping; batch, feature, head size and specialisation take turns of coprime lengths."""
    cases = []
    for index, (kinds, block_size, heads) in enumerate(itertools.product(KV_KINDS, (16, 64), HEADS)):
        cases.append(
            Case(
                BATCHES[(index + index // 8) % 3] if index % 11 else BATCHES[3],
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=(64, 80, 96, 128, 64, 256, 64)[index % 7],
                block_size=block_size,
                key_kind=kinds[0],
                value_kind=kinds[1],
                tiles=(DECODE, PREFILL, DECODE)[index % 3],
                slots=2 + 6 * (index % 2),
                seed=index,
                **FEATURES[index % 5],
            )
        )
    return cases


def _name(case: Case) -> str:
    features = "".join(
        (f"-w{case.window}" * bool(case.window), "-cap" * bool(case.softcap), "-sinks" * case.sinks),
    )
    heads = f"h{case.num_heads}of{case.num_kv_heads}-d{case.head_dim}"
    return f"{case.key_kind}-{case.value_kind}-b{case.block_size}-{heads}-t{case.tiles.block_m}{features}-{case.seed}"


@pytest.mark.parametrize("case", _cases(), ids=_name)
def test_attention_equals_the_reference(interpreter, case):
    inputs = make_inputs(case)
    out, _ = interpreter.call(run_attention, case, inputs)
    wanted = expected(case, inputs)
    assert np.isfinite(out).all()
    assert relative_error(out, wanted) < 1e-3
    empty = [row for row, (_, length) in enumerate(case.rows) if length == 0]
    for row in empty:
        assert not out[inputs.query_start_loc[row] : inputs.query_start_loc[row + 1]].any()


@pytest.mark.parametrize("block_size, length", [(16, 75), (64, 100)])
def test_pages_before_the_window_are_never_read(interpreter, block_size, length):
    """The window begins in the middle of a tile, of which an earlier page was freed and now holds NaN."""
    case = Case(((1, length),), window=24, block_size=block_size, tiles=Tiles(16, 128 if block_size == 64 else 32, 4, 1))
    inputs = make_inputs(case)
    first = length - 24
    assert np.isnan(inputs.value_pool[inputs.block_table[0, first // block_size - 1]]).all()
    assert first // case.tiles.tile * case.tiles.tile < first // block_size * block_size
    out, _ = interpreter.call(run_attention, case, inputs)
    assert relative_error(out, expected(case, inputs)) < 1e-3


def test_group_larger_than_a_block_takes_several_programs(interpreter):
    case = Case(((1, 40), (3, 9)), num_heads=40, num_kv_heads=1, sinks=True, slots=1)
    inputs = make_inputs(case)
    out, _ = interpreter.call(run_attention, case, inputs)
    assert relative_error(out, expected(case, inputs)) < 1e-3


@pytest.mark.parametrize("slots, splits", [(1, 2), (8, 4)])
def test_result_does_not_depend_on_the_number_of_splits(interpreter, slots, splits):
    case = Case(((1, 120), (1, 17)), slots=slots, tiles=Tiles(16, 16, 4, 1), sinks=True)
    inputs = make_inputs(case)
    out, plan = interpreter.call(run_attention, case, inputs)
    assert plan[2, 0] == splits
    assert relative_error(out, expected(case, inputs)) < 1e-3


def test_fixed_splits_make_a_row_the_same_alone_and_in_a_batch(interpreter):
    alone = Case(((1, 75),), fixed_tiles=2, tiles=Tiles(16, 16, 4, 1))
    inputs = make_inputs(alone)
    batch = replace(alone, rows=((1, 75), (1, 33), (1, 90)))
    mixed = make_inputs(batch)
    mixed.query[0] = inputs.query[0]
    for page in range(5):
        mixed.key_pool[mixed.block_table[0, page]] = inputs.key_pool[inputs.block_table[0, page]]
        mixed.value_pool[mixed.block_table[0, page]] = inputs.value_pool[inputs.block_table[0, page]]
    first, first_plan = interpreter.call(run_attention, alone, inputs)
    second, second_plan = interpreter.call(run_attention, batch, mixed)
    assert first_plan[2, 0] == second_plan[2, 0] == 3
    assert np.array_equal(first[0], second[0])


def test_one_step_may_use_both_specialisations(interpreter):
    """Decodes by one launch, the rest by another: each leaves the other's rows untouched."""
    case = Case(((1, 40), (9, 9), (1, 0), (20, 33)), query_lens=(1, 1))
    inputs = make_inputs(case)
    decodes, _ = interpreter.call(run_attention, case, inputs)
    rest, _ = interpreter.call(run_attention, replace(case, query_lens=(2, 2**30), tiles=PREFILL), inputs)
    single = np.array([True] + [False] * 9 + [True] + [False] * 20)
    assert np.isnan(decodes[~single]).all() and np.isnan(rest[single]).all()
    merged = np.where(single[:, None, None], decodes, rest)
    assert relative_error(merged, expected(case, inputs)) < 1e-3


@pytest.mark.parametrize("kind", ["fp8", "fp8soft", "int8"])
def test_every_code_of_an_8_bit_format_is_read_exactly(interpreter, kind):
    found = interpreter.call(run_decode, kind)
    wanted = np.arange(256).astype(np.uint8).view(np.int8) if kind == "int8" else reference.e4m3_values()
    number = np.isfinite(wanted.astype(np.float32))
    assert np.array_equal(found[number], wanted[number].astype(np.float16))
