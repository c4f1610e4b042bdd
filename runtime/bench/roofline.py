"""The least time a step can take on this machine, and what share of it an engine reaches.

    bytes        every weight once (the head only when a row wants logits), an embedding row per token, all keys and values once
    operations   two per weight and token (the head: per row), attention's two products over the tokens each query sees
    floor        max(bytes / read bandwidth of a working set that large, operations / peak)
    share        Σ floors / Σ measured time, per stage

    decode       steps whose rows all have one new token          prefill   steps whose rows all have several
    mixed        steps with both

The bounds are generous: expert weights are left out (which ones a step reads is not known), and attention is counted at the
weights' peak. So a share above 1 means that the peaks were measured too low; `assess` then raises them to what was just seen.

Units    bytes, operations, seconds
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from runtime.batch import StepInputs
from runtime.bench.machine import Peaks, load_cached
from runtime.contract import REPORT_JSON, LayerSpec, Manifest
from runtime.executors.base import Executor, StepOutput

STAGES = ("prefill", "decode", "mixed")
_LAYER_CLASSES = ("attention", "mlp")


@dataclass(frozen=True)
class Step:
    """One executed step, as far as its cost depends on it."""

    num_new: npt.NDArray[np.int64]  # [B] new tokens of each row
    seq_lens: npt.NDArray[np.int64]  # [B]
    num_logits: int
    seconds: float

    @property
    def stage(self) -> str:
        several = self.num_new > 1
        return "prefill" if several.all() else "mixed" if several.any() else "decode"


class MeteredExecutor:
    """Passes everything on to an executor and keeps a Step of every `execute`: two small copies, a few microseconds."""

    def __init__(self, executor: Executor, steps: list[Step] | deque[Step] | None = None) -> None:
        self._executor = executor
        self.steps = [] if steps is None else steps

    def execute(self, inputs: StepInputs) -> StepOutput:
        start = time.perf_counter()
        output = self._executor.execute(inputs)
        seconds = time.perf_counter() - start
        new = np.diff(inputs.query_start_loc).astype(np.int64)
        self.steps.append(Step(new, inputs.seq_lens.astype(np.int64), len(inputs.logits_indices), seconds))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@dataclass(frozen=True)
class Cost:
    num_bytes: float
    operations: float


@dataclass(frozen=True)
class Model:
    """What a step's cost is made of; from the manifest and the build report."""

    layer_weights: int
    layer_bytes: int
    head_weights: int
    head_bytes: int
    embedding_row_bytes: float
    layers: tuple[LayerSpec, ...]
    kv_bytes_per_token: int
    integer: bool  # whether the linear layers multiply integers

    @classmethod
    def load(cls, engine: Path, manifest: Manifest) -> Model:
        """Raises  OSError, KeyError, ValueError when the engine's report does not say."""
        weights = json.loads((engine / REPORT_JSON).read_text(encoding="utf-8"))["weights"]
        classes = weights["classes"]
        head = classes["embedding" if weights["tied_embedding"] else "lm_head"]
        layers = [classes[name] for name in _LAYER_CLASSES if name in classes]
        norms = classes.get("norms", {"num_bytes": 0})["num_bytes"]
        return cls(
            layer_weights=sum(entry["num_weights"] for entry in layers),
            layer_bytes=sum(entry["num_bytes"] for entry in layers) + norms,
            head_weights=head["num_weights"],
            head_bytes=head["num_bytes"],
            embedding_row_bytes=classes["embedding"]["num_bytes"] / manifest.model.vocab_size,
            layers=manifest.model.layers,
            kv_bytes_per_token=manifest.kv_cache.bytes_per_token,
            integer=manifest.precision.activations != "fp32" or manifest.precision.details.get("arithmetic", "f32") != "f32",
        )

    def cost(self, step: Step) -> Cost:
        tokens = int(step.num_new.sum())
        num_bytes = self.layer_bytes + tokens * self.embedding_row_bytes + (self.head_bytes if step.num_logits else 0)
        operations = 2.0 * self.layer_weights * tokens + 2.0 * self.head_weights * step.num_logits
        widths = [layer.num_kv_heads * layer.head_dim for layer in self.layers]
        for layer, width in zip(self.layers, widths, strict=True):
            seen, pairs = _attention(step, layer.sliding_window)
            num_bytes += self.kv_bytes_per_token * width / sum(widths) * seen
            operations += 4.0 * layer.num_heads * layer.head_dim * pairs
        return Cost(num_bytes, operations)


