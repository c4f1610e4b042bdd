"""The custom ops of the canonical graph: names, inputs, attributes, and how to make a model run without them.

forgeline::PagedAttention   one packed ragged batch, prefill chunks and decodes mixed

    q [T, Hq, D]   k, v [T, Hkv, D]           after rotary embedding and q/k norm
    k_pool, v_pool [num_blocks, block_size, Hkv, D]
    slot_mapping [T], block_table [B, M], query_start_loc [B+1], seq_lens [B]   int32
    sinks [Hq]                                optional: logits of an attention sink per head
 →  out [T, Hq, D]   k_pool_out, v_pool_out   the pools with k and v written at their slots

forgeline::MoEExperts       the expert MLPs of a mixture-of-experts layer, SwiGLU

    hidden [T, C]   top_k_index [T, K] int64   top_k_weights [T, K]   gate_up [E, 2I, C]   down [E, C, I]
 →  out [T, C]

`attach_functions` adds their executable specification (spec.py) as model-local functions, so any ONNX runtime runs the file.
Importing this module needs the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "forgeline"
DOMAIN_VERSION = 1

PAGED_ATTENTION = "PagedAttention"
PAGED_ATTENTION_INPUTS = (
    "q",
    "k",
    "v",
    "k_pool",
    "v_pool",
    "slot_mapping",
    "block_table",
    "query_start_loc",
    "seq_lens",
    "sinks",
)
PAGED_ATTENTION_OUTPUTS = ("out", "k_pool_out", "v_pool_out")
PAGED_ATTENTION_ATTRIBUTES = {
    "scale": float,  # multiplies q·k
    "sliding_window": int,  # tokens seen back, the query itself included; 0 = all
    "softcap": float,  # scores become softcap * tanh(scores / softcap); 0 = off
    "num_heads": int,
    "num_kv_heads": int,
    "head_dim": int,
    "layer": int,  # index of the pools this node owns
}

MOE_EXPERTS = "MoEExperts"
MOE_EXPERTS_INPUTS = ("hidden", "top_k_index", "top_k_weights", "gate_up", "down")


def attach_functions(model: ir.Model) -> ir.Model:
    """Add the specification of every custom op that `model` uses; returns the same model.

    Raises  ValueError when some PagedAttention nodes have sinks and some have not: one function serves all nodes of a name.
    """
    from plugins.paged_attention import spec

    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    sinks = {len(node.inputs) == len(PAGED_ATTENTION_INPUTS) for node in nodes if node.op_type == PAGED_ATTENTION}
    if len(sinks) > 1:
        raise ValueError("some PagedAttention nodes have sinks and some have not; give every node sinks (-1e30 has no effect)")
    functions = []
    if sinks:
        functions += spec.paged_attention(with_sinks=sinks.pop())
    if any(node.op_type == MOE_EXPERTS for node in nodes):
        functions.append(spec.moe_experts())
    for function in functions:
        model.functions[function.identifier()] = function
        for domain, version in function.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
    return model
