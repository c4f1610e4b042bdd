"""Every other end of a request: errors, clients that leave, time limits, a server that stops."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_model import Make, start, stream, texts, triton, wait_until
from fake_triton import Request, TritonError, scalar, text_request

from runtime.request import FinishReason


def test_an_engine_error_ends_the_request_and_cancels_its_other_sequences(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, text_request(num_return_sequences=scalar(2, np.int32)))
    running.emit("", index=0, tokens=0, finish=FinishReason.ERROR, error="the logits are not finite")
    assert (sender.only_error().message, sender.only_error().code) == ("the logits are not finite", TritonError.INTERNAL)
    assert model.engine.cancelled == [running.id]
    running.emit("late", index=1, finish=FinishReason.CANCELLED)
    assert len(sender.sent) == 1


def test_a_client_that_leaves_is_noticed_and_its_request_cancelled(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    stays, _ = start(model, stream())
    running.emit("a")
    sender.cancelled = True
    wait_until(lambda: running.id in model.engine.cancelled)
    assert model.engine.cancelled == [running.id]
    running.emit("", tokens=0, finish=FinishReason.CANCELLED)
    assert sender.finals == [False, True]
    assert sender.responses[1].error is not None and sender.responses[1].error.code == TritonError.CANCELLED
    assert list(model.live) != [] and stays.sent == []


def test_draining_lets_finish_what_runs_and_refuses_the_rest(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    assert model.drain(60) == 1 and not model.is_drained()
    late, submitted = start(model)
    assert submitted == [] and model.engine.cancelled == []
    assert late.only_error().message == "the server is shutting down; send the request to another server"
    assert late.only_error().code == TritonError.UNAVAILABLE
    running.emit("done", finish=FinishReason.LENGTH)
    assert texts(sender) == [[b"done"]] and sender.finals == [True]
    assert model.is_drained()


def test_what_has_not_finished_when_the_drain_time_is_over_is_cancelled(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    assert model.drain(0) == 1
    wait_until(lambda: not model.is_drained() and model.engine.cancelled == [running.id])
    model.is_drained()
    assert model.engine.cancelled == [running.id]  # once
    running.emit("", tokens=0, finish=FinishReason.CANCELLED)
    assert sender.only_error().message == "the server is shutting down; send the request to another server"
    assert sender.only_error().code == TritonError.UNAVAILABLE and model.is_drained()


def test_closing_the_model_ends_what_runs(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    running.emit("a")
    model.finalize()
    assert sender.finals == [False, True]
    error = sender.responses[1].error
    assert error is not None and error.message == "the server is shutting down; send the request to another server"


def test_clients_are_asked_about_in_turn_and_eight_in_a_period(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(cancellation_check_period_ms="7")
    asked: list[list[int]] = [[]]
    wait = model.closing.wait

    def new_period(timeout: float) -> bool:
        if timeout == 0.007:  # not the metrics thread's
            asked.append([])
        return wait(timeout)

    def ask(number: int) -> bool:
        asked[-1].append(number)
        return False

    senders = [start(model, stream())[0] for _ in range(20)]
    for number, sender in enumerate(senders):
        monkeypatch.setattr(sender, "is_cancelled", lambda number=number: ask(number))
    monkeypatch.setattr(model.closing, "wait", new_period)
    begun = len(asked) + 3  # by then each was asked about since all are there
    wait_until(lambda: len(asked) > begun + 10)
    rounds = asked[begun : begun + 10]
    assert [len(numbers) for numbers in rounds] == [8] * 10
    order = [number for numbers in rounds for number in numbers]
    assert sorted(order[:20]) == list(range(20)) and order == order[:20] * 4


def test_triton_is_never_asked_about_a_client_that_has_its_final_response(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    sender.slowness = 0.05
    sender.asked.clear()
    assert sender.asked.wait(5)
    running.emit("a", finish=FinishReason.STOP)  # while the question is on its way
    sender.asked.clear()
    assert not sender.asked.wait(0.1) and not sender.crashed and sender.finals == [True]


def test_nor_when_it_ended_while_others_were_asked_about(make_model: Make) -> None:
    model = make_model()
    slow, _ = start(model, stream())
    slow.slowness = 0.05
    sender, running = start(model, stream())
    for _ in range(3):
        slow.asked.clear()
        assert slow.asked.wait(5)
    running.emit("a", finish=FinishReason.STOP)
    slow.asked.clear()
    assert slow.asked.wait(5) and not sender.crashed


def test_a_client_that_leaves_while_its_request_is_submitted(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    request = Request(stream())
    submit = model.engine.submit

    def slow_submit(*arguments: Any, **keywords: Any) -> Any:
        request.sender.cancelled = True
        wait_until(lambda: keywords["request_id"] in model.engine.cancelled)  # before the engine knows it: without effect
        model.engine.cancelled.clear()
        return submit(*arguments, **keywords)

    monkeypatch.setattr(model.engine, "submit", slow_submit)
    model.execute([request])
    assert model.engine.cancelled == [model.engine.submitted[0].id]


def test_a_connection_that_breaks_on_send_cancels_the_request(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream())
    sender.broken = True
    with pytest.raises(RuntimeError, match="connection is gone"):
        running.emit("a")
    assert not model.live and model.engine.cancelled == [running.id]
    running.emit("b", finish=FinishReason.CANCELLED)  # nothing is sent any more


def test_stop_cancels_the_request_of_the_same_id(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, stream(), id="42")
    start(model, stream(), id="43")
    running.emit("a")
    stopper, _ = start(model, text_request(stop=scalar(True, bool)), id="42")
    assert stopper.finals == [True] and stopper.responses[0].tensors == {} and stopper.responses[0].error is None
    assert model.engine.cancelled == [running.id]
    running.emit("", tokens=0, finish=FinishReason.CANCELLED)
    assert sender.finals == [False, True] and sender.responses[1].error is None
    assert sender.responses[1].tensors["finish_reason"].tolist() == [b"cancelled"]
    unnamed, _ = start(model, text_request(stop=scalar(True, bool)))
    assert unnamed.only_error().message == "stop is true but the request has no id; send the id of the request to cancel"
    unknown, _ = start(model, text_request(stop=scalar(True, bool)), id="nobody")
    assert unknown.finals == [True] and unknown.responses[0].error is None


def test_a_request_past_its_timeout_ends_with_an_error(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, parameters={"timeout": 1000})
    wait_until(lambda: model.engine.cancelled == [running.id])
    running.emit("", tokens=0, finish=FinishReason.CANCELLED)
    assert "timeout passed" in sender.only_error().message and sender.only_error().code == TritonError.UNAVAILABLE


def test_a_dead_engine_ends_the_requests_and_the_process(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    sender, _ = start(model, stream())
    exited = threading.Event()

    def exit_(status: int) -> None:
        assert status == 1
        exited.set()
        model.closing.set()

    monkeypatch.setattr(triton.os, "_exit", exit_)
    model.engine.healthy = False
    assert exited.wait(5)
    assert sender.only_error().message == "the engine failed while the request ran; send it again"
