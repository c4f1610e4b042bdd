"""How long a step takes, learned from the steps that ran, and what prompts may add to one while sequences decode.

    seconds ≈ base + per_token·tokens + per_pair·pairs + per_cached·cached

    tokens   new tokens of all rows, as many as the executor pads them to
    pairs    query-key pairs of rows with several new tokens: n·first + n(n+1)/2 for n tokens after `first` earlier ones
    cached   tokens that attention reads, over all rows, new ones included

A prompt's tokens grow dearer towards its end: 32 of them take SmolLM2 int8 6 ms after none and 40 ms after 3,800, beside a step
of 10 ms. So the allowance is time, and the number of tokens follows from it.

Fit      least squares of the relative error, so that a stalled step counts little; no coefficient below 0. Steps that only
         decode and steps with prompts are summed apart, and each sum forgets only when one of its own kind comes: an hour of
         decoding does not wear out what is known of prompts.
Pace     no limit before both kinds were seen; then a chunk is at most twice the longest seen, or FIRST_CHUNK, since a guess far
         beyond what was measured is worth little.

Owned by the loop, not thread-safe. Pure arithmetic: knows no clocks, and the same observations give the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

MIN_CHUNK = 8  # tokens: no part is smaller, and the first prompt of a step gets as many whatever they cost, so it always moves on
FIRST_CHUNK = 64  # tokens
_SIZE = 4
_MEMORY = 1 - 1 / 32  # of a sum, when a step is added to it
_RIDGE = 1e-9
_REFIT = 8  # steps between two fits, which take 0.2 ms; fewer while little is known
_SUBSETS = [np.array(kept) for size in range(_SIZE, 0, -1) for kept in combinations(range(_SIZE), size)]  # all of them first


@dataclass(frozen=True)
class Work:
    """What a step's time depends on."""

    tokens: int = 0
    pairs: int = 0
    cached: int = 0

    def plus(self, first: int, count: int) -> Work:
        """And a row of `count` new tokens after `first` earlier ones."""
        row = work_of([(first, count)])
        return Work(self.tokens + row.tokens, self.pairs + row.pairs, self.cached + row.cached)


def work_of(rows: Iterable[tuple[int, int]]) -> Work:
    tokens = pairs = cached = 0
    for first, count in rows:
        tokens += count
        cached += first + count
        if count > 1:
            pairs += count * first + count * (count + 1) // 2
    return Work(tokens, pairs, cached)


class StepCost:
    """`padded` says how many tokens a step of so many runs."""

    def __init__(self, padded: Callable[[int], int] = int) -> None:
        self._coefficients = (0.0,) * _SIZE  # seconds: of any step, per token, per pair, per cached token
        self.error = 0.0  # |expected / measured - 1| of steps with prompts and decodes, recent ones counting most
        self.longest_chunk = 0
        self._padded = padded
        self._decodes = _Sums()
        self._prompts = _Sums()
        self._unfitted = 0  # observations since the last fit

    @property
    def is_known(self) -> bool:
        """Whether steps of both kinds were seen."""
        return self._decodes.count > 0 and self._prompts.count > 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds: of any step, per token, per pair, per cached token."""
        if self._unfitted >= min(_REFIT, 1 + self._prompts.count // 8):
            self._solve()
            self._unfitted = 0
        return self._coefficients

    def expect(self, work: Work) -> float:
        """Seconds."""
        base, per_token, per_pair, per_cached = self.coefficients
        return base + per_token * self._padded(work.tokens) + per_pair * work.pairs + per_cached * work.cached

    def observe(self, rows: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step of rows (tokens before, new tokens) took so long; what no clock can have measured is left out."""
        if not 0 < seconds < math.inf:
            return
        rows = list(rows)
        work = work_of(rows)
        sums = self._prompts if work.pairs else self._decodes
        if self.is_known and work.pairs and len(rows) > 1:
            off = abs(self.expect(work) / seconds - 1)
            self.error = _MEMORY * self.error + (1 - _MEMORY) * off
        self.longest_chunk = max(self.longest_chunk, max(count for _, count in rows))
        sums.add(self._features(work) / seconds)
        self._unfitted += 1

    def _features(self, work: Work) -> npt.NDArray[np.float64]:
        return np.array([1.0, self._padded(work.tokens), work.pairs, work.cached])

    def _solve(self) -> None:
        """Minimize Σ (1 - coefficients·features / seconds)² over coefficients of at least 0: the best set of positive ones."""
        squares, totals = self._decodes.squares + self._prompts.squares, self._decodes.totals + self._prompts.totals
        scale = np.sqrt(np.diag(squares))  # 0 only for pairs, before there were any
        scale[scale == 0.0] = 1.0
        squares, totals = squares / np.outer(scale, scale) + _RIDGE * np.eye(_SIZE), totals / scale
        best, found = 0.0, np.zeros(_SIZE)
        for kept in _SUBSETS:
            solution = np.linalg.solve(squares[np.ix_(kept, kept)], totals[kept])
            gained = float(totals[kept] @ solution)
            if gained > best and solution.min() >= 0.0:
                best = gained
                found = np.zeros(_SIZE)
                found[kept] = solution / scale[kept]
                if len(kept) == _SIZE:
                    break
        self._coefficients = tuple(found.tolist())


class _Sums:
    """Normal equations of relative least squares, older steps counting less."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = np.zeros((_SIZE, _SIZE))
        self.totals = np.zeros(_SIZE)

    def add(self, scaled: npt.NDArray[np.float64]) -> None:
        self.count += 1
        self.squares = _MEMORY * self.squares + np.outer(scaled, scaled)
        self.totals = _MEMORY * self.totals + scaled


class PromptPace:
    """How many tokens of prompts may join a step: as many as keep it within `max_stretch` times the step without them.

    Where more prompts want to run than sequences decode, what they may add grows with the ratio of the two: to hold up many for
    the sake of a few helps neither latency nor throughput.
    """

    def __init__(self, max_stretch: float, padded: Callable[[int], int] = int) -> None:
        self.max_stretch = max_stretch
        self.cost = StepCost(padded)

    def begin(self, decodes: Sequence[int], num_prompts: int) -> StepAllowance | None:
        """For a step in which sequences of so many computed tokens add one. None: no limit, or no prompt to limit."""
        if not decodes or not num_prompts or not self.cost.is_known:
            return None
        work = work_of((first, 1) for first in decodes)
        more = (self.max_stretch - 1) * max(1.0, num_prompts / len(decodes))
        return StepAllowance(self.cost, work, (1 + more) * self.cost.expect(work))


class StepAllowance:
    """What of it is left while a step is being made."""

    def __init__(self, cost: StepCost, work: Work, seconds: float) -> None:
        self._cost = cost
        self._work = work
        self._seconds = seconds
        self._is_used = False

    def most(self, first: int, wanted: int) -> int:
        """Of `wanted` tokens after `first`, those that fit: none where MIN_CHUNK do not, unless it is the step's first prompt."""
        low = 0 if self._is_used else min(wanted, MIN_CHUNK)
        high = max(low, min(wanted, max(FIRST_CHUNK, 2 * self._cost.longest_chunk)))
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost.expect(self._work.plus(first, middle)) <= self._seconds:
                low = middle
            else:
                high = middle - 1
        return low if low >= min(wanted, MIN_CHUNK) else 0

    def take(self, first: int, count: int) -> None:
        self._work = self._work.plus(first, count)
        self._is_used = True
