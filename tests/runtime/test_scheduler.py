"""What runs in a step, in numbers that can be followed by hand. Prefix hits, forks and split prompts: test_scheduler_reuse.py."""

import pytest
from fakes import add_decoding, add_prompt, finish_all, make_request, make_scheduler, run_step

from runtime.batch import ScheduledBatch
from runtime.errors import InvalidRequest, PromptTooLong, QueueFull
from runtime.request import FinishReason, Request

# ------------------------------------------------------------------------------------------------------------ the step


def test_long_prompt_is_prefilled_in_chunks_beside_a_decode():
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=8)
    decode = add_decoding(scheduler, num_computed_tokens=4)
    prompt = add_prompt(scheduler, num_tokens=10)
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == (1, 7)
    assert decode.block_table == [0, 1]
    assert prompt.block_table == [2, 3]
    scheduler.pool.check()
    assert [batch.samples(row) for row in (0, 1)] == [True, False]
    scheduler.update(batch, [7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((decode, prompt), (1, 3))
    assert prompt.block_table == [2, 3, 4]
    assert batch.samples(1)


def test_decodes_come_first_then_prefills_each_by_rank():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    prefill = add_prompt(scheduler, 9)
    run_step(scheduler)
    late = add_prompt(scheduler, 3)
    urgent = add_prompt(scheduler, 2, priority=-1)
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((prefill, urgent, late), (3, 2, 1))
    scheduler.update(batch, [7, 7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((urgent, prefill, late), (1, 1, 2))


def test_without_chunked_prefill_a_prompt_is_never_split_and_the_first_of_a_step_always_runs():
    scheduler = make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False, enable_prefix_caching=False)
    long, fits, too_much = (add_prompt(scheduler, n) for n in (12, 5, 4))
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((long,), (12,))
    scheduler.update(batch, [7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((long, fits), (1, 5))
    scheduler.update(batch, [7, 7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((long, fits, too_much), (1, 1, 4))


def test_budget_smaller_than_the_number_of_decodes_serves_the_highest_ranks():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    _, second, third = (add_decoding(scheduler, 4, priority=priority) for priority in (3, 2, 1))
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((third, second), (1, 1))


def test_max_num_seqs_bounds_the_rows_and_a_finished_row_is_replaced_at_once():
    scheduler = make_scheduler(max_num_seqs=2)
    first, second, third = (add_prompt(scheduler, 2, max_tokens=n) for n in (1, 2, 1))
    batch = scheduler.schedule()
    assert batch.requests == (first, second)
    assert scheduler.update(batch, [7, 7]) == [first]
    assert scheduler.schedule().requests == (second, third)


def test_static_batching_admits_the_next_cohort_when_the_previous_one_has_finished():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=4, policy="static")
    short, long, third, fourth, fifth = (add_prompt(scheduler, 3, max_tokens=n) for n in (1, 4, 1, 1, 1))
    seen: list[tuple[Request, ...]] = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        seen.append(batch.requests)
        scheduler.update(batch, [7] * sum(map(batch.samples, range(len(batch.requests)))))
    assert seen[0] == (short, long)  # 3 + 1 tokens
    assert seen[1:5] == [(long,)] * 4
    assert seen[5] == (third, fourth)
    assert seen[6] == (fourth,)
    assert seen[7:] == [(fifth,)]


def test_a_static_cohort_is_closed_even_to_a_higher_priority():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=3, policy="static", enable_prefix_caching=False)
    first, second = add_prompt(scheduler, 3), add_prompt(scheduler, 2)
    assert scheduler.schedule().requests == (first,)
    urgent = add_prompt(scheduler, 1, priority=-1)
    scheduler.update(ScheduledBatch((first,), (3,)), [7])
    assert scheduler.schedule().requests == (first, second)
    assert scheduler.waiting == [urgent]


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"max_tokens": 2}, [7, 7], FinishReason.LENGTH),
        ({"max_tokens": 9}, [7, 2], FinishReason.STOP),  # 2 is the end-of-sequence token
        ({"max_tokens": 2, "ignore_eos": True}, [2, 2], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": (5,)}, [7, 5], FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (5,), "ignore_eos": True}, [2, 5], FinishReason.STOP),
        ({"max_tokens": 9, "min_tokens": 3}, [2, 2, 2], FinishReason.STOP),
        ({"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (5,)}, [5, 5], FinishReason.STOP),
        ({"max_tokens": 2}, [7, 2], FinishReason.STOP),  # both at once: the end of the text is the better news
    ],
)
def test_finish_reasons(params, tokens, reason):
    scheduler = make_scheduler(eos_token_ids=(2,))
    request = add_prompt(scheduler, 3, **params)
    for index, token in enumerate(tokens):
        assert request.finish_reason is None
        finished = run_step(scheduler, token)
        assert finished == ([request] if index == len(tokens) - 1 else [])
    assert request.finish_reason is reason
    assert request.output_token_ids == tokens
    assert request.block_table == [] and scheduler.pool.num_used == 0
    assert not scheduler.has_work


def test_max_tokens_is_clipped_by_max_model_len():
    scheduler = make_scheduler(max_model_len=6)
    request = add_prompt(scheduler, 4, max_tokens=100)
    finish_all(scheduler)
    assert (request.num_tokens, request.finish_reason) == (6, FinishReason.LENGTH)


def test_a_sequence_ends_where_the_pool_ends():
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    request = add_prompt(scheduler, 7, max_tokens=100)
    finish_all(scheduler)
    assert (request.num_tokens, request.finish_reason) == (8, FinishReason.LENGTH)


# ----------------------------------------------------------------------------------------------------------- admission


def test_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="the prompt is empty but must have at least 1 token"):
        make_scheduler().add(make_request("r", []))


def test_prompt_longer_than_the_model_is_refused_with_the_limit_and_the_remedy():
    scheduler = make_scheduler(max_model_len=10)
    add_prompt(scheduler, 9)
    with pytest.raises(PromptTooLong) as error:
        add_prompt(scheduler, 10)
    assert str(error.value) == (
        "the prompt has 10 tokens but max_model_len=10 leaves room for 9; "
        "shorten the prompt, or build with a larger --max-model-len where the model allows it"
    )
    assert scheduler.num_waiting == 1


def test_prompt_longer_than_the_pool_is_refused_with_the_limit_and_the_remedy():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add_prompt(scheduler, 11)
    with pytest.raises(PromptTooLong) as error:
        add_prompt(scheduler, 12)
    assert str(error.value) == (
        "the prompt has 12 tokens but the KV cache of 3 blocks of 4 holds 11 and one output token; "
        "shorten the prompt or raise kv_cache_memory_bytes"
    )


def test_full_queue_counts_waiting_and_running():
    scheduler = make_scheduler(max_queue_size=3)
    add_decoding(scheduler, 4)
    add_prompt(scheduler, 2)
    add_prompt(scheduler, 2)
    with pytest.raises(QueueFull) as error:
        add_prompt(scheduler, 2)
    assert str(error.value) == (
        "2 requests are waiting and 1 running, which is the limit of max_queue_size=3; retry later or raise it"
    )
    finish_all(scheduler)
    add_prompt(scheduler, 2)


def test_a_request_id_is_free_again_when_its_request_has_ended():
    scheduler = make_scheduler()
    scheduler.add(make_request("same", [1]))
    with pytest.raises(InvalidRequest, match="request id 'same' is already in use"):
        scheduler.add(make_request("same", [1]))
    finish_all(scheduler)
    scheduler.add(make_request("same", [1]))


def test_admission_leaves_running_requests_the_blocks_they_lack_and_nobody_overtakes():
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=9)
    long = add_prompt(scheduler, 16)  # needs 5 blocks with its first output token
    run_step(scheduler)
    short = add_prompt(scheduler, 4, first_token=50)  # needs 2 likewise, and only 1 of the 2 free is not spoken for
    tiny = add_prompt(scheduler, 3, first_token=60)  # needs 1
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens, scheduler.pool.num_free) == ((long,), (7,), 2)
    assert scheduler.waiting == [short, tiny]


def test_a_higher_priority_waits_for_a_seat_but_is_first_in_line():
    scheduler = make_scheduler(max_num_seqs=1)
    running = add_decoding(scheduler, 4, max_tokens=3, priority=5)
    low, high = add_prompt(scheduler, 2, priority=5), add_prompt(scheduler, 2, priority=0)
    assert scheduler.waiting == [high, low]
    run_step(scheduler)
    run_step(scheduler)
    assert running.is_finished
    assert scheduler.schedule().requests == (high,)


# ---------------------------------------------------------------------------------------------------------- preemption


def test_the_latest_arrival_is_preempted_and_resumes_where_it_was():
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False)
    first = add_decoding(scheduler, 8, max_tokens=6)
    second = add_decoding(scheduler, 6, max_tokens=3)
    assert (first.block_table, second.block_table) == ([0, 1], [2, 3])
    batch = scheduler.schedule()  # first needs a third block
    assert (batch.requests, batch.preempted) == ((first,), (second,))
    assert (second.block_table, second.num_computed_tokens, second.num_preemptions) == ([], 0, 1)
    assert first.block_table == [0, 1, 2]
    assert scheduler.waiting == [second]
    scheduler.update(batch, [7])
    scheduler.check()
    finish_all(scheduler)
    assert second.output_token_ids == [7, 7, 7]
    assert (scheduler.stats.num_preemptions, second.num_preemptions, first.num_preemptions) == (1, 1, 0)


