"""What flows into the layers of the canonical graph, as statistics: nothing as long as the text is kept in memory.

The graph runs in segments (builder/segments.py): the whole text through the first, then through the next, which takes what the
one before left in a temporary file. Each window's observed tensors leave ONNX Runtime, are reduced here and dropped. Second
moments (`hessian`) are width² floats per tensor; a segment's go to a file when it is done, and come back one by one when a layer
is rounded.

Shapes   observed [..., T, K]: one row per token, K channels
Memory   a segment's weights and second moments (`max_bytes` together) and one window's tensors
Disk     the residual stream of the whole text, twice, and the second moments of all tensors, until they are used
Raises   BuildError when there is no text, or values are not finite
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.segments import cut, extract, feed, open_session
from builder.spill import Spill, Spilled
from runtime.errors import BuildError

Array = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
NUM_BINS = 2048
SAMPLE_ROWS = 128
MAX_BYTES = 256 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h
_MMAP_THRESHOLD_BYTES = 256 << 10


@dataclass
class TensorStats:
    """Of one tensor over the whole text."""

    channel_amax: Array  # [K] largest magnitude
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))  # of magnitudes, [0, limit)
    limit: float = 0.0
    sample: Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [≤ SAMPLE_ROWS, K] rows from all over the text
    hessian: Array | Spilled | None = None  # [K, K] mean of x xᵀ
    num_rows: int = 0

    @property
    def amax(self) -> float:
        return float(self.channel_amax.max())

    def add(self, rows: Array, keep: int) -> None:
        """`keep` of the rows join the sample."""
        magnitude = np.abs(rows)
        self.channel_amax = np.maximum(self.channel_amax, magnitude.max(0))
        self._count(magnitude)
        count = min(keep, len(rows), SAMPLE_ROWS - len(self.sample) if self.sample.size else SAMPLE_ROWS)
        picked = rows[np.linspace(0, len(rows) - 1, min(keep, len(rows))).astype(int)[:count]]
        self.sample = picked.copy() if not self.sample.size else np.concatenate([self.sample, picked])
        self.num_rows += len(rows)

    def _count(self, magnitude: Array) -> None:
        largest = float(magnitude.max())
        if self.limit == 0.0:
            self.limit = largest or 1.0
        while largest > self.limit:  # twice the range in half the bins
            self.histogram = np.concatenate([self.histogram.reshape(-1, 2).sum(1), np.zeros(NUM_BINS // 2, np.int64)])
            self.limit *= 2
        bins = np.minimum(magnitude * np.float32(NUM_BINS / self.limit), NUM_BINS - 1).astype(np.int32)
        self.histogram += np.bincount(bins.ravel(), minlength=NUM_BINS)


def observe(
    canonical: str | os.PathLike[str],
    windows: Sequence[Sequence[int]],
    tensors: Sequence[str],
    *,
    hessians: bool = False,
    max_bytes: int = MAX_BYTES,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, TensorStats]:
    """Statistics of `tensors` (values of the graph) over `windows` of token ids. `progress` gets windows done and to do, of all
    segments together.
    """
    windows = [window for window in windows if len(window)]
    if not windows:
        raise BuildError("there are no tokens to calibrate with; give a text that is not empty")
    canonical = Path(canonical)
    _return_large_arrays()
    moments = {name: 4 * width * width for name, width in _widths(canonical, tensors).items()} if hessians else {}
    segments = cut(ir.load(canonical), dict.fromkeys(tensors), max_bytes, moments)
    stats: dict[str, TensorStats] = {}
    second = Spill(canonical.parent) if hessians else None
    crossing: list[dict[str, Spilled]] = [{} for _ in windows]
    for number, segment in enumerate(segments):
        session = open_session(extract(ir.load(canonical), segment), canonical.parent, num_threads)
        passed = Spill(canonical.parent)
        for index, window in enumerate(windows):
            names = [value.name for value in session.get_outputs()]
            known = crossing[index]
            found = {**known, **dict(zip(names, session.run(names, feed(session, window, known)), strict=True))}
            for name in segment.observed:
                _add(stats, name, np.asarray(found[name]), len(windows), hessians)
            crossing[index] = {name: passed.put(np.asarray(found[name])) for name in segment.outputs}
            del found, known
            if progress is not None:
                progress(number * len(windows) + index + 1, len(segments) * len(windows))
        del session  # before the next one takes its memory
        if second is not None:
            for entry in (stats[name] for name in segment.observed):
                entry.hessian = second.put(np.asarray(entry.hessian) / entry.num_rows)
    return stats


def _add(stats: dict[str, TensorStats], name: str, array: Array, num_windows: int, hessians: bool) -> None:
    rows = array.reshape(-1, array.shape[-1])
    if not np.isfinite(rows).all():
        raise BuildError(f"calibration found values that are not finite in {name}; the checkpoint is damaged or overflows fp32")
    entry = stats.setdefault(name, TensorStats(np.zeros(rows.shape[-1], np.float32)))
    entry.add(rows, -(-SAMPLE_ROWS // num_windows))
    if hessians:
        moment = rows.T @ rows
        entry.hessian = moment if entry.hessian is None else np.add(entry.hessian, moment, out=np.asarray(entry.hessian))


def _return_large_arrays() -> None:
    """Have the C library map large arrays each by itself, so that freed ones leave the process; those of an export before, now.

    Left alone, glibc raises its threshold to the largest array that was freed and keeps all below in a heap full of holes:
    calibrating SmolLM2 with int4 took 300 MB more.
    """
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    if trim is not None:
        trim(0)


def _widths(canonical: Path, tensors: Sequence[str]) -> dict[str, int]:
    values = {str(value.name): value for node in ir.load(canonical).graph for value in node.outputs}
    widths = {}
    for name in tensors:
        shape = values[name].shape
        assert shape is not None and isinstance(shape[-1], int), f"{name} has no static width"
        widths[name] = shape[-1]
    return widths


def windows_of(token_ids: Sequence[int], context: int, bos_token_id: int | None = None) -> Iterator[list[int]]:
    """Cut into windows of `context` tokens, each starting with BOS when given; a last one shorter than half is dropped."""
    prefix = [] if bos_token_id is None else [bos_token_id]
    body = context - len(prefix)
    for begin in range(0, len(token_ids), body):
        window = list(token_ids[begin : begin + body])
        if begin and len(window) < body // 2:
            return
        yield prefix + window
