"""Rows without logits end where the last layer's attention does: only rows at logits_indices go through what follows it.

    Gather(norm(x + mlp(x)), rows)  →  norm(y + mlp(y)) with y = Gather(x, rows)

The canonical graph picks the rows before the head. Here they are picked as soon as all that follows treats each row alike: behind
attention, so that of a prompt one row goes through the last layer's o_proj and MLP. Experts are no such work and take all rows.
"""

from __future__ import annotations

import onnx_ir as ir

from builder.fuse.functions import FUSED_OPS
from builder.targets.openvino_build import NodeBuilder, unshaped
from runtime import contract
from runtime.contract import DOMAIN

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Sigmoid", "Tanh", "Relu", "Gelu", "Swish")
_NORMS = ("RMSNormalization", "LayerNormalization")
_TOKENS = 1  # the axis, of [1, T, C]


def pick_rows_early(graph: ir.Graph) -> None:
    gather = next((node for node in graph if _picks_rows(node)), None)
    if gather is None:
        return
    normed, rows = gather.inputs
    assert normed is not None and rows is not None
    tokens = next(value.shape[0] for value in graph.inputs if value.name == contract.INPUT_IDS and value.shape is not None)
    moved: set[ir.Node] = set()
    for node in reversed(graph):
        uses = [use.node for output in node.outputs for use in output.uses()]
        if uses and all(use in moved or use is gather for use in uses) and _is_row_work(node, tokens):
            moved.add(node)
    if not moved:
        return
    (count,) = next(value.shape for value in graph.inputs if value.name == contract.LOGITS_INDICES and value.shape is not None)
    fewer = {output for node in moved for output in node.outputs}
    picked: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node in moved]:
        for index, value in enumerate(node.inputs):
            if value is None or value in fewer or not _by_token(value, tokens):
                continue
            if value not in picked:
                build = NodeBuilder(graph, anchor=node)
                indices = build.op("Reshape", [unshaped(rows), build.constant([-1])])
                picked[value] = build.op("Gather", [value, indices], {"axis": _TOKENS})
                picked[value].type, picked[value].shape = value.type, value.shape
            node.replace_input_with(index, picked[value])
    for output in (*fewer, *picked.values()):
        output.shape = ir.Shape([1, count, *output.shape[2:]]) if output.shape is not None else None
    ir.convenience.replace_all_uses_with(gather.outputs[0], normed)
    graph.remove(gather, safe=True)


def _picks_rows(node: ir.Node) -> bool:
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != _TOKENS or node.inputs[1] is None:
        return False
    return unshaped(node.inputs[1]).name == contract.LOGITS_INDICES


def _is_row_work(node: ir.Node, tokens: ir.SymbolicDim | int) -> bool:
    """Does each row of each output, [1, T, C], depend on the same row of the inputs alone?"""
    by_token = [_by_token(value, tokens) for value in node.inputs]
    if not all(_by_token(value, tokens) for value in node.outputs if value.uses()):
        return False
    if not any(by_token) or not all(one or _is_static(value) for one, value in zip(by_token, node.inputs, strict=True)):
        return False
    if node.domain == DOMAIN:
        return node.op_type in FUSED_OPS
    if node.op_type == "MatMul":
        return by_token == [True, False]
    if node.op_type in (*_NORMS, "Split"):
        axis = node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1)
        return by_token.index(True) == 0 and sum(by_token) == 1 and axis in (-1, 2)
    return node.op_type in _ELEMENTWISE


def _by_token(value: ir.Value | None, tokens: ir.SymbolicDim | int) -> bool:
    if value is None or value.shape is None or len(value.shape) != 3:
        return False
    return value.shape[0] == 1 and value.shape[_TOKENS] == tokens and isinstance(value.shape[2], int)


def _is_static(value: ir.Value | None) -> bool:
    return value is None or (value.shape is not None and value.shape.is_static())