def test_the_lowest_priority_is_preempted_before_the_latest_arrival():
    scheduler = make_scheduler(num_blocks=5, block_size=4, enable_prefix_caching=False)
    low = add_decoding(scheduler, 2, priority=9)
    high = add_decoding(scheduler, 8, priority=0)
    late = add_decoding(scheduler, 5, priority=1)
    assert (low.block_table, high.block_table, late.block_table) == ([0], [1, 2], [3, 4])
    batch = scheduler.schedule()
    assert (batch.requests, batch.preempted) == ((high, late), (low,))
    assert high.block_table == [1, 2, 0]
    assert scheduler.waiting == [low]


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False)
    low = add_decoding(scheduler, 5, priority=9)
    high = add_decoding(scheduler, 8, priority=0)
    middle = add_prompt(scheduler, 2, priority=5)
    batch = scheduler.schedule()
    assert (batch.requests, batch.preempted, scheduler.pool.num_free) == ((high,), (low,), 1)
    scheduler.update(batch, [7])
    assert scheduler.schedule().requests == (high, middle)


def test_a_victim_scheduled_earlier_in_the_step_gives_its_tokens_and_blocks_back():
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=3, enable_prefix_caching=False)
    decode = add_decoding(scheduler, 2, priority=1)
    prefill = add_prompt(scheduler, 10, priority=0)  # admitted: 6 blocks with its first output, decode needs 2, of 8
    for _ in range(4):
        run_step(scheduler)
    assert (prefill.num_computed_tokens, len(prefill.block_table)) == (8, 4)
    assert (decode.num_computed_tokens, len(decode.block_table), scheduler.pool.num_free) == (6, 3, 1)
    batch = scheduler.schedule()  # decode takes the last block, then prefill needs one
    assert (batch.requests, batch.num_scheduled_tokens, batch.preempted) == ((prefill,), (2,), (decode,))
    assert (decode.block_table, decode.num_computed_tokens, scheduler.pool.num_free) == ([], 0, 3)
    scheduler.check()


