"""What every runner here does: load a model, time prefill and decode at several batch sizes, print one JSON line.

Standard library only, since it runs in each peer's own environment.

A runner offers `load(options) → (generate, versions)` and calls `main(load)`. `generate(prompts, new_tokens)` answers all prompts
in one batch, greedy, EOS ignored, sampling included, and returns a Timing:

    prefill_s       from the start until every sequence has its first token
    decode_s        from there to the end
    decode_tokens   tokens that came in that time
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    prefill_s: float
    decode_s: float
    decode_tokens: int


Generate = Callable[[list[list[int]], int], Timing]


class Stopwatch:
    """Turns per-step counts of tokens per sequence into a Timing."""

    def __init__(self, num_sequences: int) -> None:
        self._counts = [0] * num_sequences
        self._start = time.perf_counter()
        self._all_begun: float | None = None
        self._tokens_then = 0
        self._last = self._start

    def add(self, sequence: int, tokens: int = 1) -> None:
        """Call as tokens arrive, `step_done` after each step."""
        self._counts[sequence] += tokens

    def step_done(self) -> None:
        self._last = time.perf_counter()
        if self._all_begun is None and all(self._counts):
            self._all_begun, self._tokens_then = self._last, sum(self._counts)

    def timing(self) -> Timing:
        if self._all_begun is None:
            raise RuntimeError(f"only {sum(map(bool, self._counts))} of {len(self._counts)} sequences have a token")
        return Timing(self._all_begun - self._start, self._last - self._all_begun, sum(self._counts) - self._tokens_then)


def prompts(options: argparse.Namespace, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64, options.vocab_size) for _ in range(length)] for _ in range(count)]


def main(load: Callable[[argparse.Namespace], tuple[Generate, dict[str, str]]]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True, help="random ids are below it")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    begin = time.perf_counter()
    generate, versions = load(options)
    figures: dict[str, Any] = {"load_s": round(time.perf_counter() - begin, 3), "versions": versions, "decode": {}}
    generate(prompts(options, 1, 32, options.seed + 1000), 4)  # warm-up
    timing = generate(prompts(options, 1, options.prefill, options.seed), 2)
    figures["prefill"] = options.prefill / timing.prefill_s
    for batch in options.batches:
        try:
            timing = generate(prompts(options, batch, options.context, options.seed + batch), options.new_tokens)
            figures["decode"][str(batch)] = timing.decode_tokens / timing.decode_s
        except Exception as error:  # a peer that cannot do one point still has the others
            print(f"batch {batch}: {type(error).__name__}: {error}", file=sys.stderr)
    figures["max_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(figures))