def _attention(step: Step, window: int) -> tuple[int, int]:
    """Cached tokens read or written by all rows, and (query, key) pairs, in one layer."""
    new, length = step.num_new, step.seq_lens
    first = length - new  # position of the first new token; it sees first + 1 tokens, itself included
    if not window:
        return int(length.sum()), int((new * first + new * (new + 1) // 2).sum())
    growing = np.clip(np.minimum(length, window) - first, 0, new)  # queries that do not fill the window yet
    pairs = growing * first + growing * (growing + 1) // 2 + (new - growing) * window
    return int(np.minimum(length, window + new).sum()), int(pairs.sum())


def floor_seconds(cost: Cost, peaks: Peaks, *, integer: bool) -> tuple[float, str]:
    """The least time for that cost, and which resource sets it. 0 when the machine's peaks are not known."""
    bandwidth, ops = peaks.bandwidth_for(cost.num_bytes), peaks.int8_ops if integer else peaks.fp32_ops
    memory = cost.num_bytes / bandwidth if bandwidth else 0.0
    compute = cost.operations / ops if ops else 0.0
    return max(memory, compute), "memory" if memory >= compute else "compute"


def assess(steps: Sequence[Step], model: Model, peaks: Peaks) -> tuple[dict[str, dict[str, Any]], Peaks]:
    """Floor and share of each stage that occurred, and the peaks: raised when the engine was faster than they allow."""
    kept: dict[str, list[tuple[Step, Cost, float, str]]] = {}
    for step in steps:
        cost = model.cost(step)
        kept.setdefault(step.stage, []).append((step, cost, *floor_seconds(cost, peaks, integer=model.integer)))
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        if stage not in kept:
            continue
        entries = kept[stage]
        seconds, floor = sum(step.seconds for step, *_ in entries), sum(each for _, _, each, _ in entries)
        tokens = sum(int(step.num_new.sum()) for step, *_ in entries)
        memory = sum(each for _, _, each, bound in entries if bound == "memory")
        stages[stage] = {
            "steps": len(entries),
            "tokens": tokens,
            "seconds": seconds,
            "floor_seconds": floor,
            "share": floor / seconds,
            "bound": "memory" if memory >= floor - memory else "compute",
            "bytes_per_step": sum(cost.num_bytes for _, cost, *_ in entries) / len(entries),
            "operations_per_step": sum(cost.operations for _, cost, *_ in entries) / len(entries),
            "tokens_per_second": tokens / seconds,
            "floor_tokens_per_second": tokens / floor if floor else None,
        }
    excess = max((stage["share"] for stage in stages.values()), default=0.0)
    if excess > 1:
        return assess(steps, model, peaks.raised(excess * (1 + 1e-9)))
    return stages, peaks


class LiveRoofline:
    """For metrics: the share of each stage over the steps since the last reading, at most the newest MAX_STEPS of them."""

    MAX_STEPS = 2000

    def __init__(self, model: Model, peaks: Peaks) -> None:
        self.steps: deque[Step] = deque(maxlen=self.MAX_STEPS)
        self._model = model
        self._peaks = peaks

    @classmethod
    def load(cls, engine: Path, manifest: Manifest) -> LiveRoofline | None:
        """None when there is nothing to judge by: another target, or a machine that `runtime bench` has not measured."""
        peaks = load_cached() if manifest.target == "cpu" else None
        if peaks is None:
            return None
        try:
            return cls(Model.load(engine, manifest), peaks)
        except (OSError, KeyError, ValueError):
            return None

    def attach(self, executor: Executor) -> Executor:
        return cast(Executor, MeteredExecutor(executor, self.steps))

    def read(self) -> dict[str, float]:
        """Any thread; one at a time."""
        steps = [self.steps.popleft() for _ in range(len(self.steps))]
        stages, self._peaks = assess(steps, self._model, self._peaks)
        return {name: stage["share"] for name, stage in stages.items()}
