"""A real tritonserver as its operator sees it: metrics, bad input, a killed backend, an engine that does not load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_client import Stream, metrics, post, stream

from builder.deploy import deploy
from runtime.contract import MANIFEST_FILE
from runtime.errors import ServerError
from runtime.serving.server import TritonServer

pytestmark = pytest.mark.triton


def test_metrics_of_triton_and_ours(server: TritonServer) -> None:
    stream(server, "What a piece of work", max_tokens=8)
    time.sleep(0.25)
    found = metrics(server)
    families = {name.partition("{")[0] for name in found}
    assert {
        "nv_inference_request_success", "nv_inference_request_duration_us", "nv_trt_llm_request_metrics",
        "nv_trt_llm_runtime_memory_metrics", "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_inflight_batcher_metrics",
        "nv_trt_llm_general_metrics", "forgeline_generation_tokens_total",
    } <= families  # fmt: skip
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"):
        assert found[f'forgeline_{name}_seconds_count{{model="llm",version="1"}}'] > 0, name
    blocks = {kind: found[f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}",model="llm",version="1"}}']
              for kind in ("max", "used", "free", "tokens_per", "fraction")}  # fmt: skip
    assert blocks == {"max": 1024 / blocks["tokens_per"], "used": 0, "free": blocks["max"], "tokens_per": 32, "fraction": 0}


BAD = [
    ({"max_tokens": 0}, "max_tokens is 0 but must be at least 1"),
    ({"max_tokens": -1}, "max_tokens is -1 but must be at least 1"),
    ({"temperature": float("nan")}, "temperature is nan but must be a finite number"),
    ({"temperature": -1.0}, "temperature is -1.0 but must be a finite number"),
    ({"top_p": 0.0}, "top_p is 0.0 but must be in (0, 1]"),
    ({"top_p": 1.5}, "top_p is 1.5 but must be in (0, 1]"),
    ({"beam_width": 2}, "beam_width is 2 but this runtime decodes one beam"),
    ({"guided_decoding_guide": b"{}"}, "guided_decoding_guide is not available"),
    ({"lora_weights": np.zeros((1, 1, 1), np.float16)}, "lora_weights is not available"),
    ({"parameters": {"best_of": 2}}, "unknown request parameter 'best_of'; known are priority"),
    ({"text": b"caf\xe9"}, "text_input is not UTF-8: byte 0xe9 at offset 3"),
    ({"text": "too long " * 600}, "max_model_len=512"),
    ({"text": np.array([["a", "b"]], dtype=object)}, "Expected [-1,1], got [1,2]"),
    ({"text": np.array([["a"], ["b"]], dtype=object), "max_tokens": np.full((2, 1), 3, np.int32)}, "batch-size must be <= 1"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bad_input_is_one_sentence_and_the_server_goes_on(server: TritonServer, values: dict[str, Any], message: str) -> None:
    values = {"max_tokens": 4, **values}
    with Stream(server, values.pop("text", "hi"), **values) as running:
        for _ in running:
            pass
    assert message in running.answer.error, running.answer
    assert running.answer.chunks == [] and server.is_ready()


def test_bad_input_over_http(server: TritonServer) -> None:
    for body, message in (
        ({"text_input": "a"}, "missing required input(s) ['max_tokens']"),
        ({"text_input": "a", "max_tokens": 4, "best_of": 2}, "unknown request parameter 'best_of'"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0 but must be at least 1"),
    ):
        status, reply = post(server, "llm/generate", body)
        assert status == 400 and message in json.loads(reply)["error"]
    status, reply = post(server, "plain/generate_stream", {"text_input": "a", "max_tokens": 4, "stream": True})
    assert "stream is true but this model was deployed with decoupled_mode=false" in reply


def test_a_backend_killed_in_mid_stream(repository: Path) -> None:
    with TritonServer(repository) as server:
        (pid,) = [pid for pid, model in server.backend_pids().items() if model == "llm"]
        with Stream(server, "Once upon a time", max_tokens=480, ignore_eos=True, stream=True) as running:
            assert running.next() is not None
            os.kill(pid, signal.SIGKILL)
            while running.next(timeout=20) is not None:
                pass
            assert running.answer.error and not running.answer.is_final
            assert server.wait_until_ready(60)
        assert server.num_restarts == 1 and server.error is None
        assert stream(server, "Once upon a time", max_tokens=4).num_tokens == 4


def test_an_engine_that_does_not_load_is_explained(tiny_engine: Callable[[str], Path], tmp_path: Path) -> None:
    model = deploy(tiny_engine("fp32"), tmp_path, "llm", copy=True)
    manifest = model / "1" / "engine" / MANIFEST_FILE
    facts = json.loads(manifest.read_text())
    facts["libraries"]["openvino"] = "1999.1"
    manifest.write_text(json.dumps(facts))
    refusal = (
        r"before it was ready: model 'llm' does not load: the engine was built with openvino 1999\.1 but .+ rebuild the engine$"
    )
    with pytest.raises(ServerError, match=refusal):
        TritonServer(tmp_path).start()


def test_the_command_serves_until_it_is_told_to_stop(repository: Path, tmp_path: Path) -> None:
    ports = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    command = [
        sys.executable, "-m", "runtime.cli", "serve", "--repository", str(repository), "--http-port", str(ports[0]),
        "--grpc-port", str(ports[1]), "--metrics-port", str(ports[2]), "--log-file", str(tmp_path / "log"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == (
            f"ready: HTTP 127.0.0.1:{ports[0]}, gRPC 127.0.0.1:{ports[1]}, metrics 127.0.0.1:{ports[2]}; Ctrl-C stops\n"
        )
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and f"error: http port {ports[0]} on 127.0.0.1 cannot be used" in second.stderr
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))
