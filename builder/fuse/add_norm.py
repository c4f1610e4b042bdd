"""Residual add and the norm that reads the sum → one op with both results. Shared by add_rms_norm and add_layer_norm.

    total = x + residual;  normed = norm(total)      →  normed, total = forgeline::Add…Norm(x, residual, weight…)

The sum goes on as the next residual, so it stays an output.
"""

from __future__ import annotations

import onnx_ir as ir

from builder.fuse.graph import Decline, is_constant, is_op, replace_value, same_shape, typed_like
from runtime.contract import DOMAIN


def fuse_add_norm(model: ir.Model, norm_op: str, fused_op: str, decline: Decline) -> int:
    return sum(_rewrite(model.graph, norm, fused_op, decline) for norm in list(model.graph) if is_op(norm, norm_op))


def _rewrite(graph: ir.Graph, norm: ir.Node, fused_op: str, decline: Decline) -> bool:
    total = norm.inputs[0]
    assert total is not None
    add = total.producer()
    if add is None or not is_op(add, "Add"):
        return False
    x, residual = add.inputs
    if is_constant(x) or is_constant(residual):
        decline(f"{total.name} adds a constant, not a residual")
        return False
    if not same_shape(x, residual):
        assert x is not None and residual is not None
        decline(f"{total.name} adds {x.shape} and {residual.shape}")
        return False
    if norm.attributes.get_int("axis", -1) not in (-1, len(total.shape or ()) - 1):
        decline(f"{norm.op_type} of {total.name} is over more than the last axis")
        return False
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        decline(f"{norm.op_type} of {total.name} also returns its statistics")
        return False
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    fused = ir.node(fused_op, [x, residual, *norm.inputs[1:]], attributes={"epsilon": epsilon}, domain=DOMAIN, num_outputs=2)
    typed_like(fused.outputs[0], total)
    graph.insert_before(add, fused)  # weights are initializers, so the earliest place will do
    replace_value(total, fused.outputs[1])
    replace_value(norm.outputs[0], fused.outputs[0])
    graph.remove([norm, add], safe=True)
    return True
