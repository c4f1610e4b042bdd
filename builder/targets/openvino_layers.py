"""Whole decoder layers → forgeline::DecoderLayers, for plugins/decoder_layers: as many as follow each other in one node.

    x' = x + output(attention(rotary(qkv(norm(x)))))     on matrices that openvino_matmul.py has taken: q, k and v in one, and
    x  = x' + down(silu(gate(norm(x'))) * up(norm(x')))   gate and up; the bias of q, k and v may follow their matrix

In the last layer the rows that have logits may be picked behind its attention (openvino_logits.py). A layer that is anything else
(experts, norms of heads, norms behind its parts, attention of another kind) stays as it is, and ends the node before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from builder.targets.openvino_build import RESHAPES, NodeBuilder, replace, unshaped
from builder.targets.openvino_matmul import epsilon_of
from builder.targets.openvino_rotary import plain_turns, source, whole_of
from plugins.decoder_layers.openvino import LAYER_VALUES, LAYERS_OP, MATRIX_VALUES
from plugins.paged_attention.op import DOMAIN, PAGED_ATTENTION
from plugins.quantized_matmul.openvino import LOWERED_OP as QUANTIZED_OP


@dataclass(frozen=True)
class _Layer:
    x: ir.Value
    angles: tuple[ir.Value, ir.Value]  # cos, sin
    attention: ir.Node
    matrices: tuple[ir.Node, ir.Node, ir.Node, ir.Node]  # q, k and v; output; gate and up; down
    bias: ir.Value | None
    head_norms: tuple[ir.Node, ...]  # of q and of k, or none
    rows: ir.Value | None  # picked behind attention

    @property
    def out(self) -> ir.Value:
        return self.matrices[-1].outputs[0]


def lower_layers(graph: ir.Graph, sequences: Callable[[], Sequence[ir.Value]]) -> int:
    """In place; how many layers. `sequences`: of the step, as the lowered attention takes them."""
    layers = [layer for node in graph if _is(node, PAGED_ATTENTION) if (layer := _layer(node)) is not None]
    chains: list[list[_Layer]] = []
    for layer in layers:
        before = chains[-1][-1] if chains else None
        if before is not None and _follows(layer, before):
            chains[-1].append(layer)
        else:
            chains.append([layer])
    for chain in reversed(chains):  # a result that is replaced is replaced in the node behind it too
        _replace(graph, chain, sequences())
    return len(layers)


def _replace(graph: ir.Graph, chain: Sequence[_Layer], sequences: Sequence[ir.Value]) -> None:
    first, last = chain[0], chain[-1]
    inputs = [first.x, *first.angles, *sequences]
    matrices: list[int] = []
    epsilons: list[float] = []
    head_epsilons: list[float] = []
    layers: list[int] = []
    scales: list[float] = []
    for layer in chain:
        for node in layer.matrices:
            matrices += [node.attributes.get_int(name, 0) for name in MATRIX_VALUES]
            epsilons.append(node.attributes.get_float("epsilon", 0.0))
            inputs += node.inputs[1 : len(node.inputs) - node.attributes.get_int("added", 0)]  # type: ignore[arg-type]
        inputs += [layer.bias] if layer.bias is not None else []
        inputs += [norm.inputs[1] for norm in layer.head_norms]  # type: ignore[misc]
        head_epsilons.append(epsilon_of(layer.head_norms[0]) if layer.head_norms else 0.0)
        inputs += layer.attention.inputs[3:5]  # type: ignore[arg-type]
        values = {name: layer.attention.attributes.get_int(name, 0) for name in LAYER_VALUES}
        layers += {**values, "biased": int(layer.bias is not None), "heads_normed": int(bool(layer.head_norms))}.values()
        scales.append(layer.attention.attributes.get_float("scale", 0.0))
    if last.rows is not None:
        build = NodeBuilder(graph, anchor=last.matrices[-1])
        rows = build.op("Reshape", [last.rows, build.constant([-1])])
        inputs.append(build.op("Cast", [rows], {"to": int(ir.DataType.INT32)}))
    attributes = {
        "matrices": matrices, "epsilons": epsilons, "head_epsilons": head_epsilons, "layers": layers, "scales": scales
    }  # fmt: skip
    node = last.matrices[-1]
    name = node.name
    new = NodeBuilder(graph, anchor=node).op(LAYERS_OP, inputs, attributes, domain=DOMAIN)
    new.name = last.out.name
    replace(node, new)
    producer = new.producer()
    assert producer is not None
    producer.name = name


def _layer(attention: ir.Node) -> _Layer | None:
    found = _projection(attention)
    if found is None:
        return None
    projected, angles, head_norms = found
    bias, qkv = _before_bias(projected)
    if qkv is None or not _has(qkv, normed=1, gated=0, added=0):
        return None
    x = qkv.inputs[0]
    attended, rows = _picked(attention.outputs[0])
    output = _only_reader(attended)
    if output is None or not _has(output, normed=0, gated=0, added=1) or output.inputs[0] is not attended or x is None:
        return None
    residual, residual_rows = _before_pick(output.inputs[-1])
    if residual is not x or (rows is None) != (residual_rows is None) or (rows is not None and rows is not residual_rows):
        return None
    middle = output.outputs[0]
    gate_up = next((use.node for use in middle.uses() if _has(use.node, normed=1, gated=1, added=0)), None)
    down = _only_reader(gate_up.outputs[0]) if gate_up is not None else None
    if gate_up is None or down is None or not _has(down, normed=0, gated=0, added=1):
        return None
    readers = {use.node for use in middle.uses()}
    if readers != {gate_up, down} or gate_up.inputs[0] is not middle or down.inputs[-1] is not middle:
        return None
    if middle.is_graph_output() or down.outputs[0].is_graph_output():
        return None
    return _Layer(x, angles, attention, (qkv, output, gate_up, down), bias, head_norms, rows)


def _projection(attention: ir.Node) -> tuple[ir.Value, tuple[ir.Value, ir.Value], tuple[ir.Node, ...]] | None:
    """q, k and v in one value, cos and sin, and the norms of heads that q and k go through before they turn."""
    (q, q_turn), (k, k_turn), (v, v_turn) = (source(value) for value in attention.inputs[:3])
    if not plain_turns(q_turn, k_turn) or v_turn is not None:
        return None
    norms = tuple(norm for value in (q, k) if (norm := _head_norm(value, attention)) is not None)
    if norms:
        if len(norms) != 2 or epsilon_of(norms[0]) != epsilon_of(norms[1]):
            return None
        q, k = (unshaped(norm.inputs[0]) for norm in norms)  # type: ignore[arg-type]
    qkv = whole_of(q, k, v)
    if qkv is None or {use.node for use in qkv.uses()} != {part.producer() for part in (q, k, v)}:
        return None
    assert q_turn is not None
    cos, sin = q_turn.inputs[1:]
    assert cos is not None and sin is not None
    return qkv, (cos, sin), norms


def _head_norm(value: ir.Value, attention: ir.Node) -> ir.Node | None:
    norm = value.producer()
    weight = norm.inputs[1] if norm is not None and norm.op_type == "RMSNormalization" else None
    if norm is None or weight is None or weight.const_value is None or weight.const_value.dtype != ir.DataType.FLOAT:
        return None
    dim = attention.attributes.get_int("head_dim", 0)
    last = norm.attributes.get_int("axis", -1) in (-1, 3) and norm.attributes.get_int("stash_type", 1) == 1
    return norm if last and weight.const_value.shape.numpy() == (dim,) else None


def _follows(layer: _Layer, before: _Layer) -> bool:
    """Does `layer` read what `before` computes, and nothing else does?"""
    out = before.out
    readers = {use.node for use in out.uses()}
    own = {layer.matrices[0], layer.matrices[1]}
    if layer.rows is not None:
        own = {layer.matrices[0], *(node for node in readers if node.outputs[0] is layer.matrices[1].inputs[-1])}
    return layer.x is out and readers == own and before.rows is None and layer.angles == before.angles


def _before_bias(value: ir.Value) -> tuple[ir.Value | None, ir.Node | None]:
    node = value.producer()
    if node is None or node.op_type != "Add":
        return None, node
    constants = [each for each in node.inputs if each is not None and each.is_initializer()]
    others = [each for each in node.inputs if each is not None and not each.is_initializer()]
    width = value.shape[-1] if value.shape is not None else None
    if len(constants) != 1 or len(others) != 1 or len(list(others[0].uses())) != 1:
        return None, None
    (bias,) = constants
    whole = bias.shape is not None and tuple(bias.shape) == (width,) and bias.dtype == ir.DataType.FLOAT
    return (bias, others[0].producer()) if whole else (None, None)


def _picked(value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """What is read of attention's result, and the rows it was picked by."""
    while True:
        node = _only_reader(value)
        if node is not None and node.op_type in RESHAPES:
            value = node.outputs[0]
        elif node is not None and node.op_type == "Gather" and _by_token(node):
            return node.outputs[0], unshaped(node.inputs[1])  # type: ignore[arg-type]
        else:
            return value, None


def _before_pick(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Gather" or not _by_token(node) or _only_reader(node.outputs[0]) is None:
        return value, None
    return node.inputs[0], unshaped(node.inputs[1])  # type: ignore[arg-type]


def _by_token(gather: ir.Node) -> bool:
    shape = gather.inputs[0].shape if gather.inputs[0] is not None else None
    return gather.attributes.get_int("axis", 0) == 1 and shape is not None and len(shape) == 3


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.domain == DOMAIN and node.op_type == op_type


def _has(node: ir.Node, **flags: int) -> bool:
    return _is(node, QUANTIZED_OP) and all(node.attributes.get_int(name, 0) == value for name, value in flags.items())
