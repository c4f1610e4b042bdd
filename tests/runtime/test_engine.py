"""The engine as its callers see it: deltas that add up, ends that always come, errors before anything is queued."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import LLM
from runtime.config import RuntimeConfig
from runtime.engine import Engine, Output
from runtime.errors import InvalidRequest, PromptTooLong, QueueFull
from runtime.request import FinishReason, SamplingParams

PROMPT = "And God said unto Moses"
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine.load(tiny_engine("fp32"), RuntimeConfig(num_blocks=128, max_queue_size=40)) as loaded:
        yield loaded
        assert loaded.is_healthy()


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no block referenced, no request known."""
    yield
    if "engine" in request.fixturenames:
        loaded = request.getfixturevalue("engine")
        wait_until(lambda: loaded.stats().num_used_blocks == 0 and not loaded._sequences and not loaded._user_ids)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def collect(engine: Engine, prompt: str | list[int], params: SamplingParams, **options: object) -> list[Output]:
    """All outputs of a request, until every sequence has ended."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(prompt, params, on_output=outputs.put, **options)  # type: ignore[arg-type]
    result: list[Output] = []
    for _ in range(int(options.get("n", 1))):  # type: ignore[call-overload]
        while not result or result[-1].finish_reason is None:
            result.append(outputs.get(timeout=60))
        if len([output for output in result if output.finish_reason]) < int(options.get("n", 1)):  # type: ignore[call-overload]
            result.append(outputs.get(timeout=60))
    return result


def test_deltas_add_up(engine: Engine) -> None:
    outputs = collect(engine, PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))
    ids = [token for output in outputs for token in output.token_ids]
    assert len(ids) == 40 == outputs[-1].num_output_tokens
    assert "".join(output.text for output in outputs) == engine.tokenizer.decode(ids)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert sum(len(output.logprobs) for output in outputs) == 40
    assert outputs[-1].cum_logprob == pytest.approx(sum(entry.logprob for output in outputs for entry in output.logprobs))
    assert outputs[-1].num_prompt_tokens == len(engine.tokenizer.encode(PROMPT))
    timings = outputs[-1].timings
    assert timings.arrival_ns < timings.first_scheduled_ns < timings.first_token_ns < timings.last_token_ns


def test_stop_string_ends_the_text_and_the_request(engine: Engine) -> None:
    free = "".join(output.text for output in collect(engine, PROMPT, LONG))
    stop = free[60:66]
    before = engine.stats().generation_tokens
    outputs = collect(engine, PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True, stop=(stop,)))
    text = "".join(output.text for output in outputs)
    assert text == free[: free.index(stop)]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == sum(len(output.token_ids) for output in outputs) < 200
    wait_until(lambda: not engine._sequences)
    assert engine.stats().generation_tokens - before < 1000  # a busy machine may be late, but not to the end


def test_sequences_of_one_request_share_the_prompt(engine: Engine) -> None:
    before = engine.stats()
    outputs = collect(engine, PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), n=3)
    texts = {index: "".join(output.text for output in outputs if output.index == index) for index in range(3)}
    assert texts[0] == texts[1] == texts[2] != ""
    prompt_tokens = engine.stats().prompt_tokens - before.prompt_tokens
    assert prompt_tokens == 3 * outputs[0].num_prompt_tokens
    forks = [output for output in outputs if output.index and output.finish_reason]
    assert all(output.num_cached_tokens == output.num_prompt_tokens - 2 for output in forks)


def test_seeded_sequences_differ_and_repeat(engine: Engine) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)

    def texts() -> list[str]:
        outputs = collect(engine, PROMPT, params, n=2)
        return ["".join(output.text for output in outputs if output.index == index) for index in range(2)]

    first = texts()
    assert first[0] != first[1]
    other = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=1.0, seed=6)
    noise = [engine.submit(PROMPT, other, on_output=lambda output: None) for _ in range(5)]
    assert texts() == first  # whatever shares the batch
    for name in noise:
        engine.cancel(name)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_cancel(engine: Engine, after: int) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    name = engine.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True, logprobs=2), on_output=outputs.put)
    tokens = 0
    while tokens < after:
        tokens += len(outputs.get(timeout=60).token_ids)
    engine.cancel(name)
    engine.cancel("no such request")
    last = outputs.get(timeout=60)
    while last.finish_reason is None:
        last = outputs.get(timeout=60)
    assert last.finish_reason is FinishReason.CANCELLED
    assert last.num_output_tokens < 1500
    time.sleep(0.02)
    assert outputs.empty()


def test_what_cannot_run_is_refused_at_once(engine: Engine) -> None:
    def refuse(prompt: str | list[int], error: type[Exception], match: str, **options: object) -> None:
        with pytest.raises(error, match=match):
            engine.submit(prompt, SamplingParams(), on_output=pytest.fail, **options)  # type: ignore[arg-type]

    refuse([5] * 2048, PromptTooLong, r"the prompt has 2048 tokens but max_model_len=2048 leaves room for 2047; shorten")
    refuse([], InvalidRequest, "the prompt is empty")
    refuse(PROMPT, InvalidRequest, "n is 0 but must be at least 1", n=0)


def test_a_prompt_of_exactly_the_longest_length_gives_one_token(engine: Engine) -> None:
    outputs = collect(engine, [5] * 2047, SamplingParams(max_tokens=50, ignore_eos=True))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].num_output_tokens == 1


def test_queue_limit_and_ids_in_use(engine: Engine) -> None:
    done = threading.Semaphore(0)

    def count(output: Output) -> None:
        if output.finish_reason is not None:
            done.release()

    names = [engine.submit(PROMPT, LONG, on_output=count) for _ in range(40)]
    with pytest.raises(QueueFull, match=r"40 requests are queued or running and the limit is 40; retry later"):
        engine.submit(PROMPT, LONG, on_output=pytest.fail)
    for name in names:
        engine.cancel(name)
    for _ in names:
        assert done.acquire(timeout=60)
    engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), request_id="mine", on_output=count)
    with pytest.raises(InvalidRequest, match="'mine' is already in use"):
        engine.submit(PROMPT, LONG, request_id="mine", on_output=pytest.fail)
    engine.cancel("mine")
    assert done.acquire(timeout=60)


def test_a_failing_consumer_ends_its_own_request_only(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: Output) -> None:
        raise ConnectionResetError("gone")

    before = engine.stats().generation_tokens
    engine.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True), on_output=broken)
    outputs = collect(engine, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    assert outputs[-1].num_output_tokens == 20
    wait_until(lambda: not engine._sequences)
    assert engine.stats().generation_tokens - before < 1000
    assert caplog.text.count("the consumer of request") == 1


def test_a_lagging_stream_gets_tokens_together_and_first_tokens_overtake_it(engine: Engine) -> None:
    """The consumer of one stream stops; what the loop makes meanwhile comes in one Output, after the first of a new stream."""
    order: list[tuple[str, int]] = []
    stalled, go_on, ended = threading.Event(), threading.Event(), threading.Semaphore(0)

    def slow(output: Output) -> None:
        order.append(("slow", len(output.token_ids)))
        if not stalled.is_set():
            stalled.set()
            assert go_on.wait(60)
        if output.finish_reason is not None:
            ended.release()

    def fresh(output: Output) -> None:
        order.append(("fresh", len(output.token_ids)))
        if output.finish_reason is not None:
            ended.release()

    engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), on_output=slow)
    assert stalled.wait(60)
    produced = engine.stats().generation_tokens
    engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), on_output=fresh)
    wait_until(lambda: engine.stats().generation_tokens >= produced + 20)
    go_on.set()
    assert ended.acquire(timeout=60) and ended.acquire(timeout=60)
    assert order[1][0] == "fresh"
    assert next(count for name, count in order[1:] if name == "slow") > 1
    for who in ("slow", "fresh"):
        assert sum(count for name, count in order if name == who) == 100


def test_close_ends_what_is_running(tiny_engine: Callable[[str], Path]) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine = Engine.load(tiny_engine("fp32"), RuntimeConfig(num_blocks=128))
    for _ in range(3):
        engine.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True), on_output=outputs.put)
    outputs.get(timeout=60)
    engine.close()
    engine.close()
    ends = []
    while not outputs.empty():
        output = outputs.get()
        ends += [output.finish_reason] if output.finish_reason else []
    assert ends == [FinishReason.CANCELLED] * 3
    assert not engine.is_healthy()
    with pytest.raises(QueueFull, match="shutting down"):
        engine.submit(PROMPT, LONG, on_output=pytest.fail)


def test_shared_prefix_gives_equal_tokens_sooner(tiny_engine: Callable[[str], Path]) -> None:
    """1,000 of 1,016 prompt tokens shared; both engines in one run, side by side."""
    ttft: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    engines = {on: LLM(tiny_engine("int8"), enable_prefix_caching=on, max_num_seqs=4) for on in (True, False)}
    for seed in range(5):
        shared = [100 + (seed * 7919 + i * i) % 1900 for i in range(1000)]
        for on, llm in engines.items():
            llm.generate([[*shared, *range(200, 216)]], SamplingParams(max_tokens=4, ignore_eos=True))
            (second,) = llm.generate([[*shared, *range(300, 316)]], SamplingParams(max_tokens=16, ignore_eos=True))
            assert second.num_cached_tokens == (992 if on else 0)
            ttft[on].append(second.timings.ttft_ms())
            tokens[on].append(second.token_ids)
    for llm in engines.values():
        llm.close()
    assert tokens[True] == tokens[False]
    assert sorted(ttft[True])[2] <= 0.3 * sorted(ttft[False])[2]


def test_llm_streams_and_chats(tiny_engine: Callable[[str], Path]) -> None:
    with LLM(tiny_engine("fp32"), num_blocks=128) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        (whole,) = llm.generate(PROMPT, params)
        assert "".join(output.text for output in llm.stream(PROMPT, params)) == whole.text
        before = llm.engine.stats().generation_tokens
        for _ in llm.stream(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True)):
            break  # leaving cancels
        wait_until(lambda: llm.engine.stats().num_used_blocks == 0)
        assert llm.engine.stats().generation_tokens - before < 1000
        assert llm.chat([{"role": "user", "content": "Who art thou?"}], params).num_prompt_tokens > 4
        with pytest.raises(InvalidRequest, match="unknown runtime option 'max_seqs'"):
            LLM(tiny_engine("fp32"), max_seqs=4)


def test_a_step_too_small_to_cut_prompts_in_two_is_refused_at_load(tiny_engine: Callable[[str], Path]) -> None:
    directory = tiny_engine("fp32")  # its matrices run on OpenVINO's kernels
    with pytest.raises(InvalidRequest, match=r"max_num_batched_tokens=2 .* parts of at least 2 tokens; raise it to at least 3"):
        Engine.load(directory, RuntimeConfig(max_num_seqs=2, max_num_batched_tokens=2))
    with Engine.load(directory, RuntimeConfig(max_num_seqs=2, max_num_batched_tokens=3)) as smallest:
        for length in (1, 2, 3, 4, 5):
            outputs = collect(smallest, list(range(5, 5 + length)), SamplingParams(max_tokens=3, ignore_eos=True))
            assert outputs[-1].num_output_tokens == 3
