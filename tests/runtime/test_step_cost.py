"""The cost of steps is recovered from noisy times, and prompts join a step of decodes as far as it allows and no further."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from fakes import add_decoding, add_prompt, finish_all, make_scheduler, run_step
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.padding import padded_length
from runtime.step_cost import FIRST_CHUNK, MIN_CHUNK, PromptPace, StepCost, Work, work_of

TRUE = (6e-3, 2e-4, 2e-7, 2e-6)  # seconds: of any step, per token, per pair, per cached token; SmolLM2 on two cores
Rows = Sequence[tuple[int, int]]


def seconds_of(rows: Rows) -> float:
    work = work_of(rows)
    return sum(a * b for a, b in zip(TRUE, (1, work.tokens, work.pairs, work.cached), strict=True))


def learned(pace: PromptPace) -> PromptPace:
    """Shown exact times of decodes and of prompts at many positions."""
    for step in range(40):
        decodes = [(50 * step, 1)] * (step % 8 + 1)
        pace.cost.observe(decodes, seconds_of(decodes))
        mixed = [*decodes, (100 * step, 512 if step == 0 else 8 + 7 * step % 60)]
        pace.cost.observe(mixed, seconds_of(mixed))
    return pace


def test_work_of_a_step() -> None:
    # a decode after 10 tokens; 3 tokens after 4, which see 5, 6 and 7
    assert work_of([(10, 1), (4, 3)]) == Work(tokens=4, pairs=18, cached=18)
    assert Work().plus(10, 1).plus(4, 3) == work_of([(10, 1), (4, 3)])


def test_exact_times_give_the_exact_coefficients() -> None:
    assert learned(PromptPace(2.5)).cost.coefficients == pytest.approx(TRUE, rel=1e-3)


def test_noise_and_stalls_do_not_mislead() -> None:
    rng = random.Random(0)
    cost = StepCost()
    position = 0
    for step in range(300):
        decodes = [(100 + step, 1)] * 8
        chunk = rng.choice((0, 16, 40))
        rows = [*decodes, (position, chunk)] if chunk else decodes
        position = (position + chunk) % 4000
        stall = 20.0 if rng.random() < 0.02 else 1.0  # another process, a first-seen length
        cost.observe(rows, seconds_of(rows) * rng.lognormvariate(0, 0.08) * stall)
    for rows in ([(400, 1)] * 8, [(400, 1)] * 8 + [(500, 32)], [(400, 1)] * 8 + [(3000, 24)]):
        assert cost.expect(work_of(rows)) == pytest.approx(seconds_of(rows), rel=0.15)
    assert 0.02 < cost.error < 0.4


def test_steps_that_slow_down_are_followed() -> None:
    pace = learned(PromptPace(2.5))
    rows = [(200, 1)] * 8 + [(1000, 30)]
    before = pace.cost.expect(work_of(rows))
    for step in range(300):
        kind = rows[:8] if step % 2 else rows
        pace.cost.observe(kind, 3 * seconds_of(kind))
    assert pace.cost.expect(work_of(rows)) == pytest.approx(3 * before, rel=0.05)


def test_decoding_for_long_does_not_wear_out_what_is_known_of_prompts() -> None:
    pace = learned(PromptPace(2.5))
    for step in range(3000):
        pace.cost.observe([(step, 1)] * 8, seconds_of([(step, 1)] * 8))
    rows = [(300, 1)] * 8 + [(2000, 20)]
    assert pace.cost.expect(work_of(rows)) == pytest.approx(seconds_of(rows), rel=0.02)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), min_size=1, max_size=5), st.floats(1e-9, 10.0)
        ),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_no_coefficient_is_negative_whatever_was_measured(steps: list[tuple[list[tuple[int, int]], float]]) -> None:
    cost = StepCost(padded_length)
    for rows, seconds in steps:
        cost.observe(rows, seconds)
        assert min(cost.coefficients) >= 0.0 and all(map(math.isfinite, cost.coefficients))
    assert max(cost.coefficients) > 0.0


@pytest.mark.parametrize("position", [0, 1, 31, 700, 2000, 3900])
@pytest.mark.parametrize("stretch", [1.5, 2.5, 4.0])
def test_as_many_tokens_as_the_stretch_allows_and_not_one_more(position: int, stretch: float) -> None:
    allowance = learned(PromptPace(stretch)).begin([200] * 8, num_prompts=1)
    assert allowance is not None
    decodes: Rows = [(200, 1)] * 8
    limit = stretch * seconds_of(decodes)
    count = allowance.most(position, 4000)
    assert count == MIN_CHUNK or seconds_of([*decodes, (position, count)]) <= limit * 1.001
    assert seconds_of([*decodes, (position, count + 1)]) > limit * 0.999


def test_tokens_count_as_many_as_the_executor_pads_them_to() -> None:
    pace = PromptPace(2.5, padded_length)
    for rows in ([(9, 1)] * 8, [(9, 1)] * 4, [(0, 20)], [(0, 32)], [(0, 120)]):
        pace.cost.observe(rows, 4e-3 + 1e-3 * padded_length(sum(count for _, count in rows)))
    allowance = pace.begin([9] * 8, 1)  # 2.5 · (4 + 8) ms leave 26 ms of tokens, which are exact up to 32
    assert allowance is not None and allowance.most(0, 4000) == 18
    pace.max_stretch = 4.0
    allowance = pace.begin([9] * 8, 1)  # 44 ms of tokens: 40 fit, 41 would run as 48
    assert allowance is not None and allowance.most(0, 4000) == 32


def test_the_first_prompt_always_moves_on_and_the_next_only_if_time_is_left() -> None:
    allowance = learned(PromptPace(1.01)).begin([200] * 8, 1)
    assert allowance is not None
    assert allowance.most(100, 5) == 5  # a short rest is less than MIN_CHUNK
    assert allowance.most(100, 4000) == MIN_CHUNK
    allowance.take(100, MIN_CHUNK)
    assert allowance.most(0, 4000) == 0


def test_no_slivers() -> None:
    decodes: Rows = [(200, 1)] * 8
    for first in range(60, 85):
        allowance = learned(PromptPace(2.5)).begin([200] * 8, 1)
        assert allowance is not None
        allowance.take(0, first)
        time_for = (2.5 * seconds_of(decodes) - seconds_of([*decodes, (0, first)])) / TRUE[1]
        assert allowance.most(0, 4000) == 0 or time_for > MIN_CHUNK


def test_later_prompts_share_what_the_first_left() -> None:
    pace = learned(PromptPace(2.5))
    whole, shared = pace.begin([200] * 8, 1), pace.begin([200] * 8, 1)
    assert whole is not None and shared is not None
    shared.take(0, 20)
    rest = shared.most(0, 4000)
    limit = 2.5 * seconds_of([(200, 1)] * 8)
    assert MIN_CHUNK <= rest < whole.most(0, 4000)
    assert seconds_of([(200, 1)] * 8 + [(0, 20), (0, rest)]) <= limit * 1.001
    assert seconds_of([(200, 1)] * 8 + [(0, 20), (0, rest + 1)]) > limit * 0.999


def test_more_prompts_than_decodes_are_given_more() -> None:
    pace = learned(PromptPace(2.5))
    decodes: Rows = [(200, 1)] * 2
    allowance = pace.begin([200, 200], num_prompts=6)
    assert allowance is not None
    count = allowance.most(0, 4000)
    limit = (1 + 1.5 * 6 / 2) * seconds_of(decodes)
    assert seconds_of([*decodes, (0, count)]) <= limit * 1.001 < seconds_of([*decodes, (0, count + 1)]) * 1.002


def test_no_limit_without_decodes_or_before_both_kinds_of_step_were_seen() -> None:
    pace = PromptPace(2.5)
    assert pace.begin([200], 1) is None
    pace.cost.observe([(200, 1)], 0.01)
    assert pace.begin([200], 1) is None
    only_prompts = PromptPace(2.5)
    only_prompts.cost.observe([(0, 4)], 0.01)
    assert only_prompts.begin([200], 1) is None
    pace.cost.observe([(0, 4)], 0.01)
    assert pace.begin([], 1) is None
    assert pace.begin([200], 1) is not None


def test_a_chunk_is_at_most_twice_the_longest_seen_or_first_chunk() -> None:
    pace = PromptPace(2.5)
    for rows in ([(200, 1)], [(9, 1)] * 8, [(0, 4)], [(0, 9)], [(90, 6)]):  # all as fast: no reason to expect so of 4,000
        pace.cost.observe(rows, 0.01)
    allowance = pace.begin([200], 1)
    assert allowance is not None and allowance.most(0, 4000) == FIRST_CHUNK
    pace.cost.observe([(0, 300)], 0.01)
    allowance = pace.begin([200], 1)
    assert allowance is not None and allowance.most(0, 4000) == 600


def allowed(pace: PromptPace, decodes: Rows, position: int) -> int:
    allowance = pace.begin([first for first, _ in decodes], 1)
    assert allowance is not None
    return allowance.most(position, 4000)


# ------------------------------------------------------------------------------------------------------- in the scheduler


def test_scheduler_gives_a_prompt_what_the_pace_allows_at_every_position() -> None:
    pace = learned(PromptPace(2.5))
    scheduler = make_scheduler(num_blocks=400, block_size=32, max_num_batched_tokens=512, max_model_len=8192, pace=pace)
    for _ in range(4):
        add_decoding(scheduler, num_computed_tokens=40, ignore_eos=True, max_tokens=1000)
    prompt = add_prompt(scheduler, 4000, max_tokens=1)
    chunks = []
    while not prompt.is_finished:
        batch = scheduler.schedule()
        decodes = [(request.num_computed_tokens, 1) for request in batch.requests[:4]]
        assert batch.num_scheduled_tokens[:4] == (1, 1, 1, 1)
        (count,) = batch.num_scheduled_tokens[4:]
        assert count == prompt.num_tokens - prompt.num_computed_tokens or count == allowed(
            pace, decodes, prompt.num_computed_tokens
        )
        chunks.append(count)
        scheduler.update(batch, [7] * sum(map(batch.samples, range(5))))
        scheduler.check()
    assert sum(chunks) == 4000
    assert chunks[0] > 2 * chunks[-2] >= 2 * MIN_CHUNK


def test_scheduler_counts_all_prompts_of_a_step_together() -> None:
    pace = learned(PromptPace(2.5))
    scheduler = make_scheduler(num_blocks=400, block_size=32, max_num_batched_tokens=512, max_model_len=8192, pace=pace)
    for _ in range(4):
        add_decoding(scheduler, num_computed_tokens=40)
    for n in (1, 2):
        add_prompt(scheduler, 32, first_token=1000 * n)
    first, rest = scheduler.schedule().num_scheduled_tokens[4:]
    allowance = pace.begin([40] * 4, 2)
    assert allowance is not None
    allowance.take(0, 32)
    assert (first, rest) == (32, allowance.most(0, 32)) and MIN_CHUNK <= rest < 32


def test_scheduler_does_not_limit_a_step_without_decodes() -> None:
    scheduler = make_scheduler(
        num_blocks=400, block_size=32, max_num_batched_tokens=512, max_model_len=8192, pace=learned(PromptPace(1.1))
    )
    add_prompt(scheduler, 2000, max_tokens=2)
    add_prompt(scheduler, 2000, first_token=5000, max_tokens=2)
    assert scheduler.schedule().num_scheduled_tokens == (512,)


def test_scheduler_lets_every_prompt_end_however_small_the_allowance() -> None:
    scheduler = make_scheduler(
        num_blocks=200,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        min_prefill_tokens=2,
        pace=learned(PromptPace(1.001)),
    )
    stream = add_decoding(scheduler, num_computed_tokens=8, ignore_eos=True, max_tokens=200)
    prompts = [add_prompt(scheduler, 41, first_token=1000 * n, max_tokens=2) for n in (1, 2)]
    for _ in range(12):  # 41 tokens in parts of 8 take 6 steps
        run_step(scheduler)
        scheduler.check()
    assert prompts[0].num_output_tokens > 0 and prompts[1].num_output_tokens > 0
    assert stream.num_output_tokens == 13  # one of its own, and one in each step
    finish_all(scheduler)
