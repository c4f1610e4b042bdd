"""Our own variants side by side on the tiny Llama, in about a minute; runs in CI. Asserts nothing about time, only about tokens.

Prefix caching on and off; continuous and static batching; chunked prefill on and off. Fixed seeds, EOS ignored.
"""

from __future__ import annotations

import random
import time

from common import Stream, engine_directory, finish, median, random_prompts, run_closed_loop

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams

REPETITIONS = 3


def prefix_caching(directory: str) -> dict[str, object]:
    """TTFT of the second of two requests that share 1,000 of 1,016 prompt tokens."""
    ttft: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, list[list[int]]] = {True: [], False: []}
    engines = {on: Engine.load(directory, RuntimeConfig(enable_prefix_caching=on, max_num_seqs=8)) for on in (True, False)}
    try:
        for repetition in range(REPETITIONS):
            first, second = random_prompts(2, 1016, engines[True].manifest.model.vocab_size, seed=repetition, shared=1000)
            for on, engine in engines.items():
                run_closed_loop(engine, [first], SamplingParams(max_tokens=8, ignore_eos=True))
                traces, _ = run_closed_loop(engine, [second], SamplingParams(max_tokens=8, ignore_eos=True))
                ttft[on].append(traces[0].ttft)
                tokens[on].append(traces[0].token_ids)
    finally:
        for engine in engines.values():
            engine.close()
    if tokens[True] != tokens[False]:
        raise SystemExit(f"error: prefix caching changed tokens: {tokens[True]} with, {tokens[False]} without")
    return {"ttft_ratio": round(median(ttft[True]) / median(ttft[False]), 4), "shared_tokens": 1000, "prompt_tokens": 1016}


def batching(directory: str) -> dict[str, object]:
    """Throughput on log-normal output lengths, 48 requests at once."""
    rng = random.Random(7)
    lengths = [max(2, min(200, round(rng.lognormvariate(3.2, 0.9)))) for _ in range(48)]
    seconds: dict[str, list[float]] = {"continuous": [], "static": []}
    outputs: dict[str, list[list[int]]] = {}
    for _ in range(REPETITIONS):
        for policy in seconds:
            with Engine.load(
                directory, RuntimeConfig(scheduling_policy=policy, max_num_seqs=8, enable_prefix_caching=False)
            ) as engine:
                prompts = random_prompts(len(lengths), 32, engine.manifest.model.vocab_size, seed=1)
                params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
                traces, wall = run_closed_loop(engine, prompts, params)
                seconds[policy].append(wall)
                outputs[policy] = [trace.token_ids for trace in traces]
    if outputs["continuous"] != outputs["static"]:
        raise SystemExit("error: continuous and static batching gave different greedy tokens")
    return {
        "throughput_ratio": round(median(seconds["static"]) / median(seconds["continuous"]), 3),
        "requests": len(lengths),
        "max_num_seqs": 8,
    }


def chunked_prefill(directory: str) -> dict[str, object]:
    """Longest gap of four running streams while a 1,800-token prompt arrives; 128 tokens a step when chunked."""
    worst: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(REPETITIONS):
        for on in worst:
            config = RuntimeConfig(enable_chunked_prefill=on, max_num_batched_tokens=128, enable_prefix_caching=False)
            with Engine.load(directory, config) as engine:
                vocab = engine.manifest.model.vocab_size
                streams = [
                    Stream(engine, prompt, SamplingParams(max_tokens=400, ignore_eos=True))
                    for prompt in random_prompts(4, 16, vocab)
                ]
                for stream in streams:
                    stream.wait_for(16)
                begin = time.perf_counter()
                (long_prompt,) = random_prompts(1, 1800, vocab, seed=9)
                Stream(engine, long_prompt, SamplingParams(max_tokens=1, ignore_eos=True)).wait_for(1)
                end = time.perf_counter()
                worst[on].append(max(stream.longest_gap(begin, end) for stream in streams))
    return {"worst_gap_ratio": round(median(worst[True]) / median(worst[False]), 3), "prompt_tokens": 1800}


def main() -> None:
    directory = str(engine_directory("tiny-llama", "int8"))
    finish(
        "quick",
        repetitions=REPETITIONS,
        eos_ignored=True,
        prefix_caching=prefix_caching(directory),
        batching=batching(directory),
        chunked_prefill=chunked_prefill(directory),
    )


if __name__ == "__main__":
    main()
