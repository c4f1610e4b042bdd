"""Executable specification of the custom ops (see op.py), as ONNX functions of standard ops, opset 23.

Written for clarity and bounded memory, not speed: the queries of each sequence are padded to the longest, its keys gathered by
block. What lies in the pools beyond a sequence's length (free pages, even NaN) never reaches the result.

B sequences, T tokens, Q longest query, M blocks per sequence, L = M * block_size, G = Hq / Hkv query heads per KV head.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript import script
from onnxscript.values import Opset

from plugins.paged_attention.op import DOMAIN, DOMAIN_VERSION, MOE_EXPERTS, PAGED_ATTENTION

# mypy: ignore-errors
# The bodies below are ONNX, parsed by onnxscript and never run as Python.
_forgeline = Opset(DOMAIN, DOMAIN_VERSION)


@script(_forgeline, default_opset=op)
def _AttendPages(
    q,
    k,
    v,
    k_pool,
    v_pool,
    slot_mapping,
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    scale: float,
    sliding_window: int,
    softcap: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: int,
):
    axis0 = op.Constant(value_ints=[0])
    axis1 = op.Constant(value_ints=[1])
    rest = op.Constant(value_ints=[-1])
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    Hq = op.Reshape(op.Constant(value_int=num_heads), rest)
    Hkv = op.Reshape(op.Constant(value_int=num_kv_heads), rest)
    D = op.Reshape(op.Constant(value_int=head_dim), rest)
    T = op.Shape(q, start=0, end=1)
    lens = op.Cast(seq_lens, to=7)
    bounds = op.Cast(query_start_loc, to=7)
    starts = op.Slice(bounds, axis0, rest, axis0)
    ends = op.Slice(bounds, axis1, op.Shape(bounds), axis0)
    counts = ends - starts

    # 1. Write k and v at their slots.
    block_size = op.Shape(k_pool, start=1, end=2)
    slots = op.Unsqueeze(op.Cast(slot_mapping, to=7), axis1)
    cells = op.Concat(op.Div(slots, block_size), op.Mod(slots, block_size), axis=1)
    k_pool_out = op.ScatterND(k_pool, cells, op.CastLike(k, k_pool))
    v_pool_out = op.ScatterND(v_pool, cells, op.CastLike(v, v_pool))

    # 2. Each sequence's queries, padded: [B, Hkv, G, Q, D]. Padding repeats real tokens and is dropped in step 5.
    Q = op.ReduceMax(counts, axis0, keepdims=1)
    offsets = op.Unsqueeze(op.Range(zero, op.Squeeze(Q, axis0), one), axis0)
    tokens = op.Min(op.Unsqueeze(starts, axis1) + offsets, T - one)
    grouped = op.Concat(axis0, axis0, Hkv, rest, D, axis=0)
    queries = op.Reshape(op.Gather(op.Cast(q, to=1), tokens, axis=0), grouped)
    queries = op.Transpose(queries, perm=[0, 2, 3, 1, 4])
    positions = op.Unsqueeze(lens - counts, axis1) + offsets  # [B, Q]

    # 3. Its keys and values, gathered by block: [B, Hkv, 1, D, L] and [B, Hkv, 1, L, D]. Values past its length become 0, for a
    #    weight of 0 does not hide NaN; what such keys score is replaced in step 4.
    table = op.Cast(block_table, to=7)
    flat = op.Concat(axis0, rest, Hkv, D, axis=0)
    keys = op.Reshape(op.Gather(k_pool_out, table, axis=0), flat)
    values = op.Reshape(op.Gather(v_pool_out, table, axis=0), flat)
    past = op.Unsqueeze(op.Range(zero, op.Squeeze(op.Shape(keys, start=1, end=2), axis0), one), axis0)  # [1, L]
    live = op.Unsqueeze(past < op.Unsqueeze(lens, axis1), op.Constant(value_ints=[2, 3]))
    nothing = op.Constant(value_float=0.0)
    values = op.Where(live, op.Cast(values, to=1), nothing)
    keys = op.Unsqueeze(op.Transpose(op.Cast(keys, to=1), perm=[0, 2, 3, 1]), op.Constant(value_ints=[2]))
    values = op.Unsqueeze(op.Transpose(values, perm=[0, 2, 1, 3]), op.Constant(value_ints=[2]))

    # 4. Masked softmax with a sink column.
    scores = op.MatMul(queries, keys) * op.Constant(value_float=scale)  # [B, Hkv, G, Q, L]
    cap = op.Constant(value_float=softcap)
    capped = cap > nothing
    safe_cap = op.Where(capped, cap, op.Constant(value_float=1.0))
    scores = op.Where(capped, op.Tanh(scores / safe_cap) * safe_cap, scores)
    at = op.Unsqueeze(positions, op.Constant(value_ints=[2]))  # [B, Q, 1]
    window = op.Constant(value_int=sliding_window)
    hidden = op.Or(past > at, op.And(window > zero, past <= at - window))  # [B, Q, L]
    hidden = op.Unsqueeze(hidden, op.Constant(value_ints=[1, 2]))
    scores = op.Where(hidden, op.Constant(value_float=-1e30), scores)
    sink = op.Reshape(op.Cast(sinks, to=1), op.Concat(axis1, Hkv, rest, axis1, axis1, axis=0))
    column = op.Expand(sink, op.Concat(op.Shape(scores, start=0, end=-1), axis1, axis=0))
    weights = op.Softmax(op.Concat(scores, column, axis=-1), axis=-1)
    weights = op.Slice(weights, axis0, rest, op.Constant(value_ints=[4]))

    # 5. Back to packed rows: token t is row t - starts[sequence] of its sequence.
    padded = op.Reshape(op.Transpose(op.MatMul(weights, values), perm=[0, 3, 1, 2, 4]), op.Concat(rest, Hq, D, axis=0))
    t = op.Range(zero, op.Squeeze(T, axis0), one)
    begun = op.Cast(op.Unsqueeze(t, axis1) >= op.Unsqueeze(ends, axis0), to=7)
    sequence = op.ReduceSum(begun, axis1, keepdims=0)
    rows = sequence * Q + t - op.Gather(starts, sequence)
    out = op.CastLike(op.Gather(padded, rows, axis=0), q)
    return out, k_pool_out, v_pool_out


@script(_forgeline, default_opset=op)
def _WithSinks(
    q,
    k,
    v,
    k_pool,
    v_pool,
    slot_mapping,
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    scale: float,
    sliding_window: int,
    softcap: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: int,
):
    out, k_pool_out, v_pool_out = _AttendPages(
        q,
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
        block_table,
        query_start_loc,
        seq_lens,
        sinks,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer=layer,
    )
    return out, k_pool_out, v_pool_out


@script(_forgeline, default_opset=op)
def _WithoutSinks(
    q,
    k,
    v,
    k_pool,
    v_pool,
    slot_mapping,
    block_table,
    query_start_loc,
    seq_lens,
    scale: float,
    sliding_window: int,
    softcap: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: int,
):
    none = op.Expand(op.Constant(value_float=-1e30), op.Shape(q, start=1, end=2))
    out, k_pool_out, v_pool_out = _AttendPages(
        q,
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
        block_table,
        query_start_loc,
        seq_lens,
        none,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer=layer,
    )
    return out, k_pool_out, v_pool_out


@script(_forgeline, default_opset=op)
def _MoEExperts(hidden, top_k_index, top_k_weights, gate_up, down):
    # Every expert sees every token; the weight of those not chosen is zero. Memory stays at E * T * 2I.
    gated = op.MatMul(hidden, op.Transpose(gate_up, perm=[0, 2, 1]))  # [E, T, 2I]
    gate, up = op.Split(gated, num_outputs=2, axis=-1)
    outputs = op.MatMul(gate * op.Sigmoid(gate) * up, op.Transpose(down, perm=[0, 2, 1]))  # [E, T, C]
    shape = op.Concat(op.Shape(hidden, start=0, end=1), op.Shape(gate_up, start=0, end=1), axis=0)
    none = op.Expand(op.CastLike(op.Constant(value_float=0.0), top_k_weights), shape)
    weights = op.ScatterElements(none, top_k_index, top_k_weights, axis=1)  # [T, E]
    weighted = outputs * op.Unsqueeze(op.Transpose(weights, perm=[1, 0]), op.Constant(value_ints=[2]))
    return op.ReduceSum(weighted, op.Constant(value_ints=[0]), keepdims=0)


def _function(script_function, name: str) -> ir.Function:
    proto = script_function.to_function_proto()
    proto.name = name
    return ir.serde.deserialize_function(proto)


def paged_attention(*, with_sinks: bool) -> list[ir.Function]:
    """PagedAttention for nodes with or without sinks, and the function it calls."""
    outer = _WithSinks if with_sinks else _WithoutSinks
    return [_function(_AttendPages, _AttendPages.name), _function(outer, PAGED_ATTENTION)]


def moe_experts() -> ir.Function:
    return _function(_MoEExperts, MOE_EXPERTS)
