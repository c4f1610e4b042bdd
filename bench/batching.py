"""Continuous against static batching on outputs of mixed length: throughput, and the latency of the slowest.

    python bench/batching.py [--engine DIR] [--requests 128] [--max-num-seqs 8] [--output-len lognormal:median=24,sigma=0.9]

    continuous   a request starts as soon as another has ended
    static       a batch lasts as long as its longest sequence, and all of its rows are computed until then: what static batching
                 means where continuous batching was introduced (Orca, OSDI 2022, section 3)
    draining     the same batches, but rows that are done leave and the steps become cheaper: the engine's own policy "static"

All requests are there at the start; the variants run the same ones, in turn. A static batch hands each answer out when it is
complete, and only tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import numpy as np
from common import Trace, add_engine_options, chosen_engine, facts, finish, random_prompts, run_closed_loop, spread

from runtime.bench.workload import Lengths
from runtime.config import SCHEDULING_POLICIES, RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams

VARIANTS = {"continuous": "continuous", "static": "static", "draining": "static"}  # → policy of the scheduler
HOLD_TOKENS = 32  # of a request that keeps the engine busy until all others are queued, so that every batch is full


def padded(lengths: Sequence[int], batch: int) -> list[int]:
    """To the longest of each batch."""
    return [max(lengths[index - index % batch :][:batch]) for index in range(len(lengths))]


def moment_of(trace: Trace, num_tokens: int) -> float:
    """When that many tokens had arrived."""
    return trace.arrivals[int(np.searchsorted(np.cumsum(trace.counts), num_tokens))]


def run(engine: Engine, prompts: list[list[int]], lengths: Sequence[int], limits: Sequence[int]) -> tuple[float, float]:
    """(tokens asked for per second, p99 latency) of requests that generate `limits` tokens, of which `lengths` were asked for."""
    held = engine.config.scheduling_policy == "static"
    hold = [SamplingParams(max_tokens=HOLD_TOKENS, ignore_eos=True)] if held else []
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
    traces, seconds = run_closed_loop(engine, prompts[: len(hold)] + prompts, hold + params)
    end = max(trace.arrivals[-1] for trace in traces)
    begin = traces[0].arrivals[-1] if held else end - seconds
    latencies = [moment_of(trace, length) - begin for trace, length in zip(traces[len(hold) :], lengths, strict=True)]
    return sum(lengths) / (end - begin), float(np.percentile(latencies, 99))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-len", default="lognormal:median=24,sigma=0.9,max=300")
    options = parser.parse_args(argv)

    directory = chosen_engine(options)
    rng = random.Random(7)
    outputs = Lengths.parse(options.output_len)
    lengths = [outputs.draw(rng) for _ in range(options.requests)]
    longest = padded(lengths, options.max_num_seqs)
    engines = {
        policy: Engine.load(
            directory, RuntimeConfig(scheduling_policy=policy, max_num_seqs=options.max_num_seqs, enable_prefix_caching=False)
        )
        for policy in SCHEDULING_POLICIES
    }
    rate: dict[str, list[float]] = {name: [] for name in VARIANTS}
    p99: dict[str, list[float]] = {name: [] for name in VARIANTS}
    try:
        vocab = engines["static"].manifest.model.vocab_size
        for engine in engines.values():
            warm_up = random_prompts(options.max_num_seqs, 16, vocab, seed=999)
            run_closed_loop(engine, warm_up, SamplingParams(max_tokens=16, ignore_eos=True))
        for repetition in range(options.repetitions):
            prompts = random_prompts(options.requests, options.prompt_tokens, vocab, seed=repetition)
            for name, policy in VARIANTS.items():
                per_second, latency = run(engines[policy], prompts, lengths, longest if name == "static" else lengths)
                rate[name].append(per_second)
                p99[name].append(latency)
    finally:
        for engine in engines.values():
            engine.close()

    def ratios(figures: dict[str, list[float]]) -> dict[str, object]:
        return {
            f"continuous/{name}": spread([a / b for a, b in zip(figures["continuous"], figures[name], strict=True)])
            for name in ("static", "draining")
        }

    finish(
        "batching",
        **facts(directory),
        requests=options.requests,
        max_num_seqs=options.max_num_seqs,
        prompt_tokens=options.prompt_tokens,
        output_len=options.output_len,
        output_tokens=sum(lengths),
        padded_tokens=sum(longest),
        tokens_per_second={name: spread(values, 1) for name, values in rate.items()},
        p99_latency_s={name: spread(values, 3) for name, values in p99.items()},
        throughput_ratio=ratios(rate),
        p99_latency_ratio=ratios(p99),
    )


if __name__ == "__main__":
    main()
