"""Quantized layers → forgeline::QuantizedMatMul, for the CPU kernels of plugins/quantized_matmul.

    MatMul(x, Transpose(DequantizeLinear(weight, scale, zero point)))             → QuantizedMatMul(x, weight, scale, zero point)
    Split of it in halves a, b; a * Sigmoid(a) * b                                → the same node, gated
    RMSNormalization that only it reads                                           → the same node, normed
    Add of another value, which only it feeds                                     → the same node, added

Taken are layers whose inputs are rounded to int8 while they run. A width that is no multiple of 32 and signed zero points stay
with OpenVINO.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common as passes

from builder.targets.openvino_build import NodeBuilder, replace
from plugins.paged_attention.op import DOMAIN
from plugins.quantized_matmul.openvino import GROUPS, LOWERED_OP

_BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4, ir.DataType.UINT4: 4}
_EPSILON = 1e-5  # ONNX's default
_WIDTHS = 32  # the kernels take multiples


def lower_matmuls(model: ir.Model, input_group: int) -> int:
    """In place; how many layers. `input_group`: values of a layer's input under one scale."""
    count = 0
    for node in list(model.graph):
        layer = _quantized(node, input_group)
        if layer is None:
            continue
        norm, gate = _norm_before(node), _gate_behind(node)
        last = gate or node
        add, residual = _residual(last)
        last = add or last
        if last.outputs[0].is_graph_output():
            continue
        assert layer.weight.const_value is not None
        outputs, width = layer.weight.const_value.shape
        attributes = {
            "outputs": outputs, "width": width, "bits": _BITS[layer.weight.const_value.dtype], "group": layer.group,
            "input_group": input_group, "zero_points": int(layer.zero_point is not None),
            "epsilon": epsilon_of(norm) if norm else 0.0,
            "gated": int(gate is not None), "normed": int(norm is not None), "added": int(add is not None),
        }  # fmt: skip
        x, norm_weight = (norm.inputs[0], norm.inputs[1]) if norm else (node.inputs[0], None)
        further = (value for value in (layer.zero_point, norm_weight, residual) if value is not None)
        inputs = [x, layer.weight, layer.scale, *further]
        name = last.outputs[0].name
        new = NodeBuilder(model.graph, anchor=last).op(LOWERED_OP, inputs, attributes, domain=DOMAIN)
        replace(last, new)
        new.name = name
        producer = new.producer()
        assert producer is not None
        producer.name = name
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    return count


def epsilon_of(norm: ir.Node) -> float:
    return norm.attributes.get_float("epsilon", _EPSILON)


@dataclass(frozen=True)
class _Layer:
    weight: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    group: int  # columns under one sum


def _quantized(node: ir.Node, input_group: int) -> _Layer | None:
    transpose = _producer(node, 1, "Transpose") if node.op_type == "MatMul" else None
    dequantize = _producer(transpose, 0, "DequantizeLinear") if transpose is not None else None
    if dequantize is None:
        return None
    weight, scale, zero = (*dequantize.inputs, None)[:3]
    assert weight is not None and scale is not None
    if weight.const_value is None or scale.const_value is None or weight.const_value.dtype not in _BITS:
        return None
    unsigned = weight.const_value.dtype == ir.DataType.UINT4
    if unsigned != (zero is not None) or (zero is not None and zero.const_value is None):
        return None
    shape = weight.const_value.shape.numpy()
    if len(shape) != 2 or shape[1] % _WIDTHS or scale.const_value.dtype != ir.DataType.FLOAT:
        return None
    per_scale = dequantize.attributes.get_int("block_size", 0)
    if shape[1] % (per_scale or 1) or (per_scale and _BITS[weight.const_value.dtype] == 8):
        return None
    group = next((size for size in GROUPS if input_group % size == 0 and (per_scale or size) % size == 0), None)
    return None if group is None else _Layer(weight, scale, zero, group)


def _producer(node: ir.Node, index: int, op_type: str) -> ir.Node | None:
    value = node.inputs[index]
    found = value.producer() if value is not None else None
    return found if found is not None and found.op_type == op_type else None


def _norm_before(node: ir.Node) -> ir.Node | None:
    norm = _producer(node, 0, "RMSNormalization")
    if (
        norm is None
        or _only_reader(norm.outputs[0], node.op_type) is not node
        or norm.attributes.get_int("axis", -1) not in (-1, 2)
    ):
        return None
    weight = norm.inputs[1].const_value if norm.inputs[1] is not None else None
    shape = norm.outputs[0].shape
    plain = weight is not None and weight.dtype == ir.DataType.FLOAT and shape is not None
    plain = plain and weight.shape.numpy() == (shape[-1],)  # type: ignore[union-attr,index]
    return norm if plain and norm.attributes.get_int("stash_type", 1) == 1 else None


def _residual(node: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """The Add behind `node` and what it adds: another activation of the same shape, not a bias."""
    out = node.outputs[0]
    add = _only_reader(out, "Add")
    if add is None:
        return None, None
    (other,) = (value for value in add.inputs if value is not out) if add.inputs[0] is not add.inputs[1] else (None,)
    if other is None or other.is_initializer() or other.producer() is None or not _same_shape(other, out):
        return None, None
    return add, other


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    return a.shape is not None and b.shape is not None and [str(n) for n in a.shape] == [str(n) for n in b.shape]


def _gate_behind(node: ir.Node) -> ir.Node | None:
    """The last Mul of silu(first half) * second half, when nothing else reads what lies between."""
    split = _only_reader(node.outputs[0], "Split")
    if split is None or len(split.outputs) != 2 or not _in_halves(split):
        return None
    gate, up = split.outputs
    readers = {use.node.op_type: use.node for use in gate.uses()}
    if set(readers) != {"Sigmoid", "Mul"} or len(list(gate.uses())) != 2:
        return None
    silu, product = readers["Mul"], _only_reader(readers["Mul"].outputs[0], "Mul")
    if set(silu.inputs) != {gate, readers["Sigmoid"].outputs[0]} or len(list(readers["Sigmoid"].outputs[0].uses())) != 1:
        return None
    if product is None or set(product.inputs) != {silu.outputs[0], up} or len(list(up.uses())) != 1:
        return None
    return product


def _in_halves(split: ir.Node) -> bool:
    x, sizes = split.inputs[0], split.inputs[1] if len(split.inputs) > 1 else None
    if sizes is not None:
        equal = sizes.const_value is not None and len(set(sizes.const_value.numpy().tolist())) == 1
    else:
        width = x.shape[-1] if x is not None and x.shape is not None else None
        equal = isinstance(width, int) and width % 2 == 0
    return equal and split.attributes.get_int("axis", 0) in (-1, 2)


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == op_type and not value.is_graph_output() else None
