"""What running streams feel when a long prompt arrives, with chunked prefill and without.

    python bench/chunked_prefill.py [--engine DIR] [--prompt-tokens 4000] [--max-itl-stretch 2.5]

Eight streams decode; then the long prompt comes. ITL before: the gaps of the streams between their 16th token and that moment;
during: the gaps that overlap the time until the prompt's first token. Throughput: all tokens over the whole run. The stretch
decides: as much of the prompt joins each decode step as lengthens it that many times, so a smaller one disturbs less and takes
more steps. Each engine first runs once without being measured: a server meets few sizes of step for the first time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Stream, add_engine_options, chosen_engine, facts, finish, median, random_prompts, spread

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams

SETTLED = 16  # tokens of a stream before its gaps count


@dataclass(frozen=True)
class Result:
    median_before_ms: float
    before_ms: float  # p99
    during_ms: float  # p99
    tokens_per_second: float

    @property
    def ratio(self) -> float:
        return self.during_ms / self.before_ms


def gaps_ms(streams: Sequence[Stream], begin: float, end: float, *, first: int = 0) -> list[float]:
    """Gaps of all streams that overlap [begin, end], those before token `first` left out."""
    found = []
    for stream in streams:
        moments = stream.arrivals[first:]
        found += [1e3 * (after - before) for before, after in itertools.pairwise(moments) if after > begin and before < end]
    return found


def measure(engine: Engine, options: argparse.Namespace, seed: int) -> Result:
    vocab = engine.manifest.model.vocab_size
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True)
    short = random_prompts(options.streams, 16, vocab, seed=2 * seed)
    (long,) = random_prompts(1, options.prompt_tokens, vocab, seed=2 * seed + 1)
    start = time.perf_counter()
    streams = [Stream(engine, prompt, params) for prompt in short]
    for stream in streams:
        stream.wait_for(SETTLED + options.tokens_before)
    begin = time.perf_counter()
    arrived = Stream(engine, long, SamplingParams(max_tokens=1, ignore_eos=True))
    arrived.wait_for(1)
    end = arrived.arrivals[0]
    if min(len(stream.arrivals) for stream in streams) >= options.output_tokens:
        raise SystemExit(
            f"error: the streams ended before the prompt was read; raise --output-tokens above {options.output_tokens}"
        )
    for stream in streams:
        stream.wait_for(options.output_tokens)
    seconds = max(stream.arrivals[-1] for stream in streams) - start
    total = options.streams * (16 + options.output_tokens) + options.prompt_tokens + 1
    before, during = gaps_ms(streams, start, begin, first=SETTLED), gaps_ms(streams, begin, end)
    p50, p99 = np.percentile(before, [50, 99])
    return Result(float(p50), float(p99), float(np.percentile(during, 99)), total / seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--output-tokens", type=int, default=600, help="of each stream; they must outlast the prompt")
    parser.add_argument("--tokens-before", type=int, default=64, help="of each stream, for the ITL before")
    parser.add_argument("--max-num-batched-tokens", type=int, help="the engine's where not given")
    parser.add_argument("--max-itl-stretch", type=float, default=2.5, help="inf: the budget of tokens alone")
    options = parser.parse_args(argv)

    directory: Path = chosen_engine(options)
    results: dict[bool, list[Result]] = {True: [], False: []}
    engines = {
        on: Engine.load(
            directory,
            RuntimeConfig(
                enable_chunked_prefill=on,
                max_itl_stretch=options.max_itl_stretch if on else math.inf,
                enable_prefix_caching=False,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.streams + 1,
                max_model_len=max(options.prompt_tokens + 1, 16 + options.output_tokens),
            ),
        )
        for on in (True, False)
    }
    try:
        for repetition in range(options.repetitions + 1):
            for on, engine in engines.items():
                result = measure(engine, options, repetition)
                if repetition > 0:
                    results[on].append(result)
    finally:
        for engine in engines.values():
            engine.close()

    def figures(on: bool) -> dict[str, object]:
        return {
            "p50_itl_before_ms": round(median([result.median_before_ms for result in results[on]]), 3),
            "p99_itl_before_ms": round(median([result.before_ms for result in results[on]]), 3),
            "p99_itl_during_ms": round(median([result.during_ms for result in results[on]]), 3),
            "ratio": spread([result.ratio for result in results[on]]),
            "tokens_per_second": spread([result.tokens_per_second for result in results[on]], 1),
        }

    pairs = zip(results[True], results[False], strict=True)
    finish(
        "chunked_prefill",
        **facts(directory),
        streams=options.streams,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        max_num_batched_tokens=engines[True].config.max_num_batched_tokens,
        max_itl_stretch=options.max_itl_stretch,
        chunked=figures(True),
        whole=figures(False),
        throughput_ratio=spread([chunked.tokens_per_second / whole.tokens_per_second for chunked, whole in pairs]),
    )


if __name__ == "__main__":
    main()
