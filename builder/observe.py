"""What flows into the layers of the canonical graph, as statistics: nothing as long as the text is kept.

The graph is cut behind the observed tensors, so the LM head does not run. Each window's tensors leave ONNX Runtime, are reduced
here and dropped. Second moments (`hessian`) are width² floats per tensor: when they exceed `max_hessian_bytes` together, the text
is run in several passes, each for some of the tensors.

Shapes   observed [..., T, K]: one row per token, K channels
Memory   the weights as mapped, one window's observed tensors, and the second moments of one pass; each window's arrays go back to
         the system. Whole process, SmolLM2, 16 windows of 512 tokens: 964 MB at most, weights 538 MB of it; before, 1,143 MB
Raises   BuildError when there is no text, or values are not finite
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as passes

from builder.accuracy import Chunk, step_inputs
from runtime import contract
from runtime.errors import BuildError

Array = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
NUM_BINS = 2048
SAMPLE_ROWS = 128
_BLOCK_SIZE = 32
_M_MMAP_THRESHOLD = -3  # of malloc.h
_MMAP_THRESHOLD_BYTES = 256 << 10


@dataclass
class TensorStats:
    """Of one tensor over the whole text."""

    channel_amax: Array  # [K] largest magnitude
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))  # of magnitudes, [0, limit)
    limit: float = 0.0
    sample: Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [≤ SAMPLE_ROWS, K] rows from all over the text
    hessian: Array | None = None  # [K, K] mean of x xᵀ
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
    max_hessian_bytes: int = 256 << 20,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, TensorStats]:
    """Statistics of `tensors` (values of the graph) over `windows` of token ids. `progress` gets windows done and to do."""
    windows = [window for window in windows if len(window)]
    if not windows:
        raise BuildError("there are no tokens to calibrate with; give a text that is not empty")
    stats: dict[str, TensorStats] = {}
    groups = [list(tensors)]
    _return_large_arrays()
    if hessians:
        groups = _passes(_widths(Path(canonical), tensors), max_hessian_bytes)
    for number, group in enumerate(groups):
        with tempfile.NamedTemporaryFile(dir=Path(canonical).parent, prefix=".observed-", suffix=".onnx") as file:
            session = _session(Path(canonical), Path(file.name), group, num_threads)
        keep = -(-SAMPLE_ROWS // len(windows))
        for index, window in enumerate(windows):
            for name, found in zip(group, session.run(group, _feed(session, window)), strict=True):
                rows = found.reshape(-1, found.shape[-1])
                if not np.isfinite(rows).all():
                    raise BuildError(
                        f"calibration found values that are not finite in {name}; the checkpoint is damaged or overflows fp32"
                    )
                entry = stats.setdefault(name, TensorStats(np.zeros(rows.shape[-1], np.float32)))
                entry.add(rows, keep)
                if hessians:
                    moment = rows.T @ rows
                    entry.hessian = moment if entry.hessian is None else np.add(entry.hessian, moment, out=entry.hessian)
            del found, rows
            if progress is not None:
                progress(number * len(windows) + index + 1, len(groups) * len(windows))
        del session  # before the next one takes its memory
    for entry in stats.values():
        if entry.hessian is not None:
            entry.hessian /= entry.num_rows
    return stats


def _return_large_arrays() -> None:
    """Have the C library map large arrays each by itself, so that freed ones leave the process.

    Left alone, glibc raises its threshold to the largest array that was freed and keeps all below in a heap full of holes:
    calibrating SmolLM2 with int4 took 300 MB more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _passes(widths: dict[str, int], limit: int) -> list[list[str]]:
    """Tensors in order, cut where the second moments of a part would exceed `limit` bytes."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, width in widths.items():
        size = 4 * width * width
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _widths(canonical: Path, tensors: Sequence[str]) -> dict[str, int]:
    values = {str(value.name): value for node in ir.load(canonical).graph for value in node.outputs}
    widths = {}
    for name in tensors:
        shape = values[name].shape
        assert shape is not None and isinstance(shape[-1], int), f"{name} has no static width"
        widths[name] = shape[-1]
    return widths


def _feed(session: ort.InferenceSession, window: Sequence[int]) -> dict[str, npt.NDArray]:
    blocks = -(-len(window) // _BLOCK_SIZE)
    inputs = step_inputs([Chunk(0, 0, window)], range(len(window)), _BLOCK_SIZE, blocks)
    feed: dict[str, npt.NDArray] = {}
    for value in session.get_inputs():
        if value.name in contract.STEP_INPUTS:
            feed[value.name] = getattr(inputs, value.name)
        else:  # a pool
            feed[value.name] = np.zeros((blocks, _BLOCK_SIZE, *value.shape[2:]), np.float32)
    return feed


def _session(canonical: Path, path: Path, tensors: Sequence[str], num_threads: int) -> ort.InferenceSession:
    """The graph up to `tensors`, written beside the canonical file: ONNX Runtime takes weights from there only."""
    model = ir.load(canonical)
    graph = model.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in tensors)
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False  # hands each window's memory back
    options.add_session_config_entry("session.disable_prepacking", "1")  # packing would copy every weight
    return ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])


def windows_of(token_ids: Sequence[int], context: int, bos_token_id: int | None = None) -> Iterator[list[int]]:
    """Cut into windows of `context` tokens, each starting with BOS when given; a last one shorter than half is dropped."""
    prefix = [] if bos_token_id is None else [bos_token_id]
    body = context - len(prefix)
    for begin in range(0, len(token_ids), body):
        window = list(token_ids[begin : begin + body])
        if begin and len(window) < body // 2:
            return
        yield prefix + window
