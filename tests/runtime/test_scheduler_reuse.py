"""What a request need not compute again, and what of its prompt runs together, in numbers that can be followed by hand."""

import pytest
from fakes import add_decoding, add_prompt, finish_all, make_request, make_scheduler, run_step

from runtime.errors import InvalidRequest

# -------------------------------------------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize(("num_shared", "num_hit"), [(7, 4), (8, 8), (9, 8)])
def test_prefix_hits_at_a_block_boundary(num_shared, num_hit):
    scheduler = make_scheduler(block_size=4)
    shared = list(range(50, 50 + num_shared))
    scheduler.add(make_request("a", [*shared, 1, 2, 3], max_tokens=1))
    finish_all(scheduler)
    request = make_request("b", [*shared, 9, 9, 9], max_tokens=1)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == (num_shared + 3 - num_hit,)
    assert (request.num_cached_tokens, request.num_computed_tokens) == (num_hit, num_hit)
    assert request.block_table[: num_hit // 4] == [0, 1][: num_hit // 4]
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (2 * num_shared + 6, num_hit)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(7, 4), (8, 4), (9, 8)])
def test_at_least_one_token_of_a_repeated_prompt_is_computed(num_tokens, num_hit):
    scheduler = make_scheduler(block_size=4)
    add_prompt(scheduler, num_tokens, max_tokens=1)
    finish_all(scheduler)
    again = add_prompt(scheduler, num_tokens, max_tokens=1)
    assert scheduler.schedule().num_scheduled_tokens == (num_tokens - num_hit,)
    assert again.num_cached_tokens == num_hit


def test_running_requests_share_blocks_of_a_prompt_computed_before():
    scheduler = make_scheduler(block_size=4)
    first = add_prompt(scheduler, 9)
    run_step(scheduler)
    second = add_prompt(scheduler, 9)
    run_step(scheduler)
    assert first.block_table[:2] == second.block_table[:2] == [0, 1]
    assert first.block_table[2] != second.block_table[2]
    scheduler.check()
    finish_all(scheduler)


def test_outputs_are_found_too_as_in_a_growing_chat():
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("turn 1", [1, 2, 3], max_tokens=6))
    finish_all(scheduler)
    turn = make_request("turn 2", [1, 2, 3, 7, 7, 7, 7, 7, 7, 50, 51], max_tokens=1)
    scheduler.add(turn)
    scheduler.schedule()
    assert turn.num_cached_tokens == 8


def test_other_salt_or_no_caching_means_no_hit():
    scheduler = make_scheduler(block_size=4)
    add_prompt(scheduler, 9, max_tokens=1, salt="tenant a")
    finish_all(scheduler)
    other = add_prompt(scheduler, 9, max_tokens=1, salt="tenant b")
    assert scheduler.schedule().num_scheduled_tokens == (9,)
    assert other.num_cached_tokens == 0
    off = make_scheduler(block_size=4, enable_prefix_caching=False)
    add_prompt(off, 9, max_tokens=1)
    finish_all(off)
    add_prompt(off, 9)
    assert off.schedule().num_scheduled_tokens == (9,)
    assert (off.stats.prefix_queries, off.stats.prefix_hits, off.pool.num_cached) == (0, 0, 0)


def test_a_block_is_found_only_when_all_of_it_is_computed():
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=6)
    request = add_prompt(scheduler, 12)
    run_step(scheduler)
    scheduler.cancel(request.request_id)
    again = add_prompt(scheduler, 12)
    scheduler.schedule()
    assert again.num_cached_tokens == 4


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    first = add_decoding(scheduler, 9, max_tokens=5)
    second = add_prompt(scheduler, 6)
    for _ in range(4):
        run_step(scheduler)  # the fourth preempts second, whose 8 computed tokens fill blocks 3 and 4, and evicts 4
    assert (second.num_preemptions, second.num_tokens, first.is_finished) == (1, 9, True)
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens, second.num_computed_tokens) == ((second,), (5,), 4)
    assert second.block_table[0] == 3
    assert second.num_cached_tokens == 0  # it says what was found when it first started


