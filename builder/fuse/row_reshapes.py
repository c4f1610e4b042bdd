"""Reshapes between [1, T, C] and [T, C] around work on rows of C: moved down past the work, where they cancel.

    Reshape [T, C] · MatMul · Add · Reshape [1, T, N]    →  MatMul · Add     (GPT-2's Conv1D)

GPT-2 and OPT flatten the token axis for their linear layers; without this, residual adds, norms and activations would be hidden
from the fusions behind reshapes. A Reshape with a reader that needs [T, C] (expert MLPs) stays.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder.fuse.graph import Decline, add_initializer, is_constant, is_op, new_node, replace_value, static_shape

_ELEMENTWISE = ("Relu", "Gelu", "Sigmoid", "Tanh", "Neg", "Add", "Sub", "Mul", "Div", "Pow")
_NORMS = ("LayerNormalization", "RMSNormalization")


def row_reshapes(model: ir.Model, decline: Decline) -> int:
    """Returns how many Reshape nodes the graph has lost."""
    graph = model.graph
    before = sum(is_op(node, "Reshape") for node in graph)
    for node in list(graph):
        if is_op(node, "Reshape"):
            _cancel(graph, node)
        elif _is_row_work(node) and all(_may_move(value) for value in node.inputs if not is_constant(value)):
            _move(graph, node)
    for node in reversed(list(graph)):
        if is_op(node, "Reshape") and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    return before - sum(is_op(node, "Reshape") for node in graph)


def _flattened(value: ir.Value | None) -> ir.Value | None:
    """x of rank 3, when `value` is x of [1, T, C] reshaped to [T, C]."""
    node = value.producer() if value is not None else None
    if node is None or not is_op(node, "Reshape"):
        return None
    before, after = static_shape(node.inputs[0]), static_shape(value)
    if before is None or after is None or len(before) != 3 or len(after) != 2:
        return None
    return node.inputs[0] if before[0] == 1 and before[2] is not None and before[2] == after[1] else None


def _is_row_work(node: ir.Node) -> bool:
    """Does `node` treat each row alike, whatever the leading dimensions?"""
    if is_op(node, "MatMul"):
        return not is_constant(node.inputs[0]) and is_constant(node.inputs[1]) and len(static_shape(node.inputs[1]) or ()) == 2
    if node.domain == "" and node.op_type in _NORMS:
        return len(node.outputs) == 1 and node.attributes.get_int("axis", -1) in (-1, 1)
    if node.domain == "" and node.op_type in _ELEMENTWISE:
        return all(not is_constant(value) or len(static_shape(value) or ()) <= 1 for value in node.inputs)
    return False


def _may_move(value: ir.Value | None) -> bool:
    if value is None or _flattened(value) is None or value.is_graph_output():
        return False
    return all(_is_row_work(use.node) or is_op(use.node, "Reshape") for use in value.uses())


def _move(graph: ir.Graph, node: ir.Node) -> None:
    """work(Reshape(x)) → Reshape(work(x))."""
    inputs = [value if is_constant(value) else _flattened(value) for value in node.inputs]
    x = next(value for value in inputs if value is not None and not is_constant(value))
    output = node.outputs[0]
    width = (static_shape(output) or (None,))[-1]
    if width is None or x.shape is None:
        return
    attributes = dict(node.attributes)
    if "axis" in attributes:
        attributes["axis"] = ir.AttrInt64("axis", -1)
    work = ir.Node("", node.op_type, inputs, attributes.values())
    work.outputs[0].type, work.outputs[0].shape = output.type, ir.Shape([*x.shape[:-1], width])
    shape = add_initializer(graph, f"rows_of_{width}", np.array([-1, width], np.int64))
    reshape = new_node("Reshape", [work.outputs[0], shape], like=output)
    graph.insert_before(node, [work, reshape])
    replace_value(output, reshape.outputs[0])
    graph.remove(node, safe=True)


def _cancel(graph: ir.Graph, node: ir.Node) -> None:
    """Reshape [1, T, C] of a value flattened from [1, T, C] is that value."""
    output = node.outputs[0]
    x = _flattened(node.inputs[0])
    after = static_shape(output)
    if x is None or after is None or len(after) != 3 or output.is_graph_output():
        return
    if after[0] == 1 and after[2] == (static_shape(x) or (None,))[-1]:
        ir.convenience.replace_all_uses_with(output, x)
        graph.remove(node, safe=True)
