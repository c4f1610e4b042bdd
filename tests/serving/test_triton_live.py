"""A real engine behind a real tritonserver, asked over HTTP and gRPC: the same answers, clients that leave, many at once."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from triton_client import (
    Stream,
    generate,
    generate_stream,
    infer,
    metrics,
    post,
    stream,
    used_blocks,
    wait_until,
)

from runtime.llm import LLM
from runtime.request import SamplingParams
from runtime.serving.server import TritonServer

pytestmark = pytest.mark.triton

PROMPTS = ("Once upon a time there was", "The king said", "And it came to pass", "In the beginning", "What a piece of work")


def in_process(llm: LLM, prompt: str, **params: Any) -> str:
    (completion,) = llm.generate([prompt], SamplingParams(**params))
    return completion.text


# ------------------------------------------------------------------------------------------------------- the same answer


def test_every_way_of_asking_gives_the_same_answer(server: TritonServer, alone: LLM) -> None:
    prompt, count = PROMPTS[0], 24
    expected = in_process(alone, prompt, max_tokens=count)
    assert len(expected) > count
    limits: dict[str, Any] = {"max_tokens": count, "exclude_input_in_output": True}
    assert generate(server, prompt, **limits)["text_output"] == expected
    assert generate(server, prompt, model="plain", **limits)["text_output"] == expected
    assert generate(server, prompt, max_tokens=count)["text_output"] == prompt + expected
    chunks = generate_stream(server, prompt, max_tokens=count, return_num_output_tokens=True)
    assert "".join(chunk["text_output"] for chunk in chunks) == expected
    assert sum(chunk["num_output_tokens"] for chunk in chunks) == count
    answer = stream(server, prompt, max_tokens=count)
    assert (answer.text, answer.num_tokens, answer.is_final, answer.finish_reason) == (expected, count, True, "length")
    assert infer(server, text_input=prompt, **limits)["text_output"] == [expected]
    alone_in_stream = stream(server, prompt, stream=False, max_tokens=count)
    assert [chunk["text_output"] for chunk in alone_in_stream.chunks] == [prompt + expected]


def test_streams_of_other_scripts_add_up(server: TritonServer, alone: LLM) -> None:
    for prompt in ("Привет, мир! Как", "東京は日本の", "so happy 😀🎉 that", "café naïve œuvre"):
        expected = in_process(alone, prompt, max_tokens=16, temperature=3.0, seed=7)
        answer = stream(server, prompt, max_tokens=16, temperature=3.0, seed=7)
        assert answer.text == expected
        whole = generate(server, prompt, max_tokens=16, temperature=3.0, seed=7)["text_output"]
        assert whole == prompt + expected


def test_sampling_is_reproducible_and_sequences_differ(server: TritonServer) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 11}
    first = stream(server, PROMPTS[1], num_return_sequences=3, stream=False, **asked)
    texts = {chunk["sequence_index"]: chunk["text_output"] for chunk in first.chunks}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
    assert generate(server, PROMPTS[1], **asked)["text_output"] == texts[0]
    together = infer(server, text_input=PROMPTS[1], num_return_sequences=3, **asked)["text_output"]
    assert together == [texts[index] for index in range(3)]


def test_stop_strings_streamed_and_not(server: TritonServer, alone: LLM) -> None:
    prompt, count = PROMPTS[0], 40
    text = in_process(alone, prompt, max_tokens=count)
    middle = len(text) // 2
    stops = [text[middle : middle + 5], text[middle : middle + 3], "never found"]  # one a prefix of another, across tokens
    cut = text[: text.index(stops[1])]
    for words in (stops, stops[::-1]):
        whole = generate(server, prompt, max_tokens=count, stop_words=words, exclude_input_in_output=True)
        assert (whole["text_output"], whole["finish_reason"]) == (cut, "stop")
        answer = stream(server, prompt, max_tokens=count, stop_words=[word.encode() for word in words])
        assert (answer.text, answer.finish_reason) == (cut, "stop")
    assert stream(server, prompt, max_tokens=count, stop_words=b"").text == text


def test_bad_words_do_not_come(server: TritonServer, alone: LLM) -> None:
    text = in_process(alone, PROMPTS[1], max_tokens=20)
    word = re.findall(r"[a-z]+", text)[3]
    answer = stream(server, PROMPTS[1], max_tokens=20, bad_words=word.encode())
    assert answer.text != text and f" {word} " not in answer.text


def test_numbers_about_a_request(server: TritonServer) -> None:
    flags = {f"return_{name}": True for name in ("log_probs", "perf_metrics", "num_input_tokens", "num_output_tokens")}
    result = generate(server, PROMPTS[2], max_tokens=6, **flags)
    assert len(result["output_log_probs"]) == 6 and max(result["output_log_probs"]) < 0
    assert result["cum_log_probs"] == pytest.approx(sum(result["output_log_probs"]), rel=1e-5)  # both are float32
    assert result["num_output_tokens"] == 6 and result["num_input_tokens"] > 1
    times = [result[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times) and times[0] > 1.7e18
    assert result["kv_cache_alloc_total_blocks"] == result["kv_cache_alloc_new_blocks"] + result["kv_cache_reused_blocks"] >= 1


def test_what_the_openai_front_end_sends_and_expects(server: TritonServer) -> None:
    """One string per response; one response when not streaming; counts that add up when streaming."""
    sent: dict[str, Any] = {
        "max_tokens": 8, "stop_words": [b"@@"], "top_p": 1.0, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3,
        "temperature": 0.7, "exclude_input_in_output": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
    }  # fmt: skip
    whole = stream(server, PROMPTS[3], stream=False, **sent)
    assert len(whole.chunks) == 1 and whole.is_final and whole.num_tokens == 8
    streamed = stream(server, PROMPTS[3], **sent)
    assert streamed.text == whole.text and streamed.num_tokens == 8
    counts = {chunk["num_input_tokens"] for chunk in streamed.chunks}
    assert counts == {whole.chunks[0]["num_input_tokens"]}
    config = json.loads(get(server, "/v2/models/llm/config"))
    assert "exclude_input_in_output" in {tensor["name"] for tensor in config["input"]}


def get(server: TritonServer, path: str) -> str:
    connection = http.client.HTTPConnection(server.http_url, timeout=10)
    connection.request("GET", path)
    text = connection.getresponse().read().decode("utf-8")
    connection.close()
    return text


# ---------------------------------------------------------------------------------------------------------------- leaving


LONG = 2000  # tokens: seconds of work, many times what it takes to notice that a client has gone


def count_cancelled(server: TritonServer) -> float:
    return metrics(server)['forgeline_requests_total{finish_reason="cancelled",model="long",version="1"}']


def num_active(server: TritonServer) -> float:
    return metrics(server)['nv_trt_llm_request_metrics{model="long",request_type="active",version="1"}']


@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_grpc_stream_dropped_after_some_tokens(server: TritonServer, count: int) -> None:
    before = count_cancelled(server)
    flags = {"max_tokens": LONG, "ignore_eos": True, "stream": True, "return_log_probs": True}
    with Stream(server, PROMPTS[0], model="long", **flags) as running:
        for _ in range(count):
            assert running.next() is not None
        if count == 0:
            wait_until(lambda: num_active(server) == 1)  # else the request may never have left this process
    wait_until(lambda: used_blocks(server, "long") == 0 and count_cancelled(server) == before + 1)


def test_a_killed_client_frees_its_blocks(server: TritonServer) -> None:
    before = count_cancelled(server)
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from types import SimpleNamespace\nfrom triton_client import Stream\n"
        f"running = Stream(SimpleNamespace(grpc_url={server.grpc_url!r}), 'Once', model='long', "
        f"max_tokens={LONG}, ignore_eos=True, stream=True)\n"
        "for chunk in running:\n    print(chunk['text_output'], flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline()
        client.kill()
        wait_until(lambda: used_blocks(server, "long") == 0 and count_cancelled(server) == before + 1)


def test_an_http_client_that_hangs_up(server: TritonServer) -> None:
    before = count_cancelled(server)
    body = json.dumps({"text_input": PROMPTS[1], "max_tokens": LONG, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v2/models/long/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        connection.sendall(head + body)
        received = b""
        while received.count(b"data:") < 3:
            received += connection.recv(4096)
    wait_until(lambda: used_blocks(server, "long") == 0 and count_cancelled(server) == before + 1)


def test_stop_ends_the_stream_of_the_same_id(server: TritonServer) -> None:
    with Stream(server, PROMPTS[0], model="long", request_id="42", max_tokens=LONG, ignore_eos=True, stream=True) as running:
        assert running.next() is not None
        assert post(server, "long/generate", {"id": "42", "text_input": "", "max_tokens": 1, "stop": True})[0] == 200
        for _ in running:
            pass
        assert running.answer.finish_reason == "cancelled" and running.answer.is_final and not running.answer.error


def test_a_timeout_ends_a_request(server: TritonServer) -> None:
    status, body = post(server, "long/generate", {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "timeout": 50_000})
    assert status != 200 and "timeout passed before it was complete" in body


# --------------------------------------------------------------------------------------------------------------- under load


def test_two_hundred_requests_at_once(server: TritonServer, alone: LLM) -> None:
    """Random lengths, priorities and stop strings, a third cancelled: the others answer as if they were alone."""
    chance = random.Random(5)
    longest = 48
    prompts = [f"{PROMPTS[index % 5]} {'and then ' * (index % 7)}{index}" for index in range(25)]
    token_ids = {}
    for prompt in prompts:  # one at a time
        (completion,) = alone.generate([prompt], SamplingParams(max_tokens=longest))
        token_ids[prompt] = completion.token_ids
    ready = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            ready.append(server.is_ready())

    def ask(index: int) -> str:
        seed = random.Random(index)
        prompt, count = seed.choice(prompts), seed.randint(1, longest)
        full = alone.tokenizer.decode(token_ids[prompt])
        stop = full[20:24] if seed.random() < 0.3 and len(full) > 24 else ""
        flags: dict[str, Any] = {
            "max_tokens": count,
            "priority": seed.randint(-3, 3),
            "stream": True,
            "return_num_output_tokens": True,
        }
        if stop:
            flags["stop_words"] = stop.encode()
        with Stream(server, prompt, **flags) as running:
            if index % 3 == 0:
                for _ in range(seed.choice((0, 1, 5))):
                    running.next()
                return "cancelled"
            for _ in running:
                pass
        answer = running.answer
        assert not answer.error, answer.error
        expected = alone.tokenizer.decode(token_ids[prompt][:count])
        if stop and stop in expected:
            expected = expected[: expected.index(stop)]
        assert answer.text == expected, (prompt, count, stop)
        return "completed"

    order = list(range(200))
    chance.shuffle(order)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(max_workers=200) as pool:
            ends = list(pool.map(ask, order))
    finally:
        done.set()
        watcher.join()
    assert (ends.count("completed"), ends.count("cancelled")) == (133, 67)
    assert ready and all(ready)
    wait_until(lambda: used_blocks(server) == 0)


def test_a_full_queue_refuses_and_takes_the_next_when_one_has_left(server: TritonServer) -> None:
    flags: dict[str, Any] = {"model": "long", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    refusal = "4 requests are queued or running and the limit is 4; retry later"
    with ExitStack() as running:
        stay = [running.enter_context(Stream(server, prompt, **flags)) for prompt in PROMPTS[:3]]
        with Stream(server, PROMPTS[3], **flags) as leaves:
            assert all(each.next() is not None for each in (*stay, leaves))
            with Stream(server, PROMPTS[4], priority=-9, **flags) as fifth:  # goes before others, not beyond the limit
                assert fifth.next() is None and refusal in fifth.answer.error
            status, body = post(server, "long/generate", {"text_input": "a", "max_tokens": 1})
            assert status != 200 and json.loads(body) == {"error": refusal}
        wait_until(lambda: num_active(server) == 3)
        assert stream(server, "a", model="long", max_tokens=2).num_tokens == 2
