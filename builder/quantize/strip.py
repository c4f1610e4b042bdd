"""Takes rounding out of a quantized canonical graph again, to tell what part of a loss comes from where."""

from __future__ import annotations

import onnx_ir as ir

from builder.quantize import ops
from plugins.paged_attention.op import PAGED_ATTENTION
from runtime.contract import DOMAIN


def strip(model: ir.Model, *, activations: bool = False, kv_cache: bool = False) -> int:
    """In place; returns how many quantizers went. Weights keep theirs."""
    gone = 0
    for node in list(model.graph):
        last = _quantizer(node)
        if last is None:
            continue
        cached = any(use.node.op_type == PAGED_ATTENTION for use in last.outputs[0].uses())
        if kv_cache if cached else activations:
            assert node.inputs[0] is not None
            ir.convenience.replace_all_uses_with(last.outputs[0], node.inputs[0])
            model.graph.remove([last] if last is node else [last, node], safe=True)
            gone += 1
    return gone


def _quantizer(node: ir.Node) -> ir.Node | None:
    """The last node of the quantizer that begins with `node`; None when none does."""
    if node.domain == DOMAIN and node.op_type in (*ops.DYNAMIC.values(), *ops.STORES):
        return node
    if node.domain == "" and node.op_type == "QuantizeLinear":
        return next(use.node for use in node.outputs[0].uses())
    return None
