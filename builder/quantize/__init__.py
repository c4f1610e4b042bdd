"""Precision of the canonical graph: which type each class of tensors gets, by scheme; how to round is one file per scheme.

    scheme    attention, mlp        their inputs                        embedding, lm_head
    fp32      as exported                                               as exported
    bf16      bf16                                                      bf16
    int8-wo   int8 per channel      as they are                         int8 per row
    int8      int8 per channel      int8, dynamic                       int8 per row
    int8-sq   int8 per channel, after SmoothQuant; else as int8
    int4      int4 in groups        int8, dynamic                       int8 per row
    fp8       E4M3 per channel      E4M3, static                        as exported

Embedding and head in int8 are read once per token and are a quarter to a half of a small model; `tables` decides otherwise. The
result stays standard ONNX: Q/DQ, and functions of standard ops where a scale depends on the values seen. A head equal to the
embedding is stored once, whatever the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.observe import TensorStats
from builder.quantize import activations, cast, fp8, gptq, ops, ranges, smoothquant, weight_only
from builder.quantize.kept import CheckpointReport, from_checkpoint, is_excluded, stored_limits
from builder.quantize.scheme import SCHEMES as SCHEMES
from builder.quantize.scheme import Scheme, scheme_of
from builder.quantize.weight_only import Quantized
from builder.quantize.weights import CLASSES, Weight, feeds_experts, find_weights, float_initializers, tie
from builder.quantized.grid import Origin
from runtime.errors import BuildError

MAX_DB = 200.0  # stands for "no error at all"


@dataclass
class ClassReport:
    """One class of tensors; bytes include scales."""

    dtype: str = ""  # of most of its weights
    num_weights: int = 0
    num_bytes: int = 0

    @property
    def bytes_per_weight(self) -> float:
        return self.num_bytes / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True)
class LayerReport:
    """A quantized layer on its calibration samples: how far its output stands above its error."""

    dtype: str
    sqnr_db: float
    weights_db: float  # with exact inputs
    activations_db: float  # with exact weights


@dataclass
class QuantizationReport:
    scheme: str
    group_size: int = 0  # smallest group of the int4 layers; 0 where none has groups
    classes: dict[str, ClassReport] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # int4 weight → its group size
    skipped: dict[str, str] = field(default_factory=dict)  # weight → why it kept a wider type than the scheme's
    rounding: dict[str, str] = field(default_factory=dict)  # int4 or fp8 weight → nearest, gptq or the checkpoint's own
    checkpoint: CheckpointReport = field(default_factory=CheckpointReport)
    layers: dict[str, LayerReport] = field(default_factory=dict)  # by weight, where there were samples
    activation_group_size: int = 0  # dynamic: values per scale; 0 = per token, static or none
    tied: bool = False  # the embedding serves as head and is counted once, under embedding

    @property
    def is_quantized(self) -> bool:
        """Is any weight stored in a type of eight bits or fewer?"""
        return any(entry.dtype not in ("fp32", "fp16", "bf16") for entry in self.classes.values())

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

    def worst_layers(self) -> list[tuple[str, LayerReport]]:
        """The noisiest first."""
        return sorted(self.layers.items(), key=lambda item: (item[1].sqnr_db, item[0]))

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
            "rounding": {how: sum(r == how for r in self.rounding.values()) for how in sorted(set(self.rounding.values()))},
            "checkpoint": self.checkpoint.to_dict(),
            "layers": {name: asdict(layer) for name, layer in self.worst_layers()},
        }


def quantize(
    model: ir.Model,
    scheme: str,
    *,
    group_size: int | None = None,
    tables: bool | None = None,
    static_activations: bool | None = None,
    calibration_method: str = "max",
    stats: Mapping[str, TensorStats] | None = None,
    overrides: Mapping[str, str] | None = None,
    origin: Origin | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizationReport:
    """Quantize in place.

    group_size           of int4: None takes the largest of 128, 64, 32 that divides every layer's width, and a quantized
                         checkpoint's groups; a layer whose width a given one does not divide takes the next smaller that does
    tables               embedding and LM head too; None: as the scheme has it, but not where the checkpoint excludes its head
    static_activations   one calibrated scale per tensor; None: as the scheme has it
    stats                by name of `layer_inputs`: needed for static scales and SmoothQuant; with second moments int4 rounds by
                         GPTQ; with samples the report has each layer's signal-to-noise ratio
    overrides            weight → a wider type than the scheme's: int8, bf16 or fp32
    origin               how the checkpoint was quantized: its grids and static input scales are kept where the scheme has such
    progress             called with (weights done, of how many)

    Raises     BuildError for an unknown scheme or group size, or when calibration is missing
    """
    plan = scheme_of(scheme)
    if group_size is not None and (group_size < 16 or group_size % 16):
        raise BuildError(f"group_size is {group_size} but must be a multiple of 16, such as 32, 64 or 128")
    static = plan.static if static_activations is None else static_activations
    graph, stats, origin = model.graph, dict(stats or {}), origin or Origin()
    if tables is None:
        tables = plan.tables and not origin.excludes_head
    tie(graph)
    if plan.smooth:
        stats = smoothquant.smooth(graph, stats, static=static, method=calibration_method, skip=frozenset(overrides or ()))
    weights = find_weights(graph)
    report = QuantizationReport(scheme, tied=any({"lookup", "tied"} <= {use.kind for use in w.uses} for w in weights))
    report.checkpoint = CheckpointReport.of(origin)
    counts: dict[str, dict[str, int]] = {}
    choice = _Choice(plan, tables, dict(overrides or {}), origin)
    layers = [_layer(weight, choice, group_size, report) for weight in weights]
    if plan.weights == "int4" and group_size is None:
        widths = [layer.weight.width for layer in layers if choice.dtype(layer.weight) == "int4"]
        stored = [grid.group_size for grid in origin.grids.values() if grid.dtype == "int4"]
        group_size = weight_only.common_group_size([*widths, *(size for size in stored if size)])
        report.skipped.clear()
        layers = [_layer(weight, choice, group_size, report) for weight in weights]
    report.checkpoint.unquantized = [weight.name for weight in weights if is_excluded(origin, weight)]
    seen = {weight.name for weight in weights}
    for value in float_initializers(graph):
        if value.name not in seen:
            assert value.const_value is not None
            _count(report, counts, "norms", "fp32", value.const_value.size, int(value.const_value.nbytes))
    integers = [layer for layer in layers if layer.dtype not in ("fp32", "bf16")]
    stored_scales = {} if plan.smooth else stored_limits(origin, [layer.weight for layer in integers], plan.activations)
    inputs = _Inputs(plan.activations, static, calibration_method, stats, integers, stored_scales)
    for number, layer in enumerate(layers):
        assert layer.weight.value.const_value is not None
        role, size = layer.weight.role, layer.weight.value.const_value.size
        _count(report, counts, role, layer.dtype, size, _apply(graph, layer, stats, inputs, report, origin))
        if progress is not None:
            progress(number + 1, len(layers))
    inputs.insert(graph)
    report.activation_group_size = inputs.group_size
    ops.attach(model)
    report.classes = {name: report.classes[name] for name in CLASSES if name in report.classes}
    report.group_size = min(report.groups.values(), default=0)
    return report


def layer_inputs(model: ir.Model, scheme: str, *, tables: bool | None = None) -> list[str]:
    """Tensors to observe for `quantize`: the inputs of the layers it will quantize, in graph order, each once."""
    plan = scheme_of(scheme)
    choice = _Choice(plan, plan.tables if tables is None else tables, {}, Origin())
    readers = {
        use.node
        for weight in find_weights(model.graph)
        if choice.dtype(weight) not in ("fp32", "bf16")
        for use in weight.uses
        if use.kind in ("linear", "tied")
    }
    return list(dict.fromkeys(str(node.inputs[0].name) for node in model.graph if node in readers))  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Choice:
    scheme: Scheme
    tables: bool
    overrides: dict[str, str]
    origin: Origin

    def dtype(self, weight: Weight) -> str:
        """What the weight gets, where its width allows."""
        if self.scheme.weights in ("fp32", "bf16"):
            return self.scheme.weights
        if _keep_reason(weight) or is_excluded(self.origin, weight):
            return "fp32"
        if weight.name in self.overrides:
            return self.overrides[weight.name]
        if weight.role in ("embedding", "lm_head"):
            return "int8" if self.tables else "fp32"
        return self.scheme.weights


@dataclass(frozen=True)
class _Layer:
    weight: Weight
    dtype: str
    group: int | None  # of int4


def _layer(weight: Weight, choice: _Choice, group_size: int | None, report: QuantizationReport) -> _Layer:
    dtype, group = choice.dtype(weight), None
    if dtype == "int4":
        group = weight_only.group_size_for(weight.width, group_size)
        if group is None:
            wanted = group_size or weight_only.GROUP_SIZES[0]
            report.skipped[weight.name] = f"int8, not int4: no group of {wanted} or fewer divides {weight.width}"
            dtype = "int8"
    if dtype == "fp32" and choice.scheme.weights != "fp32":
        excluded = "fp32: the checkpoint does not quantize it" if is_excluded(choice.origin, weight) else ""
        tables = "fp32: embedding and head are not quantized unless asked for"
        report.skipped[weight.name] = _keep_reason(weight) or excluded or tables
    return _Layer(weight, dtype, group)


class _Inputs:
    """How each layer's input is rounded; one quantizer per tensor, whose scale depends on all of its readers."""

    def __init__(
        self,
        dtype: str,
        static: bool,
        method: str,
        stats: Mapping[str, TensorStats],
        layers: list[_Layer],
        stored: Mapping[ir.Value, float],
    ) -> None:
        """`stored`: ranges that a quantized checkpoint brings along."""
        self.dtype, self._stats = dtype, stats
        readers: dict[ir.Value, list[ir.Node]] = {}
        for layer in layers:
            for node in (use.node for use in layer.weight.uses if use.kind != "lookup"):
                assert node.inputs[0] is not None
                readers.setdefault(node.inputs[0], []).append(node)
        self.group_size = 0
        if dtype == "int8" and not static:
            read = [layer for layer in layers if any(use.kind != "lookup" for use in layer.weight.uses)]
            self.group_size = activations.dynamic_group_size([r.weight.width for r in read], [r.group or 0 for r in read])
        self._readers = {} if not dtype or (dtype == "int8" and not static and not self.group_size) else readers
        self._how: dict[ir.Value, dict[str, Any]] = {}
        for x in self._readers:
            if not static:
                assert x.shape is not None
                self._how[x] = {"block_size": self.group_size or x.shape[-1]}
            elif x in stored:
                self._how[x] = {"limit": stored[x]}
            elif str(x.name) in stats:
                self._how[x] = {"limit": ranges.limit(stats[str(x.name)], method, dtype)}
            else:
                raise BuildError(f"no calibrated range for {x.name}; static scales need calibration on a text")

    def insert(self, graph: ir.Graph) -> None:
        for x, readers in self._readers.items():
            activations.insert(graph, x, list(dict.fromkeys(readers)), self.dtype, **self._how[x])

    def measure(self, layer: _Layer, matrix: npt.NDArray[np.float32], dense: npt.NDArray[np.float32]) -> LayerReport | None:
        x = next((use.node.inputs[0] for use in layer.weight.uses if use.kind in ("linear", "tied")), None)
        if x is None or str(x.name) not in self._stats:
            return None
        sample = self._stats[str(x.name)].sample
        fed = activations.rounded(sample, self.dtype, **self._how[x]) if x in self._how else sample
        return LayerReport(layer.dtype, *noise(layer.weight.name, sample, fed, matrix, dense))