# --------------------------------------------------------------------------------------------- prefixes being computed


def shared_prompts(scheduler, num_shared, *, tails, name="p", **options):
    """Requests of the same `num_shared` tokens, each followed by as many of its own as `tails` says."""
    shared = list(range(50, 50 + num_shared))
    requests = [make_request(f"{name}{index}", [*shared, *[10 + index] * tail], **options) for index, tail in enumerate(tails)]
    for request in requests:
        scheduler.add(request)
    return requests


def test_prompts_that_arrive_together_compute_what_they_share_once():
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=14)
    first, second, third = shared_prompts(scheduler, 17, tails=(1, 2, 3))
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((first,), (14,))
    scheduler.update(batch, [])
    batch = scheduler.schedule()  # the budget has room for 10 more tokens, but they are being computed
    assert (batch.requests, batch.num_scheduled_tokens) == ((first,), (4,))
    scheduler.update(batch, [7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((first, second, third), (1, 3, 4))
    assert first.block_table[:4] == second.block_table[:4] == third.block_table[:4] == [0, 1, 2, 3]
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (18 + 19 + 20, 16 + 16)
    scheduler.check()


@pytest.mark.parametrize(
    ("num_shared", "tail", "waits"),
    [(4, 4, True), (4, 5, False), (8, 8, True), (8, 9, False), (7, 1, True), (3, 1, False)],
)
def test_a_request_waits_for_blocks_that_are_half_of_what_it_lacks(num_shared, tail, waits):
    scheduler = make_scheduler(block_size=4)
    first, second = shared_prompts(scheduler, num_shared, tails=(9, tail))
    assert scheduler.schedule().requests == ((first,) if waits else (first, second))


def test_what_the_cache_already_has_is_not_lacking():
    scheduler = make_scheduler(block_size=4)
    shared_prompts(scheduler, 8, tails=(1,), max_tokens=1)
    finish_all(scheduler)
    first, second = (make_request(name, [*range(50, 58), *range(70, 74), *[tail] * 5]) for name, tail in (("a", 1), ("b", 2)))
    scheduler.add(first)
    scheduler.add(second)  # of 9 tokens that are not cached it shares 4
    assert scheduler.schedule().requests == (first, second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (8, 8)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"salt": ("a", "b")}], ids=str)
def test_nobody_waits_for_blocks_that_it_will_not_get(options):
    salts = options.pop("salt", ("", ""))
    scheduler = make_scheduler(block_size=4, **options)
    first, second = (make_request(name, range(50, 60), salt=salt) for name, salt in zip("ab", salts, strict=True))
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule().num_scheduled_tokens == (10, 10)


def test_nobody_waits_for_blocks_that_were_computed_and_cannot_be_found():
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=18)
    first, second = shared_prompts(scheduler, 4, tails=(9, 5))  # second computes a block 0 of its own, that only it knows
    run_step(scheduler)
    scheduler.cancel(first.request_id)
    scheduler.pool.release(scheduler.pool.allocate(scheduler.pool.num_available))  # evicts what first left
    (third,) = shared_prompts(scheduler, 4, tails=(1,), name="q")
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((second, third), (4, 5))


def test_a_request_whose_prefix_is_in_flight_keeps_its_place_and_holds_up_nobody_else():
    scheduler = make_scheduler(block_size=4, max_num_seqs=3)
    first, second = shared_prompts(scheduler, 16, tails=(1, 2))
    other, another = add_prompt(scheduler, 5), add_prompt(scheduler, 6, first_token=200)
    batch = scheduler.schedule()
    assert batch.requests == (first, other)
    scheduler.update(batch, [7, 7])
    assert scheduler.schedule().requests == (first, other, second)
    assert scheduler.waiting == [another]


