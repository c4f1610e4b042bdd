"""The magnitude a static scale maps to the end of its type, from the histogram of a tensor.

max          the largest seen
percentile   what 99.99 % of the magnitudes do not exceed
mse          the cut with the least squared error of rounding and clipping
entropy      the cut whose rounded histogram has the least KL divergence from the seen one (Migacz, GTC 2017)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from builder.config import METHODS
from builder.observe import NUM_BINS, TensorStats
from builder.quantize.activations import LIMITS, rounded
from runtime.errors import BuildError

PERCENTILE = 99.99
_CUTS = 64  # candidates between 1/_CUTS of the range and all of it


def limit(stats: TensorStats, method: str, dtype: str) -> float:
    """Never above the largest magnitude seen; 1 for a tensor that was all zeros."""
    if method not in METHODS:
        raise BuildError(f"unknown calibration method {method!r}; the methods are {', '.join(METHODS)}")
    if stats.amax == 0:
        return 1.0
    counts = stats.histogram.astype(np.float64)
    width = stats.limit / NUM_BINS
    if method == "max":
        return stats.amax
    if method == "percentile":
        last = int(np.searchsorted(np.cumsum(counts), counts.sum() * PERCENTILE / 100))
        return min(stats.amax, (last + 1) * width)
    centres = ((np.arange(NUM_BINS) + 0.5) * width).astype(np.float32)
    cuts = stats.amax * np.arange(1, _CUTS + 1) / _CUTS
    if method == "mse":
        errors = [(counts * np.square(rounded(centres[None], dtype, limit=float(cut))[0] - centres)).sum() for cut in cuts]
    else:
        errors = [_divergence(counts, int(np.ceil(cut / width)), int(LIMITS[dtype])) for cut in cuts]
    return float(cuts[int(np.argmin(errors))])


def _divergence(counts: npt.NDArray[np.float64], kept: int, levels: int) -> float:
    """KL of the histogram clipped to its first `kept` bins from what `levels` equal steps can tell apart."""
    if kept < levels:
        return np.inf
    p = counts[:kept].copy()
    filled = p > 0
    p[-1] += counts[kept:].sum()
    group = np.arange(kept) * levels // kept
    mass = np.bincount(group, counts[:kept], levels)
    size = np.bincount(group, filled, levels)
    q = np.where(filled, (mass / np.maximum(size, 1))[group], 0.0)
    p, q = p / p.sum(), q / max(q.sum(), 1e-12)
    seen = p > 0
    return float((p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))).sum())