def noise(
    name: str, sample: npt.NDArray, fed: npt.NDArray, matrix: npt.NDArray, dense: npt.NDArray
) -> tuple[float, float, float]:
    """dB of the output of the layer with the weight `name` above its error: as quantized, from the weights alone, from the inputs
    alone.

    Raises  BuildError when squares are beyond fp32
    """
    with np.errstate(over="ignore", invalid="ignore"):
        exact = sample @ matrix.T
        errors = (fed @ dense.T - exact, sample @ dense.T - exact, fed @ matrix.T - exact)
        power, *lost = (float(np.square(each).sum(dtype=np.float64)) for each in (exact, *errors))
    if not all(map(math.isfinite, (power, *lost))):
        raise BuildError(
            f"the layer with {name} computes values beyond fp32 on the calibration text (its largest weight is "
            f"{np.abs(matrix).max():.3g}); check the checkpoint's weights and their scales"
        )
    found = [10 * math.log10(power / each) if each > 0 and power > 0 else MAX_DB for each in lost]
    return found[0], found[1], found[2]


def _apply(
    graph: ir.Graph,
    layer: _Layer,
    stats: Mapping[str, TensorStats],
    inputs: _Inputs,
    report: QuantizationReport,
    origin: Origin,
) -> int:
    """Returns the size in bytes."""
    weight = layer.weight
    tensor = weight.value.const_value
    assert tensor is not None
    if layer.dtype == "bf16":
        return cast.to_bf16(graph, weight)
    if layer.dtype == "fp32":
        return int(tensor.nbytes)
    stored_in_out = any(use.kind == "linear" for use in weight.uses)
    matrix = tensor.numpy().astype(np.float32, copy=False)
    matrix = np.ascontiguousarray(matrix.T if stored_in_out else matrix)
    matrix = matrix.reshape(-1, matrix.shape[-1])  # [out, in]; the experts of a mixture one below the other
    if layer.group is not None:
        report.groups[weight.name] = layer.group
    quantized = from_checkpoint(origin, weight.name, matrix, layer.dtype, layer.group, report.checkpoint)
    if quantized is None:
        quantized = _quantize(layer, matrix, stats, report)
    else:
        report.rounding[weight.name] = "checkpoint"
    if (measured := inputs.measure(layer, matrix, quantized.dense())) is not None:
        report.layers[weight.name] = measured
    weight_only.rewrite(graph, weight, quantized)
    return quantized.num_bytes


def _quantize(
    layer: _Layer, matrix: npt.NDArray[np.float32], stats: Mapping[str, TensorStats], report: QuantizationReport
) -> Quantized:
    name = layer.weight.name
    if layer.dtype == "int8":
        return weight_only.int8(matrix)
    plain = fp8.quantize(matrix) if layer.group is None else weight_only.int4(matrix, layer.group)
    use = layer.weight.uses[0]
    found = stats.get(str(use.node.inputs[0].name)) if use.kind == "linear" and use.node.inputs[0] is not None else None
    if found is None or found.hessian is None or np.allclose(plain.dense(), matrix, rtol=1e-6, atol=1e-9):
        report.rounding[name] = "nearest"  # exact where the checkpoint has this very grid
        return plain
    report.rounding[name] = "gptq"
    return gptq.e4m3(matrix, found.hessian) if layer.group is None else gptq.int4(matrix, found.hessian, layer.group)


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
