"""Continuous against static batching on outputs of mixed length: throughput, and the latency of the slowest.

    python bench/batching.py [--engine DIR] [--requests 96] [--max-num-seqs 8]

A static batch lasts as long as its longest sequence; rows that are done wait. All requests are there at the start; both variants
run the same ones, in turn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import numpy as np
from common import add_engine_options, chosen_engine, facts, finish, random_prompts, run_closed_loop, spread

from runtime.bench.workload import Lengths
from runtime.config import SCHEDULING_POLICIES, RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-len", default="lognormal:median=24,sigma=0.9,max=300")
    options = parser.parse_args(argv)

    directory = chosen_engine(options)
    rng = random.Random(7)
    outputs = Lengths.parse(options.output_len)
    lengths = [outputs.draw(rng) for _ in range(options.requests)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    engines = {
        policy: Engine.load(
            directory, RuntimeConfig(scheduling_policy=policy, max_num_seqs=options.max_num_seqs, enable_prefix_caching=False)
        )
        for policy in SCHEDULING_POLICIES
    }
    rate: dict[str, list[float]] = {policy: [] for policy in engines}
    p99: dict[str, list[float]] = {policy: [] for policy in engines}
    try:
        vocab = engines["static"].manifest.model.vocab_size
        for engine in engines.values():
            run_closed_loop(engine, random_prompts(options.max_num_seqs, 16, vocab, seed=999), params[0])
        for repetition in range(options.repetitions):
            prompts = random_prompts(options.requests, options.prompt_tokens, vocab, seed=repetition)
            for policy, engine in engines.items():
                traces, seconds = run_closed_loop(engine, prompts, params)
                rate[policy].append(sum(lengths) / seconds)
                p99[policy].append(float(np.percentile([trace.arrivals[-1] - trace.start for trace in traces], 99)))
    finally:
        for engine in engines.values():
            engine.close()

    def ratio(figures: dict[str, list[float]]) -> dict[str, object]:
        return spread([c / s for c, s in zip(figures["continuous"], figures["static"], strict=True)])

    finish(
        "batching",
        **facts(directory),
        requests=options.requests,
        max_num_seqs=options.max_num_seqs,
        prompt_tokens=options.prompt_tokens,
        output_len=options.output_len,
        output_tokens=sum(lengths),
        tokens_per_second={policy: spread(values, 1) for policy, values in rate.items()},
        p99_latency_s={policy: spread(values, 3) for policy, values in p99.items()},
        throughput_ratio=ratio(rate),
        p99_latency_ratio=ratio(p99),
    )


if __name__ == "__main__":
    main()