def test_a_request_with_nobody_below_it_pauses_and_keeps_its_blocks():
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False)
    first = add_decoding(scheduler, 5, max_tokens=2)
    second = add_decoding(scheduler, 8, max_tokens=9)
    batch = scheduler.schedule()  # second needs a third block, and first ranks above it
    assert (batch.requests, batch.preempted) == ((first,), ())
    assert second.block_table == [2, 3]
    scheduler.update(batch, [7])
    assert first.is_finished
    assert scheduler.schedule().requests == (second,)


# ------------------------------------------------------------------------------------------------------------ cancelling


def test_cancel_while_waiting_prefilling_decoding_and_preempted():
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_num_batched_tokens=4, enable_prefix_caching=False)
    request = add_prompt(scheduler, 8)
    assert scheduler.cancel(request.request_id) is request
    assert (request.finish_reason, scheduler.has_work) == (FinishReason.CANCELLED, False)

    request = add_prompt(scheduler, 8)
    run_step(scheduler)
    assert (request.num_computed_tokens, scheduler.pool.num_used) == (4, 1)
    scheduler.cancel(request.request_id)
    assert scheduler.pool.num_used == 0

    request = add_decoding(scheduler, 5)
    scheduler.cancel(request.request_id, FinishReason.STOP)
    assert (request.finish_reason, scheduler.pool.num_used) == (FinishReason.STOP, 0)

    first = add_decoding(scheduler, 7)
    second = add_decoding(scheduler, 7)
    while not second.num_preemptions:
        run_step(scheduler)
    scheduler.cancel(second.request_id)
    scheduler.check()
    assert scheduler.waiting == [] and scheduler.running == [first]
    assert scheduler.cancel(second.request_id) is None
    assert scheduler.cancel("nobody") is None


def test_cancel_between_schedule_and_update_leaves_the_other_rows_alone():
    scheduler = make_scheduler()
    first, second, third = (add_prompt(scheduler, 4) for _ in range(3))
    batch = scheduler.schedule()
    scheduler.cancel(second.request_id)
    assert scheduler.update(batch, [11, 12, 13]) == []
    assert (first.output_token_ids, second.output_token_ids, third.output_token_ids) == ([11], [], [13])
    assert (second.finish_reason, second.block_table) == (FinishReason.CANCELLED, [])
    scheduler.check()


def test_update_wants_one_token_for_every_row_that_produces_one():
    scheduler = make_scheduler()
    add_prompt(scheduler, 4)
    batch = scheduler.schedule()
    with pytest.raises(AssertionError, match="more tokens than rows"):
        scheduler.update(batch, [7, 7])


# ---------------------------------------------------------------------------------------------------------- statistics


def test_stats_count_context_and_generation_separately():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    assert not scheduler.schedule()
    assert scheduler.stats.iteration == 0
    add_decoding(scheduler, 4)
    add_prompt(scheduler, 10)
    scheduler.update(scheduler.schedule(), [7])
    stats = scheduler.stats
    assert (stats.iteration, stats.prompt_tokens, stats.generation_tokens) == (1, 10, 1)
    assert (stats.num_context_requests, stats.num_context_tokens) == (1, 7)
    assert (stats.num_generation_requests, stats.num_generation_tokens) == (1, 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)
