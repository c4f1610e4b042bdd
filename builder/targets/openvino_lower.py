"""Canonical graph → what OpenVINO reads: still ONNX, still the canonical inputs. Attention changes, and little else.

    paged        PagedAttention → OpenVINOPagedAttention on [T, heads * D]; its metadata is computed in the graph, once.
                 slot_mapping goes (the op derives slots from the block list) and so do the pool outputs (it writes in place)
    decomposed   PagedAttention → its executable specification, for attention that OpenVINO's op lacks (soft cap, sinks);
                 the pools stay ordinary inputs and outputs

Everywhere: forgeline's fused ops are expanded, for OpenVINO to fuse in its own way; experts become matrices of two axes; rotary
embedding turns tokens as they lie (openvino_rotary.py); the last layer runs on the rows that have logits, behind its attention
(openvino_logits.py); next_token goes, since OpenVINO's argmax is a TopK (2.7 ms for 16 rows of 49,152)
and the executor's takes 0.1.

    past_lens             seq_lens - diff(query_start_loc)
    block_indices         block_table, flat: rows padded with 0 are fine, since
    block_indices_begins  row b begins at b * M
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx_ir as ir
from onnx_ir.passes import common as passes

from builder.fuse import inline_forgeline_ops
from builder.targets.openvino_build import NodeBuilder, shorten_reshapes
from builder.targets.openvino_experts import lower_experts
from builder.targets.openvino_layers import lower_layers
from builder.targets.openvino_logits import pick_rows_early
from builder.targets.openvino_matmul import lower_matmuls
from builder.targets.openvino_rotary import lower_rotary, merge_rotary
from plugins.paged_attention.op import DOMAIN, MOE_EXPERTS, PAGED_ATTENTION, PAGED_ATTENTION_INPUTS
from plugins.paged_attention.openvino import LOWERED_OP, METADATA
from runtime import contract

PAGED = "paged"
DECOMPOSED = "decomposed"
_POOL_OUTPUTS = ("k_pool_out.", "v_pool_out.")
_CARRIED = ("scale", "sliding_window", "num_kv_heads", "head_dim")


def attention_mode(model: ir.Model) -> str:
    """DECOMPOSED when a layer needs what OpenVINO's op lacks."""
    return DECOMPOSED if any(unsupported_attention(node) for node in _attention_nodes(model)) else PAGED


def unsupported_attention(node: ir.Node) -> str:
    """What OpenVINO's op lacks of this PagedAttention node; empty when nothing."""
    if node.attributes.get_float("softcap", 0.0):
        return "a soft cap on attention scores"
    if len(node.inputs) == len(PAGED_ATTENTION_INPUTS):
        return "attention sinks"
    return ""


@dataclass(frozen=True)
class Lowered:
    mode: str  # PAGED or DECOMPOSED
    rotary: int  # rotary embeddings in the graph, in whatever form
    own: int  # matrices on our own kernels


def lower(model: ir.Model, *, input_group: int = 0, own_attention: bool = False) -> Lowered:
    """In place. `input_group`: of inputs under one scale in layers that our own kernels run; 0: OpenVINO's run all.
    `own_attention`: our kernels run attention too, and so whole layers."""
    mode = attention_mode(model)
    pick_rows_early(model.graph)
    inline_forgeline_ops(model)
    for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type == MOE_EXPERTS]:
        lower_experts(node)
    own = lower_matmuls(model, input_group) if input_group else 0
    sequences = lru_cache(maxsize=1)(lambda: _sequences(model.graph))
    if mode == PAGED:
        _keep_outputs(model.graph, lambda name: not name.startswith(_POOL_OUTPUTS))
        if own_attention and own:
            lower_layers(model.graph, sequences)
            passes.RemoveUnusedNodesPass()(model)
    merge_rotary(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    rotary = sum(node.op_type == "RotaryEmbedding" for node in model.graph)
    lower_rotary(model.graph)
    if mode == PAGED:
        _lower_attention(model, sequences)
    shorten_reshapes(model.graph)
    _keep_outputs(model.graph, lambda name: name != contract.NEXT_TOKEN)
    passes.InlinePass()(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedFunctionsPass()(model)
    _name_nodes(model.graph)
    return Lowered(mode, rotary, own)


def _attention_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == PAGED_ATTENTION and node.domain == DOMAIN]


def _lower_attention(model: ir.Model, sequences: Callable[[], Sequence[ir.Value]]) -> None:
    graph = model.graph
    nodes = _attention_nodes(model)
    metadata = [*sequences(), _longest(graph)] if nodes else []
    for node in nodes:
        heads, kv_heads, dim = (node.attributes.get_int(name, 0) for name in ("num_heads", "num_kv_heads", "head_dim"))
        build = NodeBuilder(graph, anchor=node)
        widths = (heads * dim, kv_heads * dim, kv_heads * dim)
        flat = [build.op("Reshape", [x, build.constant([-1, w])]) for x, w in zip(node.inputs[:3], widths, strict=True)]
        carried = {name: node.attributes[name].value for name in _CARRIED}
        attention = build.op(LOWERED_OP, [*flat, *node.inputs[3:5], *metadata], carried, domain=DOMAIN)
        out = node.outputs[0]
        result = build.op("Reshape", [attention, build.constant([-1, heads, dim])])
        result.type, result.shape = out.type, out.shape
        ir.convenience.replace_all_uses_with(out, result)
    graph.remove(nodes, safe=True)
    kept_inputs = [value for value in graph.inputs if value.name != contract.SLOT_MAPPING]
    graph.inputs.clear()
    graph.inputs.extend(kept_inputs)


def _keep_outputs(graph: ir.Graph, keep: Callable[[str], bool]) -> None:
    kept = [value for value in graph.outputs if value.name is not None and keep(value.name)]
    graph.outputs.clear()
    graph.outputs.extend(kept)


def _sequences(graph: ir.Graph) -> list[ir.Value]:
    """The METADATA inputs of the lowered op but the last, all int32, from the canonical inputs."""
    build = NodeBuilder(graph)
    inputs = {value.name: value for value in graph.inputs}
    starts, lens, table = (inputs[name] for name in (contract.QUERY_START_LOC, contract.SEQ_LENS, contract.BLOCK_TABLE))
    ends = build.op("Slice", [starts, build.constant([1]), build.constant([2**31 - 1])])
    begins = build.op("Slice", [starts, build.constant([0]), build.constant([-1])])
    rows = build.op("Squeeze", [build.op("Shape", [starts])])
    row_numbers = build.op("Range", [build.constant(0), rows, build.constant(1)])
    width = build.op("Shape", [table], {"start": 1, "end": 2})
    to_int32 = {"to": int(ir.DataType.INT32)}
    return [
        build.op("Sub", [lens, build.op("Sub", [ends, begins])], name=METADATA[0]),
        starts,
        build.op("Reshape", [table, build.constant([-1])], name=METADATA[2]),
        build.op("Cast", [build.op("Mul", [row_numbers, width])], to_int32, name=METADATA[3]),
    ]


def _longest(graph: ir.Graph) -> ir.Value:
    """The last of METADATA, which whole layers do not read."""
    lens = next(value for value in graph.inputs if value.name == contract.SEQ_LENS)
    return NodeBuilder(graph).op("ReduceMax", [lens], {"keepdims": 0}, name=METADATA[4])


def _name_nodes(graph: ir.Graph) -> None:
    """Every node is called as its first output: OpenVINO reports layers by node name, and the check looks them up."""
    for node in graph:
        node.name = node.outputs[0].name
