"""Weights and activations in the forms that TensorRT keeps in few bits, as standard ONNX on the fp32 canonical graph.

    precision    attention, mlp                                      lm_head               embedding
    fp16, bf16   16 bit                                              16 bit                16 bit
    int8         int8, one scale per output                          int8 per output       16 bit
    int8-sq      the same after SmoothQuant, inputs int8 per tensor  int8 per output       16 bit
    int4         int4, one scale per group                           int8 per output       16 bit
    fp8          E4M3 per output, inputs E4M3 per tensor             int8 per output       16 bit

An integer table cannot be looked up: TensorRT takes a quantized constant only where it is dequantized whole. A lookup reads a few
rows, so 16 bits cost no bandwidth there. A head tied to the embedding is stored a second time, in 8 bits: it is read every step.

inputs   QuantizeLinear → DequantizeLinear with one calibrated scale, once for all layers that read a tensor (q, k and v; gate
         and up)
int4     by GPTQ with second moments, on symmetric groups: TensorRT knows no zero points. fp8 by GPTQ too
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.observe import TensorStats
from builder.quantize import (
    ClassReport,
    LayerReport,
    QuantizationReport,
    activations,
    fp8,
    gptq,
    noise,
    ranges,
    smoothquant,
    weight_only,
)
from builder.quantize.kept import CheckpointReport, from_checkpoint, is_excluded, stored_limits
from builder.quantize.scheme import Scheme
from builder.quantize.weight_only import Quantized
from builder.quantize.weights import CLASSES, Weight, add_initializer, feeds_experts, find_weights, float_initializers, tie
from builder.quantized.grid import Origin
from plugins.paged_attention.op import PAGED_ATTENTION
from runtime.errors import BuildError

SCHEMES = {
    "fp16": Scheme("fp16"),
    "bf16": Scheme("bf16"),
    "fp8": Scheme("fp8", "fp8", tables=True, static=True, hessians=True, wider=("fp16",)),
    "int8": Scheme("int8", tables=True, wider=("fp16",)),
    "int8-sq": Scheme("int8", "int8", tables=True, static=True, smooth=True, wider=("fp16",)),
    "int4": Scheme("int4", tables=True, hessians=True, wider=("int8", "fp16")),
}
_NARROW = ("fp16", "bf16")
_NARROW_BYTES = 2
HEAD_SUFFIX = ".head"  # of the second copy of a table that is both looked up and multiplied


def activation_names(model: ir.Model) -> list[str]:
    """Inputs of the layers that `quantize` gives fewer than 16 bits, in graph order, each once."""
    weights = [w for w in find_weights(model.graph) if w.role in ("attention", "mlp") and not _keep_reason(w)]
    layers = {use.node for weight in weights for use in weight.uses}
    return list(dict.fromkeys(str(_layer_input(node).name) for node in model.graph if node in layers))


def roles(model: ir.Model) -> dict[str, str]:
    """Weight → class of tensors, for the names that `quantize` gives; ask before it."""
    found: dict[str, str] = {}
    for weight in find_weights(model.graph):
        found[weight.name] = weight.role
        if any(use.role == "lm_head" for use in weight.uses):
            found[weight.name + HEAD_SUFFIX] = "lm_head"
    return found


def quantize(
    model: ir.Model,
    precision: str,
    *,
    group_size: int | None = None,
    narrow: str = "fp16",
    head: bool | None = None,
    calibration_method: str = "max",
    stats: Mapping[str, TensorStats] | None = None,
    overrides: Mapping[str, str] | None = None,
    origin: Origin | None = None,
    keep_values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizationReport:
    """In place.

    narrow        the 16-bit type of what is not quantized
    head          the LM head in int8; None: as the precision has it
    stats         by name of `activation_names`: needed for fp8 and int8-sq; with second moments fp8 and int4 round by GPTQ; with
                  samples the report has each layer's signal-to-noise ratio
    overrides     weight → a wider type than the precision's: int8, or fp16 for whichever 16-bit type it is
    origin        how the checkpoint was quantized; grids with zero points are rounded anew
    keep_values   SmoothQuant leaves attention's values as they are, since scales of their pools were calibrated before it
    progress      called with (weights done, of how many)

    Raises     BuildError when calibration is missing
    """
    scheme = SCHEMES[precision]
    graph = model.graph
    origin = origin or Origin()
    report = QuantizationReport(precision, checkpoint=CheckpointReport.of(origin))
    job = _Job(graph, scheme, narrow, calibration_method, dict(stats or {}), dict(overrides or {}), origin, report)
    job.head = scheme.tables and not origin.excludes_head if head is None else head
    if scheme.smooth:
        skip = {weight.name for weight in find_weights(graph) if keep_values and _reads_attention(weight)} | set(job.overrides)
        job.stats = smoothquant.smooth(graph, job.stats, static=True, method=calibration_method, skip=frozenset(skip))
    if not job.head:
        job.report.tied = tie(graph) or any({"lookup", "tied"} <= {use.kind for use in w.uses} for w in find_weights(graph))
    weights = [part for weight in find_weights(graph) for part in (_by_use(graph, weight) if job.head else (weight,))]
    job.group_size = group_size
    if scheme.weights == "int4" and group_size is None:
        stored = [grid.group_size for grid in origin.grids.values() if grid.dtype == "int4" and grid.group_size]
        job.group_size = weight_only.common_group_size([*(w.width for w in weights if job.dtype(w) == "int4"), *stored])
    if scheme.activations and not scheme.smooth:
        rounded = [w for w in weights if w.role in ("attention", "mlp") and job.dtype(w) != narrow]
        job.limits = stored_limits(origin, rounded, scheme.activations)
    if scheme.weights not in _NARROW:
        report.checkpoint.unquantized = [weight.name for weight in weights if is_excluded(origin, weight)]
    for number, weight in enumerate(weights):
        job.apply(weight)
        if progress is not None:
            progress(number + 1, len(weights))
    job.round_inputs()
    report.group_size = min(report.groups.values(), default=0)
    seen = {weight.name for weight in find_weights(graph)}
    for value in float_initializers(graph):
        if value.name not in seen and not str(value.name).endswith((".scale", ".input_scale")):
            assert value.const_value is not None
            _count(report, "norms", narrow, value.const_value.size, _NARROW_BYTES * value.const_value.size)
    report.classes = {name: report.classes[name] for name in CLASSES if name in report.classes}
    return report


@dataclass
class _Job:
    """One run of `quantize`."""

    graph: ir.Graph
    scheme: Scheme
    narrow: str
    method: str
    stats: dict[str, TensorStats]
    overrides: dict[str, str]
    origin: Origin
    report: QuantizationReport
    head: bool = False
    group_size: int | None = None
    limits: dict[ir.Value, float] = field(default_factory=dict)  # ranges of inputs that the checkpoint brings along
    readers: dict[ir.Value, list[ir.Node]] = field(default_factory=dict)  # a layer's input → layers that read it rounded

    def dtype(self, weight: Weight) -> str:
        """What the weight gets, where its width allows."""
        if weight.role == "embedding" or _keep_reason(weight) or is_excluded(self.origin, weight):
            return self.narrow
        if weight.role == "lm_head":
            return "int8" if self.head else self.narrow
        chosen = self.overrides.get(weight.name, self.scheme.weights)
        return self.narrow if chosen in _NARROW else chosen

    def apply(self, weight: Weight) -> None:
        size, dtype = _size(weight), self.dtype(weight)
        if dtype == self.narrow:
            excluded = "16 bit: the checkpoint does not quantize it" if is_excluded(self.origin, weight) else ""
            if self.scheme.weights not in _NARROW and (reason := _keep_reason(weight) or excluded):
                self.report.skipped[weight.name] = reason
            _count(self.report, weight.role, dtype, size, _NARROW_BYTES * size)
            return
        if dtype == "int4":
            group = weight_only.group_size_for(weight.width, self.group_size)
            if group is None:
                wanted = self.group_size or 128
                self.report.skipped[weight.name] = f"int8, not int4: no group of {wanted} or fewer divides {weight.width}"
                dtype = "int8"
            else:
                self.report.groups[weight.name] = group
        matrix = _out_in(weight)
        quantized = self._rounded(weight, dtype, matrix)
        self._feed(weight, dtype, matrix, quantized)
        weight_only.rewrite(self.graph, weight, quantized)
        _count(self.report, weight.role, dtype, size, int(quantized.q.nbytes) + _NARROW_BYTES * quantized.scale.size)

    def _rounded(self, weight: Weight, dtype: str, matrix: npt.NDArray[np.float32]) -> Quantized:
        group = self.report.groups.get(weight.name, 0)
        stored = from_checkpoint(self.origin, weight.name, matrix, dtype, group, self.report.checkpoint, zeros=False)
        if stored is not None:
            self.report.rounding[weight.name] = "checkpoint"
            return stored
        if dtype == "int8":
            return weight_only.int8(matrix)
        plain = weight_only.int4(matrix, group) if group else fp8.quantize(matrix)
        found = self.stats.get(str(_layer_input(weight.uses[0].node).name))
        if found is None or found.hessian is None or np.allclose(plain.dense(), matrix, rtol=1e-6, atol=1e-9):
            self.report.rounding[weight.name] = "nearest"  # exact where the checkpoint has this very grid
            return plain
        self.report.rounding[weight.name] = "gptq"
        if group:
            return gptq.int4(matrix, found.hessian, group, symmetric=True)
        return gptq.e4m3(matrix, found.hessian)

    def _feed(self, weight: Weight, dtype: str, matrix: npt.NDArray[np.float32], quantized: Quantized) -> None:
        """Remember whose input is to be rounded, and measure the layer on its samples."""
        if weight.role not in ("attention", "mlp"):
            return
        x = _layer_input(weight.uses[0].node)
        stats = self.stats.get(str(x.name))
        rounds = self.scheme.activations
        if rounds:
            for use in weight.uses:
                self.readers.setdefault(_layer_input(use.node), []).append(use.node)
            if stats is None:
                raise BuildError(f"no calibrated range for {x.name}; calibrate the tensors of activation_names")
        if stats is not None and stats.sample.size:
            sample = stats.sample
            fed = activations.rounded(sample, rounds, limit=self._limit(x)) if rounds else sample
            self.report.layers[weight.name] = LayerReport(dtype, *noise(weight.name, sample, fed, matrix, quantized.dense()))

    def round_inputs(self) -> None:
        for x, readers in self.readers.items():
            activations.insert(self.graph, x, list(dict.fromkeys(readers)), self.scheme.activations, limit=self._limit(x))

    def _limit(self, x: ir.Value) -> float:
        if x in self.limits:
            return self.limits[x]
        return ranges.limit(self.stats[str(x.name)], self.method, self.scheme.activations)


def _layer_input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _reads_attention(weight: Weight) -> bool:
    node = _layer_input(weight.uses[0].node).producer()
    while node is not None and node.op_type in ("Reshape", "Transpose", "Squeeze", "Unsqueeze") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == PAGED_ATTENTION


def _by_use(graph: ir.Graph, weight: Weight) -> Iterator[Weight]:
    """A table that is looked up and multiplied becomes two weights."""
    lookups = tuple(use for use in weight.uses if use.kind == "lookup")
    others = tuple(use for use in weight.uses if use.kind != "lookup")
    if not lookups or not others:
        yield weight
        return
    tensor = weight.value.const_value
    assert tensor is not None
    head = add_initializer(graph, weight.name + HEAD_SUFFIX, ir.Tensor(tensor.numpy()))
    for use in others:
        source = use.node.inputs[1]
        if use.kind == "tied":
            assert source is not None
            transpose = source.producer()
            assert transpose is not None
            transpose.replace_input_with(0, head)
        else:
            use.node.replace_input_with(1, head)
    yield dataclasses.replace(weight, uses=lookups)
    yield Weight(head, others)


def _keep_reason(weight: Weight) -> str:
    kinds = {use.kind for use in weight.uses}
    if kinds == {"linear"} and any(feeds_experts(use.node) for use in weight.uses):
        return "16 bit: a router decides which experts run, at a cost of almost no bytes"
    if "experts" in kinds:
        return "16 bit: TensorRT has no kernel for experts of fewer bits without its own expert layer"
    if kinds == {"linear", "tied"}:
        return "16 bit: read both as it is and transposed"
    return ""


def _out_in(weight: Weight) -> npt.NDArray[np.float32]:
    assert weight.value.const_value is not None
    matrix = weight.value.const_value.numpy().astype(np.float32, copy=False)
    return np.ascontiguousarray(matrix.T if any(use.kind == "linear" for use in weight.uses) else matrix)


def _size(weight: Weight) -> int:
    assert weight.value.const_value is not None
    return weight.value.const_value.size


def _count(report: QuantizationReport, role: str, dtype: str, num_weights: int, num_bytes: int) -> None:
    entry = report.classes.setdefault(role, ClassReport())
    if num_weights > entry.num_weights / 2:
        entry.dtype = dtype
    entry.num_weights += num_weights
    entry.num_bytes += num_bytes
