"""The loop ends every request exactly once, whatever happens, and reports from its own thread."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from fakes import expected_tokens, make_loop, make_request, make_scheduler

from runtime.errors import InvalidRequest
from runtime.loop import TokenOutput
from runtime.request import FinishReason
from runtime.sampler import Sampler
from runtime.step_cost import PromptPace


def drain(loop) -> None:
    for _ in range(500):
        if not loop.step() and not loop.scheduler.has_work:
            return
    raise AssertionError("the loop does not come to an end")


def end_of(recorder, request) -> tuple[FinishReason, str]:
    assert recorder.ended[request].finish_reason is request.finish_reason
    return request.finish_reason, request.error


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_fake_model_worked_out_on_paper():
    # states 2, 31·2 + 3 = 65, next 67; then 31·65 + 68 = 2083, next (67 + 2083) mod 97 = 16
    assert expected_tokens([1, 2], 2, 97) == [67, 16]
    loop, _, recorder = make_loop(make_scheduler())
    request = make_request("a", [1, 2], max_tokens=2)
    loop.submit(request)
    drain(loop)
    assert recorder.tokens[request] == [67, 16]


def test_mixed_requests_give_the_tokens_they_give_alone():
    loop, executor, recorder = make_loop(make_scheduler(num_blocks=20, max_num_batched_tokens=9, max_num_seqs=3))
    requests = [make_request(f"r{n}", range(n, 2 * n + 1), max_tokens=n + 3, seed=n) for n in range(1, 9)]
    for request in requests:
        loop.submit(request)
    drain(loop)
    for request in requests:
        assert recorder.tokens[request] == expected_tokens(
            request.prompt_token_ids, request.params.max_tokens, 97, request.params.seed
        )
        assert end_of(recorder, request) == (FinishReason.LENGTH, "")
    assert sorted(loop.sampler.forgotten, key=lambda request: request.request_id) == requests
    assert loop.times.steps == executor.num_steps


def test_the_pace_learns_from_the_steps_that_ran(monkeypatch):
    pace = PromptPace(2.5)
    seen: list[tuple[list[tuple[int, int]], float]] = []
    monkeypatch.setattr(pace.cost, "observe", lambda rows, seconds: seen.append((list(rows), seconds)))
    loop, executor, _ = make_loop(make_scheduler(max_num_batched_tokens=6, pace=pace))
    loop.submit(make_request("a", [1, 2, 3], max_tokens=3))
    loop.submit(make_request("b", range(10, 15), max_tokens=1))
    executor.execute = lambda inputs, run=executor.execute: (time.sleep(0.01), run(inputs))[1]
    drain(loop)
    assert [rows for rows, _ in seen] == [[(0, 3), (0, 3)], [(3, 1), (3, 2)], [(4, 1)]]
    assert all(0.01 <= seconds < 10 for _, seconds in seen)
    executor.fail_with = RuntimeError("the engine hiccuped")
    loop.submit(make_request("c", [1, 2], max_tokens=3))
    drain(loop)
    assert len(seen) == 3


def test_one_output_per_token_and_the_last_one_carries_the_reason():
    loop, _, _ = make_loop(make_scheduler())
    outputs: list[TokenOutput] = []
    loop.sink = outputs.extend
    request = make_request("a", [1, 2], max_tokens=2)
    loop.submit(request)
    drain(loop)
    assert outputs == [TokenOutput(request, 67, None, None), TokenOutput(request, 16, None, FinishReason.LENGTH)]


def test_forks_diverge_by_seed_and_copy_the_shared_block():
    loop, executor, recorder = make_loop(make_scheduler(block_size=4))
    parent = make_request("0", range(10, 17), max_tokens=6)
    forks = [make_request(str(n), range(10, 17), max_tokens=6, seed=n, fork_of=parent) for n in (1, 2)]
    for request in (parent, *forks):
        loop.submit(request)
    drain(loop)
    assert executor.num_copies == 2
    for seed, request in enumerate((parent, *forks)):
        assert recorder.tokens[request] == expected_tokens(range(10, 17), 6, 97, seed)


def test_refused_requests_end_with_the_reason_and_touch_nobody_else():
    loop, _, recorder = make_loop(make_scheduler(max_model_len=8, max_queue_size=2))
    good, second = make_request("good", [1, 2], max_tokens=3), make_request("second", [1], max_tokens=1)
    wrong = {
        make_request("empty", []): "the prompt is empty",
        make_request("long", range(8)): "the prompt has 8 tokens but max_model_len=8",
        make_request("id", [5, 97]): "the prompt has token id 97 but the model's are in [0, 97); check the tokenizer",
        make_request("negative", [-1, 97]): "the prompt has token id -1",
        make_request("good", [3]): "request id 'good' is already in use",
        make_request("third", [3]): "1 requests are waiting",
    }
    loop.submit(good)
    for request in list(wrong)[:-1]:
        loop.submit(request)
    loop.step()
    loop.submit(second)
    loop.submit(list(wrong)[-1])
    drain(loop)
    for request, error in wrong.items():
        reason, text = end_of(recorder, request)
        assert reason is FinishReason.ERROR and text.startswith(error), text
    assert recorder.tokens[good] == expected_tokens([1, 2], 3, 97)
    assert second.finish_reason is FinishReason.LENGTH


def test_parameters_the_sampler_refuses_end_the_request():
    loop, _, recorder = make_loop(make_scheduler())

    def validate(params):
        raise InvalidRequest("logit_bias names token 1000")

    loop.sampler.validate = validate
    request = make_request("a", [1])
    loop.submit(request)
    drain(loop)
    assert end_of(recorder, request) == (FinishReason.ERROR, "logit_bias names token 1000")


@pytest.mark.parametrize("broken", ["ids", "words"])
def test_a_request_that_cannot_be_read_ends_alone(broken, caplog):
    caplog.set_level(logging.CRITICAL, "forgeline.loop")
    loop, _, recorder = make_loop(make_scheduler())
    loop.sampler.validate = Sampler(97).validate
    good, bad = make_request("good", [1, 2], max_tokens=3), make_request("bad", [1])
    if broken == "ids":
        bad.prompt_token_ids.append("a")
    else:
        object.__setattr__(bad.params, "bad_words_ids", (5,))  # past the checks of SamplingParams
    for request in (good, bad):
        loop.submit(request)
    drain(loop)
    reason, error = end_of(recorder, bad)
    assert reason is FinishReason.ERROR and error.startswith("the request cannot be read (TypeError: ")
    assert recorder.tokens[good] == expected_tokens([1, 2], 3, 97)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancel_frees_blocks_before_the_next_step(num_steps):
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=4, enable_prefix_caching=False)
    loop, executor, recorder = make_loop(scheduler)
    request = make_request("a", range(8))  # two steps of prefill
    loop.submit(request)
    for _ in range(num_steps):
        loop.step()
    loop.cancel("a")
    loop.cancel("nobody")
    assert loop.step() is False
    assert scheduler.pool.num_used == 0
    assert executor.num_steps == num_steps
    assert end_of(recorder, request) == (FinishReason.CANCELLED, "")
    assert len(recorder.tokens.get(request, [])) == max(0, num_steps - 1)
    assert loop.sampler.forgotten == [request]
    loop.cancel("a")
    loop.step()


def test_cancel_carries_the_reason_it_was_given():
    loop, _, recorder = make_loop(make_scheduler())
    request = make_request("a", [1])
    loop.submit(request)
    loop.step()
    loop.cancel("a", FinishReason.STOP)
    loop.step()
    assert end_of(recorder, request) == (FinishReason.STOP, "")


@pytest.mark.parametrize("culprit", ["executor", "sampler"])
def test_a_failing_step_ends_its_own_requests_and_the_loop_goes_on(culprit, caplog):
    caplog.set_level(logging.CRITICAL, "forgeline.loop")
    scheduler = make_scheduler(max_num_seqs=2, enable_prefix_caching=False)
    loop, _, recorder = make_loop(scheduler)
    failing = [make_request(f"f{n}", [n], max_tokens=9) for n in range(2)]
    waiting = make_request("waiting", [5], max_tokens=3)
    for request in (*failing, waiting):
        loop.submit(request)
    loop.step()
    for _ in range(2):  # a second failure is no different
        getattr(loop, culprit).fail_with = ValueError("no such kernel")
        loop.step()
        scheduler.check()
        late = make_request(f"late{loop.times.failed_steps}", [6], max_tokens=2)
        loop.submit(late)
    drain(loop)
    for request in (*failing, waiting):
        assert end_of(recorder, request) == (FinishReason.ERROR, "the step failed: ValueError: no such kernel")
    assert recorder.tokens[late] == expected_tokens([6], 2, 97)
    assert loop.times.failed_steps == 2
    assert scheduler.pool.num_used == 0
    assert set(loop.sampler.forgotten) == set(recorder.ended)


def test_a_row_that_cannot_be_sampled_ends_alone():
    loop, _, recorder = make_loop(make_scheduler())
    good, bad = make_request("good", [1], max_tokens=3), make_request("bad", [2], max_tokens=3)
    loop.sampler.row_errors["bad"] = "the logits are not finite"
    loop.submit(bad)
    loop.submit(good)
    drain(loop)
    assert end_of(recorder, bad) == (FinishReason.ERROR, "the logits are not finite")
    assert bad not in recorder.tokens and bad.output_token_ids == []
    assert recorder.tokens[good] == expected_tokens([1], 3, 97)
    assert loop.scheduler.pool.num_used == 0


def test_timings_and_stage_times_are_in_order():
    loop, _, _ = make_loop(make_scheduler(max_num_seqs=1))
    first, second = make_request("a", [1], max_tokens=3), make_request("b", [1], max_tokens=1)
    begin = time.time_ns()
    loop.submit(first)
    loop.submit(second)
    drain(loop)
    times = first.timings
    assert begin - 10**9 < times.arrival_ns <= times.first_scheduled_ns <= times.first_token_ns <= times.last_token_ns
    assert second.timings.first_scheduled_ns >= times.last_token_ns
    assert second.timings.first_token_ns == second.timings.last_token_ns
    stages = loop.times
    assert stages.steps == 4
    for name in ("schedule_ns", "prepare_ns", "execute_ns", "sample_ns", "update_ns", "sink_ns"):
        assert getattr(stages, name) > 0, name


def test_a_slow_stage_shows_up_as_itself():
    loop, executor, _ = make_loop(make_scheduler())
    execute = executor.execute

    def slow(inputs):
        time.sleep(0.02)
        return execute(inputs)

    executor.execute = slow
    loop.submit(make_request("a", [1], max_tokens=5))
    drain(loop)
    times = loop.times
    assert times.execute_ns >= 5 * 20_000_000
    assert times.execute_ns > times.schedule_ns + times.prepare_ns + times.sample_ns + times.update_ns + times.sink_ns


# ------------------------------------------------------------------------------------------------------------- threads


def test_many_threads_submit_and_cancel_while_the_loop_runs():
    loop, _, recorder = make_loop(make_scheduler(num_blocks=24, max_num_seqs=4))
    thread = threading.Thread(target=loop.run)
    thread.start()
    requests = [[make_request(f"{t}/{n}", range(t, t + n % 7 + 1), max_tokens=1 + n % 5) for n in range(40)] for t in range(4)]

    def client(own):
        for n, request in enumerate(own):
            loop.submit(request)
            if n % 3 == 0:
                loop.cancel(request.request_id)

    clients = [threading.Thread(target=client, args=(own,)) for own in requests]
    for client_thread in clients:
        client_thread.start()
    for client_thread in clients:
        client_thread.join()
    wait_until(lambda: len(recorder.ended) == 160)
    loop.stop()
    thread.join(30)
    assert not thread.is_alive()
    for n, request in ((n, request) for own in requests for n, request in enumerate(own)):
        alone = expected_tokens(request.prompt_token_ids, request.params.max_tokens, 97)
        if request.finish_reason is FinishReason.CANCELLED:
            assert n % 3 == 0
        else:
            assert recorder.tokens[request] == alone
    assert loop.scheduler.pool.num_used == 0


def test_an_idle_loop_sleeps_and_wakes_for_work():
    loop, _, recorder = make_loop(make_scheduler())
    taken = []
    step = loop.step
    loop.step = lambda: taken.append(None) or step()
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_until(lambda: taken)
    time.sleep(0.1)
    assert len(taken) == 1
    request = make_request("a", [1, 2], max_tokens=3)
    loop.submit(request)
    wait_until(lambda: request in recorder.ended)
    loop.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert len(taken) <= 5


def test_stop_ends_what_is_left_and_refuses_what_comes_later():
    loop, executor, recorder = make_loop(make_scheduler(max_num_seqs=1))
    running, waiting, late = (make_request(name, [1], max_tokens=500) for name in ("running", "waiting", "late"))
    execute = executor.execute

    def stop_in_the_third_step(inputs):
        if executor.num_steps == 2:
            loop.stop()
        return execute(inputs)

    executor.execute = stop_in_the_third_step
    loop.submit(running)
    loop.submit(waiting)
    loop.run()
    assert len(recorder.tokens[running]) == 3
    for request in (running, waiting):
        assert end_of(recorder, request) == (FinishReason.CANCELLED, "the loop was stopped")
    assert loop.scheduler.pool.num_used == 0
    loop.submit(late)
    assert end_of(recorder, late) == (FinishReason.ERROR, "the loop has stopped; restart it or send the request elsewhere")


@pytest.mark.parametrize("broken", ["schedule", "update"])
def test_a_broken_invariant_ends_everything_once_and_raises(broken):
    loop, _, recorder = make_loop(make_scheduler(max_num_seqs=1))
    running, waiting = make_request("running", [1]), make_request("waiting", [1])
    loop.submit(running)
    loop.submit(waiting)
    loop.step()

    def fail(*_):
        raise AssertionError("block 3 is in two states")

    setattr(loop.scheduler, broken, fail)
    with pytest.raises(AssertionError, match="block 3"):
        loop.run()
    expected = "the loop failed (AssertionError: block 3 is in two states); restart the server"
    for request in (running, waiting):
        assert end_of(recorder, request) == (FinishReason.ERROR, expected)
