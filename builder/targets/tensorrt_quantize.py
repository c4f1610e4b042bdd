"""Weights and activations in the forms that TensorRT keeps in few bits, as standard ONNX on the fp32 canonical graph.

    precision    attention, mlp                          lm_head               embedding
    fp16, bf16   16 bit                                  16 bit                16 bit
    int8         int8, one scale per output              int8 per output       16 bit
    int4         int4, one scale per group               int8 per output       16 bit
    fp8          E4M3 per output, inputs E4M3 per tensor int8 per output       16 bit

An integer table cannot be looked up: TensorRT takes a quantized constant only where it is dequantized whole. A lookup reads a few
rows, so 16 bits cost no bandwidth there. A head tied to the embedding is stored a second time, in 8 bits: it is read every step.

fp8     QuantizeLinear → DequantizeLinear on a layer's input, once for all layers that read it (q, k and v; gate and up)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize import ClassReport, QuantizationReport, weight_only
from builder.quantize.weight_only import Quantized
from builder.quantize.weights import CLASSES, Weight, add_initializer, feeds_experts, find_weights, float_initializers, tie
from runtime.errors import BuildError

PRECISIONS = ("fp16", "bf16", "fp8", "int8", "int4")
E4M3_MAX = 448.0
_NARROW_BYTES = 2


def activation_names(model: ir.Model) -> list[str]:
    """Inputs of the layers that `quantize(…, "fp8")` quantizes, in graph order, each once."""
    weights = [w for w in find_weights(model.graph) if w.role in ("attention", "mlp") and not _keep_reason(w)]
    layers = {use.node for weight in weights for use in weight.uses}
    return list(dict.fromkeys(str(_layer_input(node).name) for node in model.graph if node in layers))


HEAD_SUFFIX = ".head"  # of the second copy of a table that is both looked up and multiplied


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
    activations: str = "fp16",
    amax: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> QuantizationReport:
    """In place. `activations` is the 16-bit type of what is not quantized; `amax`, of `activation_names`, is for fp8 only."""
    assert precision in PRECISIONS, precision
    graph = model.graph
    narrow = activations
    report = QuantizationReport(precision)
    if precision in ("fp16", "bf16"):
        report.tied = tie(graph)
        for weight in find_weights(graph):
            _count(report, weight.role, narrow, _size(weight), _NARROW_BYTES * _size(weight))
    else:
        weights = find_weights(graph)
        if precision == "int4" and group_size is None:
            group_size = weight_only.common_group_size(w.width for w in weights if w.role in ("attention", "mlp"))
        for weight in weights:
            for part in _by_use(graph, weight):
                _apply(graph, part, precision, group_size, narrow, amax or {}, report)
        report.group_size = min(report.groups.values(), default=0)
    seen = {weight.name for weight in find_weights(graph)}
    for value in float_initializers(graph):
        if value.name not in seen and not str(value.name).endswith((".scale", ".input_scale")):
            assert value.const_value is not None
            _count(report, "norms", narrow, value.const_value.size, _NARROW_BYTES * value.const_value.size)
    report.classes = {name: report.classes[name] for name in CLASSES if name in report.classes}
    return report


def _apply(
    graph: ir.Graph,
    weight: Weight,
    precision: str,
    group_size: int | None,
    narrow: str,
    amax: Mapping[str, npt.NDArray[np.float32]],
    report: QuantizationReport,
) -> None:
    size = _size(weight)
    if (reason := _keep_reason(weight)) or weight.role == "embedding":
        if reason:
            report.skipped[weight.name] = reason
        _count(report, weight.role, narrow, size, _NARROW_BYTES * size)
        return
    matrix = _out_in(weight)
    dtype = "int8" if weight.role == "lm_head" else precision
    if dtype == "int4":
        group = weight_only.group_size_for(weight.width, group_size)
        if group is None:
            report.skipped[weight.name] = f"int8, not int4: no group of {group_size or 128} or fewer divides {weight.width}"
            dtype = "int8"
        else:
            report.groups[weight.name] = group
    if dtype == "fp8":
        quantized = fp8(matrix)
        for node in dict.fromkeys(use.node for use in weight.uses):
            _quantize_input(graph, node, amax)
    else:
        quantized = weight_only.int4(matrix, report.groups[weight.name]) if dtype == "int4" else weight_only.int8(matrix)
    weight_only.rewrite(graph, weight, quantized)
    _count(report, weight.role, dtype, size, int(quantized.q.nbytes) + _NARROW_BYTES * quantized.scale.size)


def fp8(weight: npt.NDArray[np.float32]) -> Quantized:
    """Of `weight` [out, in]: E4M3, one scale per output."""
    scale = np.abs(weight).max(axis=1) / np.float32(E4M3_MAX)
    scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
    return Quantized(ir.Tensor((weight / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)), scale, 0)


def _quantize_input(graph: ir.Graph, node: ir.Node, amax: Mapping[str, npt.NDArray[np.float32]]) -> None:
    x = _layer_input(node)
    if is_quantized(x):
        return
    name = str(x.name)
    if name not in amax:
        raise BuildError(f"no calibrated range for {name}; calibrate the tensors of activation_names")
    limit = float(amax[name])
    value = np.array(limit / E4M3_MAX if limit else 1.0, np.float32)
    scale = add_initializer(graph, f"{name}.input_scale", ir.Tensor(value))
    zero = add_initializer(graph, f"{name}.zero_point", ir.Tensor(np.zeros((), ml_dtypes.float8_e4m3fn)))
    quantizer = ir.node("QuantizeLinear", [x, scale, zero], name=f"{name}.quantize")
    dequantizer = ir.node("DequantizeLinear", [quantizer.outputs[0], scale, zero], name=f"{name}.dequantize")
    quantizer.outputs[0].name, dequantizer.outputs[0].name = f"{name}.fp8", f"{name}.fp8.wide"
    quantizer.outputs[0].dtype, quantizer.outputs[0].shape = ir.DataType.FLOAT8E4M3FN, x.shape
    dequantizer.outputs[0].type, dequantizer.outputs[0].shape = x.type, x.shape
    readers = [use.node for use in x.uses() if use.node.op_type == "MatMul" and use.idx == 0]
    order = {each: index for index, each in enumerate(graph)}
    graph.insert_before(min(readers, key=order.__getitem__), [quantizer, dequantizer])
    for reader in readers:
        if not feeds_experts(reader):
            reader.replace_input_with(0, dequantizer.outputs[0])


def is_quantized(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _layer_input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


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
