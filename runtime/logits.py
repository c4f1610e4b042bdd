"""Batched arithmetic on rows of logits: filters, random choice, logprobs. Pure functions of numpy arrays; knows no requests.

Every row's result depends on that row alone, bit for bit, so a request draws the same tokens in any batch: reductions run
along contiguous rows, sums that decide a choice are sequential per row, and ties go to the lower token id.

Shapes   values [N, V] float32, finite or -inf; parameters and uniforms [N]; K = widest candidate list of the batch
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 256
_BINS, _BINS_PER_NAT = 256, 8  # of the histogram of values below the best


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection in which every input bit flips every output bit with probability 1/2."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of (seed, position) only: no state to keep, lose or share."""
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def draw(weights: Floats, uniform: npt.NDArray[np.float64]) -> Ints:
    """Index chosen with probability proportional to its weight, by inverse CDF in index order; never one of weight 0.

    Two levels (sums of 256 weights, then one group) in place of a running sum over the whole vocabulary.
    """
    width = weights.shape[1]
    groups = np.cumsum(np.add.reduceat(weights, np.arange(0, width, _CHUNK), axis=1), axis=1, dtype=np.float64)
    target = np.minimum(uniform * groups[:, -1], np.nextafter(groups[:, -1], 0))
    group = (groups <= target[:, None]).sum(axis=1)
    before = np.where(group > 0, np.take_along_axis(groups, np.maximum(group - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    columns = group[:, None] * _CHUNK + np.arange(min(_CHUNK, width))
    inside = np.take_along_axis(weights, np.minimum(columns, width - 1), axis=1)
    running = np.cumsum(np.where(columns < width, inside, 0), axis=1, dtype=np.float64)
    # The group's sum was rounded differently: keep the target inside it.
    rest = np.minimum(target - before, np.nextafter(running[:, -1], 0))
    return group * _CHUNK + (running <= rest[:, None]).sum(axis=1)


def _kth_largest_bound(values: Floats, k: Ints) -> Floats:
    """At most each row's k-th largest value, and close to it: the k-th largest among the maxima of many short segments."""
    width = values.shape[1]
    segments = min(width, max(64, 4 * int(k.max())))
    maxima = np.maximum.reduceat(values, np.arange(0, width, width // segments), axis=1)
    maxima.sort(axis=1)
    return maxima[np.arange(len(k)), maxima.shape[1] - k]


def _locate(wanted: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """(flat index, row, column) of what is wanted, in order of id; `column` counts up from 0 within each row."""
    lengths = np.count_nonzero(wanted, axis=1)
    rows = np.repeat(np.arange(len(wanted)), lengths)
    return np.flatnonzero(wanted), rows, np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _columns(rows: Ints, count: int) -> Ints:
    """Each entry's position among those of its row; `rows` ascend."""
    lengths = np.bincount(rows, minlength=count)
    return np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def largest(values: Floats, k: Ints) -> tuple[Ints, Floats]:
    """The k best of each row as (ids, values), best first, ties by id; a row's columns from k on are unspecified."""
    count, width = values.shape
    k = np.minimum(k, width)
    bound = _kth_largest_bound(values, np.maximum(k, 1))
    flat, rows, columns = _locate(values >= bound[:, None])
    found = values.ravel()[flat]
    order = np.lexsort((-found, rows))  # stable, so equal values stay in order of id
    shape = (count, int(columns.max()) + 1)
    ids, best = np.zeros(shape, np.int64), np.full(shape, -np.inf, values.dtype)
    ids[rows, columns] = flat[order] % width
    best[rows, columns] = found[order]
    return ids[:, : int(k.max())], best[:, : int(k.max())]


def choose(
    values: Floats, top_k: Ints, top_p: Floats, min_p: Floats, uniform: npt.NDArray[np.float64], scratch: Floats | None = None
) -> Ints:
    """A token id per row from softmax(values) after min-p, then top-k, then top-p; `values` have a maximum of 0.

    top_k < 1 or ≥ V, top_p = 1 and min_p = 0 are off. Rows without any filter are best given in a call of their own. `values`
    are overwritten, and `scratch` of the same shape: fresh arrays of this size cost more in page faults than the arithmetic.
    """
    width = values.shape[1]
    scratch = np.empty_like(values) if scratch is None else scratch
    top_k = np.where(top_k < 1, width, np.minimum(top_k, width))
    free = (top_k == width) & (top_p == 1) & (min_p == 0)
    nucleus = (top_k == width) & (top_p < 1)
    if free.all():
        return draw(np.exp(values, out=values), uniform)
    if nucleus.all():
        return _choose_nucleus(values, top_p.astype(np.float64), min_p, uniform, scratch)
    if not free.any() and not nucleus.any():
        return _choose_filtered(values, top_k, top_p.astype(np.float64), min_p, uniform)
    chosen = np.empty(len(values), np.int64)
    for part in (free, nucleus, ~(free | nucleus)):
        if part.any():
            chosen[part] = choose(values[part], top_k[part], top_p[part], min_p[part], uniform[part])
    return chosen


def _choose_filtered(values: Floats, top_k: Ints, top_p: Floats, min_p: Floats, uniform: npt.NDArray[np.float64]) -> Ints:
    """By top-k or min-p, after which few tokens are left: these are sorted."""
    count, width = values.shape
    with np.errstate(divide="ignore"):
        floor = np.log(min_p).astype(values.dtype)  # the best value is 0, so its share of the best probability is exp(value)
    use_k = top_k < width
    if use_k.any():
        floor = np.where(use_k, np.maximum(floor, _kth_largest_bound(values, top_k)), floor)
    flat, rows, columns = _locate(values >= floor[:, None])
    found = values.ravel()[flat]
    best = _sorted(found, rows, columns, count)
    columns = np.arange(best.shape[1])
    weights = np.where(columns < top_k[:, None], np.exp(best.astype(np.float64)), 0)
    running = np.cumsum(weights, axis=1)
    # top-p keeps a token while those before it hold less than p: the smallest set that reaches p, never an empty one
    kept = np.where((running - weights < (top_p * running[:, -1])[:, None]) | (columns == 0), weights, 0)
    running = np.cumsum(kept, axis=1)
    target = np.minimum(uniform * running[:, -1], np.nextafter(running[:, -1], 0))
    return _pick(best, (running <= target[:, None]).sum(axis=1), found, flat, rows) % width


def _choose_nucleus(values: Floats, top_p: Floats, min_p: Floats, uniform: npt.NDArray[np.float64], scratch: Floats) -> Ints:
    """By top-p of what min-p leaves, which may be most of the vocabulary: best first, by sorting two bins of a histogram.

    One holds the last token that is kept, the other the one that is drawn.
    """
    count, width = values.shape
    every = np.arange(count)
    weights = np.exp(values, out=scratch)
    with np.errstate(divide="ignore"):
        floor = np.log(min_p).astype(values.dtype)
    if (min_p > 0).any():
        weights *= values >= floor[:, None]
    total = weights.sum(axis=1).astype(np.float64)
    # A weight below (1 - p) · total / V is never kept: all weights up to it sum to less than 1 - p of the total.
    bound = np.maximum((1 - top_p) * total / width * 0.999, np.finfo(weights.dtype).tiny)  # with slack for rounding
    flat, rows, _ = _locate(weights >= bound.astype(weights.dtype)[:, None])
    values, weights = values.ravel()[flat], weights.ravel()[flat]
    bins = np.minimum(values * -_BINS_PER_NAT, _BINS - 1).astype(np.int64)
    mass = np.bincount(rows * _BINS + bins, weights=weights, minlength=count * _BINS).reshape(count, _BINS)
    cumulative = np.cumsum(mass, axis=1)

    def sorted_bin(which: Ints) -> tuple[Ints, Floats, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """One bin of each row: its candidates; their values, best first; each one's weight; the mass up to and with each."""
        inside = np.flatnonzero(bins == which[rows])
        best = _sorted(values[inside], rows[inside], _columns(rows[inside], count), count)
        each = np.exp(best.astype(np.float64))
        before = cumulative[every, which] - mass[every, which]
        return inside, best, each, before[:, None] + np.cumsum(each, axis=1)

    goal = top_p * total
    last = np.minimum((cumulative < goal[:, None]).sum(axis=1), _BINS - 1)
    _, _, each, running = sorted_bin(last)
    kept = np.where(running - each < goal[:, None], running, 0).max(axis=1)
    target = np.minimum(uniform * kept, np.nextafter(kept, 0))
    drawn = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    inside, best, each, running = sorted_bin(drawn)
    most = ((each > 0) & (running - each < goal[:, None])).sum(axis=1) - 1  # no two sums of the same weights round alike
    column = np.minimum((running <= target[:, None]).sum(axis=1), most)
    return _pick(best, column, values[inside], flat[inside], rows[inside]) % width


def _sorted(found: Floats, rows: Ints, columns: Ints, count: int) -> Floats:
    """Candidates (as `_locate` gives them) as a matrix, best first, filled up with -inf.

    Values alone: several times faster than an order of ids, and one look-up (`_pick`) finds the id at the end.
    """
    best = np.full((count, int(columns.max(initial=0)) + 1), np.inf, found.dtype)
    best[rows, columns] = -found
    best.sort(axis=1)
    return -best


def _pick(best: Floats, column: Ints, found: Floats, flat: Ints, rows: Ints) -> Ints:
    """The flat index of the candidate at each row's `column` of `best`: among equal values the n-th column is the n-th id."""
    value = best[np.arange(len(best)), column]
    tie = column - (best > value[:, None]).sum(axis=1)
    equal = found == value[rows]
    flat, rows = flat[equal], rows[equal]
    return flat[_columns(rows, len(best)) == tie[rows]]


def log_normalizer(values: Floats, scratch: Floats | None = None) -> npt.NDArray[np.float64]:
    """log Σ exp of each row; `scratch` as in `choose`."""
    best = values.max(axis=1)
    shifted = np.subtract(values, best[:, None], out=scratch)
    return best + np.log(np.exp(shifted, out=shifted).sum(axis=1).astype(np.float64))
