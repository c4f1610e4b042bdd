"""Rotary embedding of tokens as they lie, [T, heads, D]: OpenVINO's kernel turns single rows, so nothing need be transposed.

    merged    q, k and v of one projection → one embedding of all their heads, before the projection is split; v's angles are 0
    rows      Transpose · RotaryEmbedding · Transpose → RotaryEmbedding of [T, heads, 1, D]: each token is a batch of its own
    parts     of a head, by halves → products and sums, the form that OpenVINO fuses

Others (interleaved pairs, heads without a Transpose on both sides) stay as they are. No number changes in any of them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder.targets.openvino_build import NodeBuilder, replace, unshaped
from plugins.paged_attention.op import DOMAIN, PAGED_ATTENTION

_END = 2**31 - 1  # of a Slice: to the end
_SWAP = (0, 2, 1, 3)  # of heads and tokens


def merge_rotary(graph: ir.Graph) -> None:
    """One embedding instead of two where q, k and v are one projection and have no norm of their own."""
    angles: dict[tuple[ir.Value, int, int], ir.Value] = {}
    for node in [node for node in graph if node.op_type == PAGED_ATTENTION and node.domain == DOMAIN]:
        found = _projection(node)
        if found is None:
            continue
        qkv, *tables = found
        heads, kv_heads, dim = (node.attributes.get_int(name, 0) for name in ("num_heads", "num_kv_heads", "head_dim"))
        build = NodeBuilder(graph, anchor=node)
        for table, still in zip(tables, (1.0, 0.0), strict=True):
            if (key := (table, heads, kv_heads)) not in angles:
                angles[key] = _angles_by_head(build, table, heads + kv_heads, kv_heads, still)
        cos, sin = (angles[table, heads, kv_heads] for table in tables)
        turned = build.op("RotaryEmbedding", [build.op("Reshape", [qkv, build.constant([1, 1, -1, dim])]), cos, sin])
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        flat = build.op("Reshape", [turned, build.constant([-1, sum(widths)])])
        parts = build.ops("Split", [flat, build.constant(widths)], {"axis": -1}, num_outputs=3)
        for index, (part, count) in enumerate(zip(parts, (heads, kv_heads, kv_heads), strict=True)):
            node.replace_input_with(index, build.op("Reshape", [part, build.constant([-1, count, dim])]))


def lower_rotary(graph: ir.Graph) -> None:
    """The embeddings that are left: on rows, or written out where they turn a part of each head."""
    tables: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in [node for node in graph if node.op_type == "RotaryEmbedding" and not node.attributes.get_int("interleaved", 0)]:
        rows = _rows(node)
        if node.attributes.get_int("rotary_embedding_dim", 0):
            written = _write_out(node, rows, tables)
        elif rows is not None:
            written = _on_rows(node, rows, tables)
        else:
            continue
        for reader in [use.node for use in node.outputs[0].uses()] if rows is not None else [node]:
            replace(reader, written)


def whole_of(*parts: ir.Value) -> ir.Value | None:
    """What these are the parts of, in this order and without a gap, along its last axis."""
    first = parts[0].producer()
    if first is None or first.inputs[0] is None:
        return None
    whole = first.inputs[0]
    if first.op_type == "Split":
        return whole if list(parts) == list(first.outputs) else None
    end = 0
    for part in parts:
        span = _slice_of(part, whole)
        if span is None or span[0] != end:
            return None
        end = span[1]
    return whole if end == _width(whole) else None


def _slice_of(part: ir.Value, whole: ir.Value) -> tuple[int, int] | None:
    """From where to where on the last axis `part` is cut out of `whole`, [1, T, C]."""
    node = part.producer()
    if node is None or node.op_type != "Slice" or node.inputs[0] is not whole or whole.shape is None:
        return None
    numbers = [
        value.const_value.numpy().tolist() if value and value.const_value is not None else None for value in node.inputs[1:]
    ]
    starts, ends, axes, steps = (*numbers, [1])[:4] if len(numbers) in (3, 4) else (None,) * 4
    rank, width = len(whole.shape), whole.shape[-1]
    if starts is None or ends is None or steps != [1] or axes not in ([-1], [rank - 1]) or not isinstance(width, int):
        return None
    return starts[0], min(ends[0], width)


def plain_turns(q_turn: ir.Node | None, k_turn: ir.Node | None) -> bool:
    """Are q and k turned alike, by halves of whole heads?"""
    if q_turn is None or k_turn is None or q_turn.inputs[1:] != k_turn.inputs[1:]:
        return False
    others = ("interleaved", "rotary_embedding_dim")
    return not any(node.attributes.get_int(name, 0) for node in (q_turn, k_turn) for name in others)


def source(value: ir.Value | None) -> tuple[ir.Value, ir.Node | None]:
    """Where q, k or v comes from, behind changes of layout, and the embedding on the way there."""
    assert value is not None
    value = unshaped(value)
    node = value.producer()
    turn = node.inputs[0].producer() if node is not None and _swaps(node) and node.inputs[0] is not None else None
    if turn is None or turn.op_type != "RotaryEmbedding" or (rows := _rows(turn)) is None:
        return value, None
    return unshaped(rows), turn


def _projection(attention: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(q, k and v in one value, cos, sin)"""
    (q, q_turn), (k, k_turn), (v, v_turn) = (source(value) for value in attention.inputs[:3])
    qkv = whole_of(q, k, v)
    if qkv is None or not plain_turns(q_turn, k_turn) or v_turn is not None:
        return None
    assert q_turn is not None
    cos, sin = q_turn.inputs[1:]
    assert cos is not None and sin is not None
    return qkv, cos, sin