def test_a_request_whose_prefix_is_in_flight_keeps_the_blocks_that_it_needs():
    scheduler = make_scheduler(num_blocks=10, block_size=4)
    first, second = shared_prompts(scheduler, 16, tails=(1, 2))  # five blocks each, of which they will share four
    other = add_prompt(scheduler, 9, first_token=200)
    assert scheduler.schedule().requests == (first,)
    assert scheduler.waiting == [second, other]


def test_nobody_waits_for_a_request_that_was_cancelled():
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8)
    first, second = shared_prompts(scheduler, 16, tails=(1, 2))
    run_step(scheduler)
    scheduler.cancel(first.request_id)
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((second,), (8,))
    assert second.num_cached_tokens == 8


# --------------------------------------------------------------------------------------------------------------- forks


def test_a_fork_starts_from_its_parents_prompt_and_copies_the_block_it_writes():
    scheduler = make_scheduler(block_size=4)
    parent = add_prompt(scheduler, 7)
    fork = add_prompt(scheduler, 7, fork_of=parent)
    batch = scheduler.schedule()
    assert batch.requests == (parent,)  # the fork waits for the prompt
    scheduler.update(batch, [7])
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens) == ((parent, fork), (1, 1))
    assert (parent.block_table, fork.block_table) == ([0, 1], [0, 2])
    assert batch.copies == ((1, 2),)
    assert (fork.num_computed_tokens, fork.num_cached_tokens, fork.num_allocated_blocks) == (6, 6, 1)
    scheduler.update(batch, [7, 5])
    assert fork.token_ids == [*range(100, 107), 5]
    scheduler.check()
    finish_all(scheduler)


@pytest.mark.parametrize(
    ("num_tokens", "parent_table", "fork_table", "copies"),
    [
        (8, [0, 1, 2], [0, 3], ((1, 3),)),  # the last prompt token is in the middle of a block
        (9, [0, 1, 2], [0, 1, 3], ()),  # it starts a block: nothing before it to copy
        (1, [0], [1], ()),
    ],
)
def test_forks_at_a_block_boundary(num_tokens, parent_table, fork_table, copies):
    scheduler = make_scheduler(block_size=4)
    parent = add_prompt(scheduler, num_tokens)
    fork = add_prompt(scheduler, num_tokens, fork_of=parent)
    run_step(scheduler)
    batch = scheduler.schedule()
    assert (parent.block_table, fork.block_table, batch.copies) == (parent_table, fork_table, copies)
    scheduler.check()


def test_a_fork_does_not_hold_up_the_queue_while_it_waits():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    parent = add_prompt(scheduler, 6)
    fork = add_prompt(scheduler, 6, fork_of=parent)
    run_step(scheduler)
    other = add_prompt(scheduler, 2)
    assert scheduler.schedule().requests == (parent, other)
    assert scheduler.waiting == [fork]


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_whose_parent_is_gone_runs_by_itself(caching):
    scheduler = make_scheduler(block_size=4, max_num_seqs=1, enable_prefix_caching=caching)
    parent = add_prompt(scheduler, 9, max_tokens=1)
    fork = add_prompt(scheduler, 9, max_tokens=1, fork_of=parent)
    run_step(scheduler)
    assert parent.is_finished
    batch = scheduler.schedule()
    assert (batch.requests, batch.num_scheduled_tokens, batch.copies) == ((fork,), (1 if caching else 9,), ())


def test_a_preempted_fork_does_not_wait_for_a_parent_that_was_preempted_too():
    scheduler = make_scheduler(num_blocks=8, block_size=4, enable_prefix_caching=False)
    urgent = add_decoding(scheduler, 8, priority=0, max_tokens=40)
    parent = add_prompt(scheduler, 7, priority=2)
    fork = add_prompt(scheduler, 7, priority=1, fork_of=parent)
    while not (fork.num_preemptions and parent.num_preemptions):
        run_step(scheduler)
    assert scheduler.waiting == [fork, parent]
    scheduler.cancel(urgent.request_id)
    assert scheduler.schedule().requests == (fork, parent)


