"""Precision of the canonical graph's weights: one scheme per file, the choice of scheme per class of tensors here.

    scheme   attention, mlp      embedding, lm_head
    fp32     as exported         as exported
    bf16     bf16                bf16
    int8     int8 per channel    int8 per row
    int4     int4 in groups      int8 per row: they are read once per token, and decide it

The result stays standard ONNX. A head equal to the embedding is stored once, whatever the scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from builder.quantize import cast, weight_only
from builder.quantize.weights import CLASSES, Weight, feeds_experts, find_weights, float_initializers, tie
from runtime.errors import BuildError

SCHEMES = ("fp32", "bf16", "int8", "int4")


@dataclass
class ClassReport:
    """One class of tensors; bytes include scales."""

    dtype: str = ""  # of most of its weights
    num_weights: int = 0
    num_bytes: int = 0

    @property
    def bytes_per_weight(self) -> float:
        return self.num_bytes / self.num_weights if self.num_weights else 0.0


@dataclass
class QuantizationReport:
    scheme: str
    group_size: int = 0  # smallest group of the int4 layers; 0 where none has groups
    classes: dict[str, ClassReport] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # int4 weight → its group size
    skipped: dict[str, str] = field(default_factory=dict)  # weight → why it kept a wider type than the scheme's
    tied: bool = False  # the embedding serves as head and is counted once, under embedding

    @property
    def num_weights(self) -> int:
        return sum(entry.num_weights for entry in self.classes.values())

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.classes.values())

    @property
    def bytes_per_weight(self) -> float:
        return self.total_bytes / self.num_weights

    @property
    def layers_bytes_per_weight(self) -> float:
        """Of attention and mlp only: without embedding, head and norms."""
        layers = [self.classes[name] for name in ("attention", "mlp") if name in self.classes]
        return sum(entry.num_bytes for entry in layers) / max(1, sum(entry.num_weights for entry in layers))

    def dtype_of(self, role: str) -> str:
        """Storage type of a class; a tied head has the embedding's."""
        role = "embedding" if role == "lm_head" and self.tied else role
        return self.classes[role].dtype if role in self.classes else "fp32"

    def to_dict(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "group_size": self.group_size,
            "num_weights": self.num_weights,
            "total_bytes": self.total_bytes,
            "bytes_per_weight": self.bytes_per_weight,
            "layers_bytes_per_weight": self.layers_bytes_per_weight,
            "tied_embedding": self.tied,
            "classes": {name: {**asdict(c), "bytes_per_weight": c.bytes_per_weight} for name, c in self.classes.items()},
            "skipped": dict(self.skipped),
        }


def quantize(
    model: ir.Model, scheme: str, *, group_size: int | None = None, progress: Callable[[int, int], None] | None = None
) -> QuantizationReport:
    """Quantize in place.

    `group_size` of int4: None takes the largest of 128, 64, 32 that divides the width of every layer; a layer whose width a given
    one does not divide takes the next smaller that does.

    progress   called with (weights done, of how many)
    Raises     BuildError for an unknown scheme or group size
    """
    if scheme not in SCHEMES:
        raise BuildError(f"unknown precision {scheme!r}; the precisions are {', '.join(SCHEMES)}")
    if group_size is not None and (group_size < 16 or group_size % 16):
        raise BuildError(f"group_size is {group_size} but must be a multiple of 16, such as 32, 64 or 128")
    graph = model.graph
    tie(graph)
    weights = find_weights(graph)
    report = QuantizationReport(scheme, tied=any({"lookup", "tied"} <= {use.kind for use in w.uses} for w in weights))
    counts: dict[str, dict[str, int]] = {}
    if scheme == "int4" and group_size is None:
        group_size = weight_only.common_group_size(weight.width for weight in weights if _takes_int4(weight))
    seen = {weight.name for weight in weights}
    for value in float_initializers(graph):
        if value.name not in seen:
            assert value.const_value is not None
            _count(report, counts, "norms", "fp32", value.const_value.size, int(value.const_value.nbytes))
    for number, weight in enumerate(weights):
        assert weight.value.const_value is not None
        role, size = weight.role, weight.value.const_value.size
        dtype, num_bytes = _apply(graph, weight, scheme, group_size, report)
        _count(report, counts, role, dtype, size, num_bytes)
        if progress is not None:
            progress(number + 1, len(weights))
    report.classes = {name: report.classes[name] for name in CLASSES if name in report.classes}
    report.group_size = min(report.groups.values(), default=0)
    return report


def _apply(graph: ir.Graph, weight: Weight, scheme: str, group_size: int | None, report: QuantizationReport) -> tuple[str, int]:
    """Returns the type the weight now has, and its size in bytes."""
    tensor = weight.value.const_value
    assert tensor is not None
    if scheme == "bf16":
        return "bf16", cast.to_bf16(graph, weight)
    if scheme == "fp32" or (reason := _keep_reason(weight)):
        if scheme != "fp32":
            report.skipped[weight.name] = reason
        return "fp32", int(tensor.nbytes)
    stored_in_out = any(use.kind == "linear" for use in weight.uses)
    matrix = tensor.numpy().astype(np.float32, copy=False)
    matrix = np.ascontiguousarray(matrix.T if stored_in_out else matrix)
    matrix = matrix.reshape(-1, matrix.shape[-1])  # [out, in]; the experts of a mixture one below the other
    name = weight.name
    if scheme == "int4" and _takes_int4(weight):
        width = weight.width
        group = weight_only.group_size_for(width, group_size)
        if group is not None:
            quantized = weight_only.int4(matrix, group)
            weight_only.rewrite(graph, weight, quantized)
            report.groups[name] = group
            return "int4", quantized.num_bytes
        report.skipped[name] = f"int8, not int4: no group of {group_size or weight_only.GROUP_SIZES[0]} or fewer divides {width}"
    quantized = weight_only.int8(matrix)
    weight_only.rewrite(graph, weight, quantized)
    return "int8", quantized.num_bytes


def _takes_int4(weight: Weight) -> bool:
    return weight.role in ("attention", "mlp") and not _keep_reason(weight)


def _keep_reason(weight: Weight) -> str:
    """Why no integer scheme applies; empty when one does."""
    kinds = {use.kind for use in weight.uses}
    if any(use.kind == "linear" and feeds_experts(use.node) for use in weight.uses):
        return "fp32: a router decides which experts run, at a cost of almost no bytes"
    if "lookup" in kinds and not weight.is_looked_up_by_token:
        return "fp32: a table of positions, almost no bytes"
    if kinds == {"linear", "lookup"} or kinds == {"linear", "tied"}:
        return "fp32: read both as it is and transposed"
    return ""


def _count(
    report: QuantizationReport, counts: dict[str, dict[str, int]], role: str, dtype: str, num_weights: int, num_bytes: int
) -> None:
    entry = report.classes.setdefault(role, ClassReport())
    entry.num_weights += num_weights
    entry.num_bytes += num_bytes
    by_dtype = counts.setdefault(role, {})
    by_dtype[dtype] = by_dtype.get(dtype, 0) + num_weights
    entry.dtype = max(by_dtype, key=lambda name: by_dtype[name])