def _angles_by_head(build: NodeBuilder, table: ir.Value, turning: int, resting: int, rest: float) -> ir.Value:
    """cos or sin [1, T, D/2] → [1, T * heads, D/2], where it is `rest` for the last heads of each token."""
    mask = np.array([1.0] * turning + [0.0] * resting, np.float32)[:, None]
    by_head = build.op("Mul", [build.op("Unsqueeze", [table, build.constant([2])]), build.array("rotary_mask", mask)])
    if rest:
        by_head = build.op("Add", [by_head, build.array("rotary_rest", (1 - mask) * np.float32(rest))])
    return build.op("Reshape", [by_head, build.constant([1, -1, _width(table)])])


def _on_rows(node: ir.Node, rows: ir.Value, tables: dict[tuple[ir.Value, int], ir.Value]) -> ir.Value:
    build = NodeBuilder(node.graph, anchor=node)  # type: ignore[arg-type]
    heads, dim = (int(size) for size in rows.shape[-2:])  # type: ignore[index, arg-type]
    angles = []
    for table in node.inputs[1:]:
        assert table is not None
        if (table, 0) not in tables:
            tables[table, 0] = build.op("Reshape", [table, build.constant([-1, 1, _width(table)])])
        angles.append(tables[table, 0])
    turned = build.op("RotaryEmbedding", [build.op("Reshape", [rows, build.constant([-1, heads, 1, dim])]), *angles])
    return build.op("Reshape", [turned, build.constant([1, -1, heads, dim])])


def _write_out(node: ir.Node, rows: ir.Value | None, tables: dict[tuple[ir.Value, int], ir.Value]) -> ir.Value:
    """Of the first part of each head, [1, T, heads, D], or [1, heads, T, D] where there are no rows."""
    build = NodeBuilder(node.graph, anchor=node)  # type: ignore[arg-type]
    part = node.attributes.get_int("rotary_embedding_dim", 0)
    x, axis_of_heads = (node.inputs[0], 1) if rows is None else (rows, 2)
    angles = []
    for half in node.inputs[1:]:
        assert half is not None
        if (half, axis_of_heads) not in tables:
            whole = build.op("Concat", [half, half], {"axis": -1})
            tables[half, axis_of_heads] = build.op("Unsqueeze", [whole, build.constant([axis_of_heads])])
        angles.append(tables[half, axis_of_heads])
    first, rest = (build.op("Slice", [x, *_span(build, *span)]) for span in ((0, part), (part, _END)))
    low, high = (build.op("Slice", [first, *_span(build, *span)]) for span in ((0, part // 2), (part // 2, _END)))
    turned = build.op("Concat", [build.op("Neg", [high]), low], {"axis": -1})
    cos, sin = angles
    rotated = build.op("Add", [build.op("Mul", [first, cos]), build.op("Mul", [turned, sin])])
    return build.op("Concat", [rotated, rest], {"axis": -1})


def _rows(rotary: ir.Node) -> ir.Value | None:
    """[1, T, heads, D] before the Transpose that an embedding turns around, when one after it undoes that."""
    before = rotary.inputs[0].producer() if rotary.inputs[0] is not None else None
    readers = [use.node for use in rotary.outputs[0].uses()]
    if before is None or not all(_swaps(node) for node in (before, *readers)):
        return None
    rows = before.inputs[0]
    known = rows is not None and rows.shape is not None and all(isinstance(size, int) for size in rows.shape[-2:])
    return rows if known else None


def _swaps(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == _SWAP


def _width(table: ir.Value) -> int:
    assert table.shape is not None and isinstance(table.shape[-1], int), f"{table.name} is {table.shape}"
    return table.shape[-1]


def _span(build: NodeBuilder, start: int, end: int) -> list[ir.Value]:
    return [build.constant([start]), build.constant([end]), build.constant([3])]
