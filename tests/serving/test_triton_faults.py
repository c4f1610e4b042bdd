"""What goes wrong beside a request: the model's own threads outlive it, and nothing goes uncounted."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_model import Make, start, stream, triton, wait_until
from fake_triton import MetricFamily, TritonError, scalar, text_request

from runtime.errors import PromptTooLong
from runtime.request import FinishReason


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "PAUSE_AFTER_FAILURE_S", 0.005)


def num_ended(reason: str) -> list[float]:
    (metric,) = [m for m in MetricFamily.made["forgeline_requests_total"].metrics if m.labels["finish_reason"] == reason]
    return metric.calls


def test_sequences_that_outlive_their_client_are_counted(make_model: Make) -> None:
    model = make_model()
    sender, running = start(model, text_request(num_return_sequences=scalar(3, np.int32)))
    running.emit("a", index=2, finish=FinishReason.LENGTH)
    sender.cancelled = True
    wait_until(lambda: running.id in model.engine.cancelled)
    running.emit("", index=0, tokens=0, finish=FinishReason.CANCELLED)  # the client is told here
    running.emit("", index=1, tokens=0, finish=FinishReason.CANCELLED)
    assert sender.finals == [False, True]
    wait_until(lambda: sum(num_ended("cancelled")) == 2)
    assert sum(num_ended("length")) == 1


def test_a_client_that_cannot_be_asked_hides_no_other(make_model: Make, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    broken, _ = start(model, stream())
    leaves, running = start(model, stream())

    def raise_() -> bool:
        raise RuntimeError("no such factory")

    broken.is_cancelled = raise_
    wait_until(lambda: "the look at one client failed" in caplog.text)
    leaves.cancelled = True
    wait_until(lambda: model.engine.cancelled == [running.id])
    assert all(thread.is_alive() for thread in model.threads)


def test_metrics_that_fail_once_come_again(make_model: Make, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    (blocks,) = [
        m for m in MetricFamily.made["nv_trt_llm_kv_cache_block_metrics"].metrics if m.labels["kv_cache_block_type"] == "used"
    ]
    failed = threading.Event()
    stats = model.engine.stats

    def fail() -> Any:
        failed.set()
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(model.engine, "stats", fail)
    assert failed.wait(5)
    model.engine.used_blocks = 5
    monkeypatch.setattr(model.engine, "stats", stats)
    wait_until(lambda: bool(blocks.calls) and blocks.calls[-1] == 5)
    assert all(thread.is_alive() for thread in model.threads)


def test_a_dead_engine_ends_the_process_though_a_client_cannot_be_told(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    gone, _ = start(model, stream())
    told, _ = start(model, stream())
    gone.broken = True
    exited = threading.Event()

    def exit_(status: int) -> None:
        exited.set()
        model.closing.set()

    monkeypatch.setattr(triton.os, "_exit", exit_)
    model.engine.healthy = False
    assert exited.wait(5)
    assert told.only_error().message == "the engine failed while the request ran; send it again"


def test_text_that_cannot_fit_is_the_clients_error(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise PromptTooLong(f"{len(text)} bytes, {add_special_tokens}")

    monkeypatch.setattr(model.engine, "encode", encode)
    sender, submitted = start(model)
    assert submitted == [] and not model.live
    assert (sender.only_error().message, sender.only_error().code) == ("2 bytes, True", TritonError.INVALID_ARG)
