"""Requests in, responses out: what the Triton model sends for an answer that comes to its end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import fake_triton
import numpy as np
import pytest
from fake_model import Make, start, stream, texts, triton, wait_until
from fake_triton import MetricFamily, Request, TritonError, scalar, text_request

from runtime.errors import ManifestMismatch, QueueFull
from runtime.request import FinishReason


def test_a_stream_sends_deltas_and_counts_that_add_up(make_model: Make) -> None:
    sender, running = start(make_model(), stream(return_num_input_tokens=scalar(True, bool)))
    running.emit("He")
    running.emit("llo", tokens=3)
    running.emit("!", finish=FinishReason.LENGTH)
    assert texts(sender) == [[b"He"], [b"llo"], [b"!"]]
    assert [int(response.tensors["num_output_tokens"][0, 0]) for response in sender.responses] == [1, 3, 1]
    assert [int(response.tensors["num_input_tokens"][0, 0]) for response in sender.responses] == [3, 3, 3]
    assert sender.finals == [False, False, True]
    assert ["finish_reason" in response.tensors for response in sender.responses] == [False, False, True]
    assert sender.responses[2].tensors["finish_reason"].tolist() == [b"length"]


def test_without_stream_there_is_one_response_with_the_prompt_first(make_model: Make) -> None:
    sender, running = start(make_model())
    running.emit("He")
    running.emit("llo", finish=FinishReason.STOP)
    assert texts(sender) == [[b"hiHello"]] and sender.finals == [True]
    assert set(sender.responses[0].tensors) == {"text_output", "finish_reason"}
    sender, running = start(make_model(), text_request(exclude_input_in_output=scalar(True, bool)))
    running.emit("Hello", finish=FinishReason.STOP)
    assert texts(sender) == [[b"Hello"]]


def test_prompt_and_options_reach_the_engine(make_model: Make) -> None:
    model = make_model()
    _, running = start(model, text_request(priority=scalar(-1, np.int32), cache_salt=scalar(b"t", object)))
    assert running.prompt == [0, 104, 105]
    assert (running.keywords["priority"], running.keywords["cache_salt"], running.keywords["n"]) == (-1, "t", 1)
    _, running = start(model, text_request(add_special_tokens=scalar(False, bool)))
    assert running.prompt == [104, 105]


def test_log_probs_and_performance(make_model: Make) -> None:
    flags = {name: scalar(True, bool) for name in ("return_log_probs", "return_perf_metrics", "return_num_output_tokens")}
    sender, running = start(make_model(), text_request(**flags))
    running.emit("a", tokens=2)
    running.emit("b", finish=FinishReason.LENGTH)
    tensors = sender.responses[0].tensors
    assert tensors["output_log_probs"].tolist() == [[[-0.5, -0.5, -0.5]]]
    assert tensors["cum_log_probs"].tolist() == [[-1.5]]
    assert tensors["num_output_tokens"].tolist() == [[3]]
    numbers = {name: tensors[name].tolist() for name in tensors if "blocks" in name or "time" in name or "draft" in name}
    assert numbers == {
        "kv_cache_alloc_new_blocks": [[2]], "kv_cache_reused_blocks": [[1]], "kv_cache_alloc_total_blocks": [[3]],
        "arrival_time_ns": [[1_000_000_000]], "first_scheduled_time_ns": [[1_100_000_000]],
        "first_token_time_ns": [[1_300_000_000]], "last_token_time_ns": [[1_700_000_000]],
        "total_accepted_draft_tokens": [[0]], "total_draft_tokens": [[0]],
    }  # fmt: skip
    assert tensors["acceptance_rate"].tolist() == [[0.0]] and tensors["acceptance_rate"].dtype == np.float32
    assert tensors["arrival_time_ns"].dtype == np.int64


def test_only_requested_outputs_are_sent(make_model: Make) -> None:
    sender, running = start(make_model(), text_request(return_log_probs=scalar(True, bool)), wanted=["cum_log_probs"])
    running.emit("a", finish=FinishReason.LENGTH)
    assert set(sender.responses[0].tensors) == {"cum_log_probs"}


def test_several_sequences_come_one_by_one_with_their_index(make_model: Make) -> None:
    sender, running = start(make_model(), text_request(num_return_sequences=scalar(2, np.int32)))
    running.emit("x", index=1)
    running.emit("a", index=0)
    running.emit("y", index=1, finish=FinishReason.STOP)
    running.emit("b", index=0, finish=FinishReason.LENGTH)
    assert texts(sender) == [[b"hixy"], [b"hiab"]] and sender.finals == [False, True]
    assert [response.tensors["sequence_index"].tolist() for response in sender.responses] == [[[1]], [[0]]]


def test_a_batch_answers_every_row(make_model: Make) -> None:
    inputs = {"text_input": np.array([[b"p"], [b"q"]], dtype=object), "max_tokens": np.array([[3], [5]], dtype=np.int32)}
    sender, (first, second) = start(make_model(max_batch_size=4), inputs)
    second.emit("2", finish=FinishReason.STOP)
    first.emit("1", finish=FinishReason.STOP)
    assert texts(sender) == [[b"q2"], [b"p1"]] and sender.finals == [False, True]
    assert [response.tensors["batch_index"].tolist() for response in sender.responses] == [[[1]], [[0]]]


def test_a_model_that_is_not_decoupled_answers_once(make_model: Make) -> None:
    model = make_model(decoupled=False)
    sender, running = start(model, text_request(num_return_sequences=scalar(2, np.int32), return_log_probs=scalar(True, bool)))
    running.emit("b", index=1, tokens=2, finish=FinishReason.STOP)
    assert sender.sent == []
    running.emit("a", index=0, finish=FinishReason.LENGTH)
    tensors = sender.responses[0].tensors
    assert tensors["text_output"].tolist() == [b"hia", b"hib"] and sender.finals == [True]
    assert tensors["finish_reason"].tolist() == [b"length", b"stop"]
    assert tensors["cum_log_probs"].tolist() == [[-0.5, -1.0]]
    assert tensors["output_log_probs"].tolist() == [[[-0.5, 0.0], [-0.5, -0.5]]]
    sender, _ = start(model, stream())
    assert sender.only_error().message.startswith("stream is true but this model was deployed with decoupled_mode=false")
    assert sender.only_error().code == TritonError.INVALID_ARG
    assert len(model.engine.submitted) == 1


def test_flat_tensors_without_a_batch_dimension(make_model: Make) -> None:
    inputs = {"text_input": np.array([b"p"], dtype=object), "max_tokens": np.array([3], dtype=np.int32),
              "return_num_output_tokens": np.array([True])}  # fmt: skip
    sender, running = start(make_model(max_batch_size=0), inputs)
    running.emit("1", finish=FinishReason.STOP)
    assert sender.responses[0].tensors["num_output_tokens"].tolist() == [1]


def test_errors_have_triton_codes(make_model: Make) -> None:
    model = make_model()
    for inputs, code in (
        (text_request(max_tokens=0), TritonError.INVALID_ARG),
        (text_request(lora_task_id=scalar(1, np.uint64)), TritonError.UNSUPPORTED),
    ):
        sender, _ = start(model, inputs)
        assert sender.only_error().code == code
    model.engine.refuse_with = QueueFull("full; retry later")
    sender, _ = start(model)
    assert (sender.only_error().message, sender.only_error().code) == ("full; retry later", TritonError.UNAVAILABLE)
    model.engine.refuse_with = ZeroDivisionError("boom")
    sender, _ = start(model)
    assert "ZeroDivisionError: boom" in sender.only_error().message and sender.only_error().code == TritonError.INTERNAL
    assert not model.live


def test_one_bad_request_leaves_its_neighbours_alone(make_model: Make) -> None:
    model = make_model()
    bad, good = Request(text_request(max_tokens=-1)), Request(text_request())
    model.execute([bad, good])
    assert bad.sender.only_error().message == "max_tokens is -1 but must be at least 1"
    model.engine.submitted[0].emit("ok", finish=FinishReason.STOP)
    assert texts(good.sender) == [[b"hiok"]]


def test_no_instrument_outlives_the_model(make_model: Make) -> None:
    model = make_model()
    families = [weakref.ref(family) for family in MetricFamily.made.values()]
    MetricFamily.made = {}
    model.finalize()
    gc.collect()
    assert len(families) > 10 and not any(family() for family in families)


def test_the_metrics_follow_the_engine(make_model: Make) -> None:
    model = make_model()
    blocks = {m.labels["kv_cache_block_type"]: m for m in MetricFamily.made["nv_trt_llm_kv_cache_block_metrics"].metrics}
    assert blocks["used"].labels == {"kv_cache_block_type": "used", "model": "llm", "version": "1"}
    wait_until(lambda: blocks["used"].calls == [0])
    model.engine.used_blocks = 3
    wait_until(lambda: blocks["used"].calls == [0, 3])
    _, running = start(model)
    running.emit("a", tokens=5, finish=FinishReason.STOP)
    (ttft,) = MetricFamily.made["forgeline_time_to_first_token_seconds"].metrics
    wait_until(lambda: ttft.calls == [0.3])
    memory = {m.labels["memory_type"]: m for m in MetricFamily.made["nv_trt_llm_runtime_memory_metrics"].metrics}
    assert memory["cpu"].calls[0] > 1_000_000 and memory["gpu"].calls == [0]


def test_options_reach_the_engine(make_model: Make) -> None:
    model = make_model(max_queue_size="9", enable_kv_cache_reuse="false", exclude_input_in_output="true")
    assert model.engine.loaded_with.max_queue_size == 9 and not model.engine.loaded_with.enable_prefix_caching
    sender, running = start(model)
    running.emit("a", finish=FinishReason.STOP)
    assert texts(sender) == [[b"a"]]


def test_an_engine_that_does_not_load_is_one_sentence(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Any, config: Any) -> Any:
        raise ManifestMismatch("built with openvino 1 but 2 is installed; rebuild the engine")

    monkeypatch.setattr(triton.Engine, "load", load)
    with pytest.raises(fake_triton.TritonModelException, match=r"^built with openvino 1 but 2 is installed; rebuild .*e$"):
        make_model()
    with pytest.raises(fake_triton.TritonModelException, match="has no parameter engine_dir"):
        make_model(engine_dir="")
