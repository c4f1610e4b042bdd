"""The gate and up projections of a gated MLP → one MatMul and a Split. See merge.py. Found through SwiGLU and GeGLU."""

from __future__ import annotations

import onnx_ir as ir

from builder.fuse.graph import Decline, is_op
from builder.fuse.merge import Linear, as_linear, merge
from runtime.contract import DOMAIN


def gate_up_merge(model: ir.Model, decline: Decline) -> int:
    gates = [node for node in model.graph if is_op(node, "SwiGLU", DOMAIN) or is_op(node, "GeGLU", DOMAIN)]
    return sum(_merge(model.graph, gate, index, decline) for index, gate in enumerate(gates))


def _merge(graph: ir.Graph, gated: ir.Node, index: int, decline: Decline) -> bool:
    found = [_projection(value) for value in gated.inputs]
    linears = [linear for linear in found if linear is not None]
    if len(linears) < 2:
        if not all(value is not None and is_op(value.producer(), "Split") for value in gated.inputs):
            decline(f"{gated.outputs[0].name}: gate and up do not both come from a MatMul with a constant weight")
        return False
    return merge(graph, linears, "gate_up_proj", f"layers.{index}.mlp.gate_up_proj.weight", decline)


def _projection(value: ir.Value | None) -> Linear | None:
    node = value.producer() if value is not None else None
    if node is not None and is_op(node, "Add"):
        node = next((each.producer() for each in node.inputs if each is not None and each.producer() is not None), None)
    linear = as_linear(node) if node is not None else None
    return linear if linear is not None and linear.output is value else None
