"""The q, k and v projections of one attention layer → one MatMul and a Split. See merge.py.

The three are found from PagedAttention backwards, so other layers that read the same input (the MLP of a parallel block, as in
GPT-J and Cohere) stay apart. Projections that are one multiplication in the checkpoint (GPT-2, GPT-NeoX, Phi-3) are left alone.
"""

from __future__ import annotations

import onnx_ir as ir

from builder.fuse.graph import Decline, is_constant, is_op
from builder.fuse.merge import Linear, as_linear, merge
from runtime.contract import ATTENTION_OP, DOMAIN

_LAYOUT = ("Reshape", "Transpose", "Gather", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat")
_ON_HEADS = ("RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Sub")


def qkv_merge(model: ir.Model, decline: Decline) -> int:
    attentions = [node for node in model.graph if is_op(node, ATTENTION_OP, DOMAIN)]
    return sum(_merge(model.graph, attention, decline) for attention in attentions)


def _merge(graph: ir.Graph, attention: ir.Node, decline: Decline) -> bool:
    layer = attention.attributes.get_int("layer", 0)
    found = [projection(value) for value in attention.inputs[:3]]
    linears = [linear for linear in found if linear is not None]
    if len(linears) < 3:
        decline(f"layer {layer}: {'qkv'[found.index(None)]} does not come from a MatMul with a constant weight")
        return False
    if linears[0].matmul is linears[1].matmul is linears[2].matmul:
        return False  # one multiplication in the checkpoint
    return merge(graph, linears, "qkv_proj", f"layers.{layer}.self_attn.qkv_proj.weight", decline)


def projection(value: ir.Value | None) -> Linear | None:
    """The linear layer that q, k or v comes from, upstream of rotary embedding, head norm, scaling and layout."""
    while value is not None and (node := value.producer()) is not None:
        if is_op(node, "MatMul"):
            return as_linear(node)
        if node.op_type in (*_LAYOUT, *_ON_HEADS):  # of x - mean(x) in a head norm, too, x comes first
            value = node.inputs[0]
        elif node.op_type in ("Add", "Mul", "Div") and sum(is_constant(each) for each in node.inputs) == 1:
            value = next(each for each in node.inputs if not is_constant(each))
        else:
            return None
    return None
