"""The arrays of a step, number by number, and that keeping them between steps never shows."""

import random

import numpy as np
from fakes import make_request

from runtime.batch import BatchBuilder, ScheduledBatch, StepInputs
from runtime.request import Request


def at(request: Request, num_computed_tokens: int, block_table: list[int]) -> Request:
    request.num_computed_tokens = num_computed_tokens
    request.block_table = block_table
    return request


def assert_equal(inputs: StepInputs, **expected: list) -> None:
    for name, values in expected.items():
        array = getattr(inputs, name)
        assert array.tolist() == values, name
        assert array.dtype == (np.int64 if name in ("input_ids", "positions", "logits_indices") else np.int32), name
        assert array.flags.c_contiguous, name


def test_mixed_step_of_two_decodes_a_chunk_and_a_last_chunk():
    first = at(make_request("first", [10, 11, 12, 13, 14]), 4, [7, 3])
    second = at(make_request("second", [20]), 0, [5])
    chunk = at(make_request("chunk", range(30, 42)), 3, [2, 0, 6])  # positions 3 to 8 of 12
    last = at(make_request("last", range(50, 53)), 1, [9])
    batch = ScheduledBatch((first, second, chunk, last), (1, 1, 6, 2))
    assert batch.num_tokens == 10 and batch
    assert [batch.samples(row) for row in range(4)] == [True, True, False, True]
    assert_equal(
        BatchBuilder(block_size=4, max_num_batched_tokens=16).build(batch),
        input_ids=[14, 20, 33, 34, 35, 36, 37, 38, 51, 52],
        positions=[4, 0, 3, 4, 5, 6, 7, 8, 1, 2],
        slot_mapping=[12, 20, 11, 0, 1, 2, 3, 24, 37, 38],
        block_table=[[7, 3, 0], [5, 0, 0], [2, 0, 6], [9, 0, 0]],
        query_start_loc=[0, 1, 2, 8, 10],
        seq_lens=[5, 1, 9, 3],
        logits_indices=[0, 1, 9],
    )


def test_single_tokens_on_both_sides_of_a_chunk():
    before = at(make_request("before", [1, 2]), 1, [0])
    chunk = at(make_request("chunk", [3, 4, 5]), 0, [1])
    after = at(make_request("after", [6]), 0, [2])
    assert_equal(
        BatchBuilder(4, 16).build(ScheduledBatch((before, chunk, after), (1, 3, 1))),
        input_ids=[2, 3, 4, 5, 6],
        positions=[1, 0, 1, 2, 0],
        slot_mapping=[1, 4, 5, 6, 8],
        logits_indices=[0, 3, 4],
    )


def test_a_step_that_samples_nothing_has_no_logits_rows():
    chunk = at(make_request("chunk", range(8)), 0, [0])
    inputs = BatchBuilder(4, 16).build(ScheduledBatch((chunk,), (4,)))
    assert_equal(inputs, logits_indices=[])


def test_a_prompt_past_the_budget_makes_the_buffers_grow():
    builder = BatchBuilder(4, max_num_batched_tokens=2)
    request = at(make_request("long", range(5)), 0, [1, 0])
    assert_equal(builder.build(ScheduledBatch((request,), (5,))), input_ids=[0, 1, 2, 3, 4], slot_mapping=[4, 5, 6, 7, 0])


def test_rows_are_refilled_when_tables_grow_are_replaced_or_change_places():
    builder = BatchBuilder(2, 8)
    first = at(make_request("first", range(9)), 3, [4, 5])
    second = at(make_request("second", range(9)), 5, [1, 2, 3])
    assert_equal(builder.build(ScheduledBatch((first, second), (1, 1))), block_table=[[4, 5, 0], [1, 2, 3]])
    first.block_table.append(6)
    assert_equal(builder.build(ScheduledBatch((first, second), (1, 1))), block_table=[[4, 5, 6], [1, 2, 3]])
    assert_equal(builder.build(ScheduledBatch((second,), (1,))), block_table=[[1, 2, 3]])
    at(second, 1, [8])  # preempted and started again
    assert_equal(builder.build(ScheduledBatch((second, first), (1, 1))), block_table=[[8, 0, 0], [4, 5, 6]])
    assert_equal(builder.build(ScheduledBatch((second,), (1,))), block_table=[[8]])


def test_a_growing_table_costs_its_new_blocks_only():
    class Watched(list):
        touched = 0

        def __getitem__(self, key):
            result = super().__getitem__(key)
            self.touched += len(result) if isinstance(key, slice) else 1
            return result

    builder = BatchBuilder(1, 8)
    request = at(make_request("long", range(1001)), 999, Watched(range(1000)))
    builder.build(ScheduledBatch((request,), (1,)))
    request.num_computed_tokens = 1000
    request.block_table.append(1000)
    request.block_table.touched = 0
    inputs = builder.build(ScheduledBatch((request,), (1,)))
    assert inputs.block_table.tolist() == [list(range(1001))]
    assert request.block_table.touched == 2  # the new block, and the one the token is written to


def test_arrays_that_come_out_as_before_are_those_of_the_step_before():
    builder = BatchBuilder(2, 8)
    first, second = at(make_request("first", range(9)), 3, [4, 5]), at(make_request("second", range(9)), 4, [1, 2, 3])
    batch = ScheduledBatch((first, second), (1, 1))
    before = builder.build(batch)
    second.num_computed_tokens = 5
    after = builder.build(batch)
    for name in ("block_table", "query_start_loc", "logits_indices"):
        assert getattr(after, name) is getattr(before, name)
        assert not getattr(after, name).flags.writeable
    assert after.positions.tolist() == [3, 5] and after.seq_lens.tolist() == [4, 6]
    first.block_table.append(6)
    grown = builder.build(ScheduledBatch((first, second), (2, 1)))
    assert before.block_table.tolist() == [[4, 5, 0], [1, 2, 3]]
    assert_equal(grown, block_table=[[4, 5, 6], [1, 2, 3]], query_start_loc=[0, 2, 3], logits_indices=[])
    alone = builder.build(ScheduledBatch((second,), (1,)))
    assert_equal(alone, block_table=[[1, 2, 3]], query_start_loc=[0, 1])


def test_a_kept_builder_gives_what_a_fresh_one_gives():
    rng = random.Random(0)
    kept = BatchBuilder(4, 8)
    requests = [at(make_request(str(i), range(100 * i, 100 * i + 60)), 0, []) for i in range(6)]
    for _ in range(300):
        rows = rng.sample(requests, rng.randint(1, 6))
        counts = []
        for request in rows:
            if rng.random() < 0.1 or request.num_tokens - request.num_computed_tokens < 5:
                at(request, 0, [])
            count = rng.choice([1, 1, 1, 2, 5])
            missing = -(-(request.num_computed_tokens + count) // 4) - len(request.block_table)
            request.block_table.extend(rng.sample(range(100), missing))
            counts.append(count)
        batch = ScheduledBatch(tuple(rows), tuple(counts))
        inputs, fresh = kept.build(batch), BatchBuilder(4, 64).build(batch)
        assert_equal(inputs, **{name: getattr(fresh, name).tolist() for name in StepInputs.__dataclass_fields__})
        for request, count in zip(rows, counts, strict=True):
            request.num_computed_tokens += count
