"""What the prefix cache buys: requests that share the beginning of their prompt, with the cache and without.

    python bench/prefix_cache.py [--engine DIR] [--shared-tokens 1000] [--requests 64] [--concurrency 8] [--prime]

All requests arrive at once, or as many clients as --concurrency says send the next when one is answered. Every repetition has a
prefix of its own. Cold, the first request computes it and others of that moment wait for it; with --prime one request before the
clock starts has computed it, as a system prompt has been after a server's first minute. Both variants run the same requests, in
turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from common import add_engine_options, chosen_engine, facts, finish, random_prompts, run_closed_loop, spread

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared-tokens", type=int, default=1000)
    parser.add_argument("--own-tokens", type=int, default=16, help="of each prompt, after the shared ones")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, help="requests in flight (default: all)")
    parser.add_argument("--prime", action="store_true", help="let one request compute the prefix first")
    options = parser.parse_args(argv)

    directory = chosen_engine(options)
    length = options.shared_tokens + options.own_tokens
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True)
    engines = {on: Engine.load(directory, RuntimeConfig(enable_prefix_caching=on)) for on in (True, False)}
    ttft: dict[bool, list[float]] = {True: [], False: []}
    rate: dict[bool, list[float]] = {True: [], False: []}
    differing = cached = 0
    try:
        vocab = engines[True].manifest.model.vocab_size
        for engine in engines.values():
            run_closed_loop(engine, random_prompts(8, 16, vocab, seed=999), params)
        for repetition in range(options.repetitions):
            prompts = random_prompts(options.requests, length, vocab, seed=repetition, shared=options.shared_tokens)
            tokens = {}
            (first,) = random_prompts(1, length, vocab, seed=repetition, shared=options.shared_tokens)
            for on, engine in engines.items():
                if options.prime:
                    run_closed_loop(engine, [first[: options.shared_tokens]], params)
                traces, seconds = run_closed_loop(engine, prompts, params, concurrency=options.concurrency)
                ttft[on].append(float(np.mean([trace.ttft for trace in traces])))
                rate[on].append(options.requests * options.output_tokens / seconds)
                tokens[on] = [trace.token_ids for trace in traces]
                if on:
                    cached = sum(trace.num_cached_tokens for trace in traces)
            differing += sum(a != b for a, b in zip(tokens[True], tokens[False], strict=True))
    finally:
        for engine in engines.values():
            engine.close()
    finish(
        "prefix_cache",
        **facts(directory),
        requests=options.requests,
        shared_tokens=options.shared_tokens,
        prompt_tokens=length,
        output_tokens=options.output_tokens,
        concurrency=options.concurrency or options.requests,
        primed=options.prime,
        cached_share=round(cached / (options.requests * length), 4),
        mean_ttft_ms={"cache": spread([1e3 * x for x in ttft[True]], 2), "none": spread([1e3 * x for x in ttft[False]], 2)},
        ttft_ratio=spread([on / off for on, off in zip(ttft[True], ttft[False], strict=True)]),
        throughput_ratio=spread([on / off for on, off in zip(rate[True], rate[False], strict=True)]),
        requests_with_other_tokens=differing,  # an 8-bit KV cache may round a chunk's edge differently
    )


if __name__ == "__main__":
    main()
