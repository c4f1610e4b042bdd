"""What every runner here does: load a model, time prefill and decode at several batch sizes, print one JSON line.

Standard library only, since it runs in each peer's own environment.

A runner offers `load(options) → (generate, versions)` and calls `main(load)`. `generate(prompts, new_tokens)` answers all prompts
in one batch, greedy, EOS ignored, sampling included, and returns a Timing:

    prefill_s       from the start until every sequence has its first token
    decode_s        from there until a sequence ends: all that time the batch is full
    decode_tokens   tokens of all sequences in that time

An engine that reads prompts in chunks starts some sequences before others; what they decode meanwhile does not count.
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
    """Turns the moments at which tokens came into a Timing.

    The clock of the decode phase is the sequence that began last: in a full batch every step gives each sequence one token, so
    between two of its tokens all have had as many. In which order the tokens of one step are reported does not matter then.
    """

    def __init__(self, num_sequences: int) -> None:
        self._moments: list[list[float]] = [[] for _ in range(num_sequences)]
        self._start = time.perf_counter()

    def add(self, sequence: int, tokens: int = 1) -> None:
        """Call as tokens arrive."""
        self._moments[sequence] += [time.perf_counter()] * tokens

    def add_step(self) -> None:
        """Every sequence has one more token."""
        now = time.perf_counter()
        for moments in self._moments:
            moments.append(now)

    def timing(self) -> Timing:
        if not all(self._moments):
            raise RuntimeError(f"only {sum(map(bool, self._moments))} of {len(self._moments)} sequences have a token")
        clock = max(self._moments, key=lambda moments: moments[0])
        first_end = min(moments[-1] for moments in self._moments)
        full = [moment for moment in clock if moment <= first_end]
        if len(full) < 2:
            raise RuntimeError("a sequence ended before the last one began; raise --new-tokens")
        return Timing(clock[0] - self._start, full[-1] - clock[0], (len(full) - 1) * len(self._moments))


def prompts(options: argparse.Namespace, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64, options.vocab_size) for _ in range(length)] for _ in range(count)]


def main(load: Callable[[argparse.Namespace], tuple[Generate, dict[str, str]]], *, warm_up: bool = True) -> None:
    """`warm_up`: run each shape briefly before it is timed; several engines generate kernels for a shape they first meet."""
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
    if warm_up:
        generate(prompts(options, 1, options.prefill, options.seed + 1000), 2)
    timing = generate(prompts(options, 1, options.prefill, options.seed), 2)
    figures["prefill"] = options.prefill / timing.prefill_s
    for batch in options.batches:
        try:
            if warm_up:
                generate(prompts(options, batch, 8, options.seed + 1000 + batch), 3)
            timing = generate(prompts(options, batch, options.context, options.seed + batch), options.new_tokens)
            figures["decode"][str(batch)] = timing.decode_tokens / timing.decode_s
        except Exception as error:  # a peer that cannot do one point still has the others
            print(f"batch {batch}: {type(error).__name__}: {error}", file=sys.stderr)
    figures["max_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(figures))