def test_a_fork_must_follow_its_parent_and_repeat_its_prompt():
    scheduler = make_scheduler()
    stranger = make_request("stranger", [1, 2])
    with pytest.raises(InvalidRequest, match="forks 'stranger', which must be submitted first"):
        scheduler.add(make_request("fork", [1, 2], fork_of=stranger))
    scheduler.add(stranger)
    with pytest.raises(InvalidRequest, match="its prompt or cache_salt differs"):
        scheduler.add(make_request("fork", [1, 3], fork_of=stranger))
    with pytest.raises(InvalidRequest, match="its prompt or cache_salt differs"):
        scheduler.add(make_request("fork", [1, 2], salt="x", fork_of=stranger))


def test_a_static_cohort_leaves_out_forks_of_requests_outside_it():
    scheduler = make_scheduler(max_num_seqs=1, policy="static")
    parent = add_prompt(scheduler, 5, priority=1)
    fork = add_prompt(scheduler, 5, priority=0, fork_of=parent)
    assert scheduler.schedule().requests == (parent,)
    assert scheduler.waiting == [fork]


# -------------------------------------------------------------------------------- parts of a prompt of at least two tokens


def test_no_chunk_leaves_a_single_token() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8, min_prefill_tokens=2)
    add_prompt(scheduler, num_tokens=9)
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == (7,)
    scheduler.update(batch, [])
    assert scheduler.schedule().num_scheduled_tokens == (2,)


def test_a_budget_of_one_token_is_left_unused() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=4, min_prefill_tokens=2)
    for _ in range(3):
        add_decoding(scheduler, num_computed_tokens=4)
    add_prompt(scheduler, num_tokens=10)
    assert scheduler.schedule().num_scheduled_tokens == (1, 1, 1)


def test_a_prompt_of_one_token_runs() -> None:
    scheduler = make_scheduler(min_prefill_tokens=2)
    add_prompt(scheduler, num_tokens=1)
    assert scheduler.schedule().num_scheduled_tokens == (1,)


def test_a_prefix_hit_leaves_two_tokens() -> None:
    for num_tokens, cached in ((9, 4), (10, 8), (8, 4)):
        scheduler = make_scheduler(block_size=4, max_num_batched_tokens=64, min_prefill_tokens=2)
        for _ in range(2):
            request = add_prompt(scheduler, num_tokens)
            run_step(scheduler)
        assert request.num_cached_tokens == cached


def test_a_fork_leaves_two_tokens() -> None:
    scheduler = make_scheduler(block_size=4, min_prefill_tokens=2)
    parent = add_prompt(scheduler, num_tokens=8)
    fork = add_prompt(scheduler, num_tokens=8, fork_of=parent)
    run_step(scheduler)
    assert scheduler.schedule().num_scheduled_tokens == (1, 2)
    assert fork.num_cached_tokens == 6


def test_a_chunk_cut_short_by_a_full_pool_leaves_no_single_token_either() -> None:
    scheduler = make_scheduler(
        num_blocks=19, block_size=1, max_num_batched_tokens=4, min_prefill_tokens=2, enable_prefix_caching=False
    )
    decode = add_decoding(scheduler, num_computed_tokens=4)
    prompt = add_prompt(scheduler, num_tokens=12)  # admitted: 13 blocks with its first output, the decode needs 6, of 19
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch.num_scheduled_tokens == (1, 3)
        scheduler.update(batch, [7])
    batch = scheduler.schedule()  # 3 tokens are missing, and the decode has left 2 blocks
    assert (batch.requests, scheduler.pool.num_free, prompt.num_computed_tokens) == ((decode,), 2, 9)
