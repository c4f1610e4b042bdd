"""Rotary embedding written out → opset-23 RotaryEmbedding, half-split or interleaved, of the whole head or its first part.

    x * cos + rotated(x) * sin          rotated: (-x₂, x₁) by halves, or (-x₁, x₀, -x₃, x₂, …) interleaved
    [rotary(x[:r]), x[r:]]              →  rotary(x) with rotary_embedding_dim = r

The op takes cos and sin of half the rotated width, so both tables are traced back to the half that was repeated. A layout of
[1, T, heads, D] (GPT-J) is transposed to the op's [1, heads, T, D]; the transposes cancel against those around attention.

Source   RoFormer, arXiv:2104.09864
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from builder.fuse.graph import Decline, ints, is_constant, is_op, new_node, replace_value, scalar, sole_user, static_shape

_END = (1 << 31) - 1  # Slice ends at or above this mean "to the end"
_HEADS_FIRST = (0, 2, 1, 3)


def rotary(model: ir.Model, decline: Decline) -> int:
    """Returns how many RotaryEmbedding nodes the graph then has; the exporter may have made some."""
    graph = model.graph
    tables: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if is_op(node, "Add") and (match := _match(node, decline)) is not None:
            _rewrite(graph, node, match, tables)
    for node in list(graph):
        if is_op(node, "RotaryEmbedding") and not node.attributes.get_int("rotary_embedding_dim", 0):
            _widen(graph, node)
    return sum(is_op(node, "RotaryEmbedding") for node in graph)


@dataclass(frozen=True)
class _Match:
    x: ir.Value
    cos: ir.Value  # [1, 1, T, r] or [1, T, 1, r]
    sin: ir.Value
    interleaved: bool
    heads_axis: int  # of x: 1 or 2


def _match(add: ir.Node, decline: Decline) -> _Match | None:
    products = [value.producer() if value is not None else None for value in add.inputs]
    if not all(is_op(product, "Mul") for product in products):
        return None
    for straight, turned in (products, reversed(products)):
        assert straight is not None and turned is not None
        for rotated, sin in (turned.inputs, reversed(turned.inputs)):
            for x, cos in (straight.inputs, reversed(straight.inputs)):
                assert rotated is not None and sin is not None and x is not None and cos is not None
                interleaved = _is_rotation(rotated, x)
                if interleaved is None:
                    continue
                shape, table = static_shape(x), static_shape(cos)
                if shape is None or table is None or len(shape) != 4 or len(table) != 4 or table != static_shape(sin):
                    decline(f"rotary of {x.name}: x is {x.shape}, cos is {cos.shape}, sin is {sin.shape}")
                    return None
                if table[1] != 1 and table[2] != 1:
                    decline(f"rotary of {x.name}: cos {cos.shape} differs between heads")
                    return None
                heads_axis = 1 if table[1] == 1 else 2
                if shape[heads_axis] is None:
                    decline(f"rotary of {x.name}: the number of heads is not static in {x.shape}")
                    return None
                for table_value in (cos, sin):
                    if _trace(table_value, interleaved, shape[-1]) is None:
                        decline(f"rotary of {x.name}: the two halves of {table_value.name} are not known to be equal")
                        return None
                return _Match(x, cos, sin, interleaved, heads_axis)
    return None


def _is_rotation(value: ir.Value, x: ir.Value) -> bool | None:
    """Is `value` x rotated: False by halves, True interleaved, None not at all."""
    shape = static_shape(x)
    width = shape[-1] if shape else None
    node = value.producer()
    if node is None or width is None:
        return None
    if is_op(node, "Concat") and len(node.inputs) == 2 and _is_last(node.attributes.get_int("axis", 0), value):
        upper, lower = _slice_of(_negated(node.inputs[0]), x), _slice_of(node.inputs[1], x)
        return False if (upper, lower) == ((width // 2, width, 1), (0, width // 2, 1)) else None
    if is_op(node, "Reshape"):
        assert node.inputs[0] is not None
        stack = node.inputs[0].producer()
        if static_shape(value) != shape or not is_op(stack, "Concat"):
            return None
        assert stack is not None
        if len(stack.inputs) != 2 or not _is_last(stack.attributes.get_int("axis", 0), stack.outputs[0]):
            return None
        odd, even = (_unstacked(each) for each in stack.inputs)
        turned = _slice_of(_negated(odd), x) == (1, width, 2) and _slice_of(even, x) == (0, width, 2)
        return True if turned else None
    return None


def _is_last(axis: int, value: ir.Value) -> bool:
    return axis == -1 or (value.shape is not None and axis == len(value.shape) - 1)


def _negated(value: ir.Value | None) -> ir.Value | None:
    """x of Neg(x)."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and is_op(node, "Neg") else None


def _unstacked(value: ir.Value | None) -> ir.Value | None:
    """x of Unsqueeze(x, last axis)."""
    node = value.producer() if value is not None else None
    if node is None or not is_op(node, "Unsqueeze") or value is None or value.shape is None:
        return None
    return node.inputs[0] if ints(node.inputs[1]) in ((-1,), (len(value.shape) - 1,)) else None


def _slice_of(value: ir.Value | None, x: ir.Value) -> tuple[int, int, int] | None:
    """start, end, step of a Slice of x along its last axis; None when `value` is something else."""
    node = value.producer() if value is not None else None
    if node is None or not is_op(node, "Slice") or node.inputs[0] is not x or x.shape is None:
        return None
    starts, ends, axes, steps = (ints(each) for each in (*node.inputs[1:], None, None)[:4])
    shape = static_shape(x)
    if starts is None or ends is None or axes is None or shape is None or shape[-1] is None:
        return None
    if len(axes) != 1 or axes[0] not in (-1, len(shape) - 1):
        return None
    return starts[0], min(ends[0], shape[-1]), steps[0] if steps else 1


def _trace(value: ir.Value, interleaved: bool, width: int | None) -> tuple[ir.Value, list[ir.Node]] | None:
    """From a table of full width back to the half [1, T, width / 2] that it repeats, and the nodes applied since, last first."""
    chain: list[ir.Node] = []
    while (node := value.producer()) is not None:
        if is_op(node, "Concat") and not interleaved:
            half = node.inputs[0]
            repeated = len(node.inputs) == 2 and half is node.inputs[1] and _is_last(node.attributes.get_int("axis", 0), value)
        elif is_op(node, "Reshape") and interleaved:
            half = _repeated_pairwise(node)
            repeated = half is not None
        else:
            half, repeated = None, False
        if repeated:
            assert half is not None
            shape = static_shape(half)
            fits = shape is not None and width is not None and len(shape) == 3 and shape[-1] == width // 2
            return (half, chain) if fits else None
        if is_op(node, "Mul") and scalar(node.inputs[0]) is not None:
            source = node.inputs[1]
        elif node.op_type in ("Cos", "Sin", "Cast", "Unsqueeze") or (is_op(node, "Mul") and scalar(node.inputs[1]) is not None):
            source = node.inputs[0]
        else:
            return None
        assert source is not None
        chain.append(node)
        value = source
    return None


def _repeated_pairwise(reshape: ir.Node) -> ir.Value | None:
    """x of repeat_interleave(x, 2): Reshape(Expand(Unsqueeze(x, […, last axis]), […, 2]))."""
    assert reshape.inputs[0] is not None
    expand = reshape.inputs[0].producer()
    if expand is None or not is_op(expand, "Expand"):
        return None
    shape = static_shape(expand.outputs[0])
    assert expand.inputs[0] is not None
    unsqueeze = expand.inputs[0].producer()
    if not shape or shape[-1] != 2 or unsqueeze is None or not is_op(unsqueeze, "Unsqueeze"):
        return None
    axes = ints(unsqueeze.inputs[1]) or ()
    return unsqueeze.inputs[0] if len(shape) - 1 in axes or -1 in axes else None


def _half_table(graph: ir.Graph, before: ir.Node, table: ir.Value, match: _Match, tables: dict[ir.Value, ir.Value]) -> ir.Value:
    """The table recomputed on its half; one per distinct table, placed before its first use."""
    if table not in tables:
        shape = static_shape(match.x)
        assert shape is not None
        traced = _trace(table, match.interleaved, shape[-1])
        assert traced is not None
        value, chain = traced
        for node in reversed(chain):
            if node.op_type == "Unsqueeze":
                continue
            if node.op_type == "Mul":
                factor = next(each for each in node.inputs if is_constant(each))
                copy = new_node("Mul", [value, factor], like=value)
            else:
                copy = new_node(node.op_type, [value], dict(node.attributes), like=value)
                copy.outputs[0].type = node.outputs[0].type
            graph.insert_before(before, copy)
            value = copy.outputs[0]
        tables[table] = value
    return tables[table]


def _rewrite(graph: ir.Graph, add: ir.Node, match: _Match, tables: dict[ir.Value, ir.Value]) -> None:
    cos = _half_table(graph, add, match.cos, match, tables)
    sin = _half_table(graph, add, match.sin, match, tables)
    output = add.outputs[0]
    x, whole, width = _whole_head(match.x, output)
    shape = static_shape(x)
    assert shape is not None
    heads = shape[match.heads_axis]
    place = whole.producer()
    assert place is not None
    nodes = []
    if match.heads_axis == 2:
        nodes.append(_transpose(x))
        x = nodes[-1].outputs[0]
    attributes = {"interleaved": int(match.interleaved), "num_heads": heads}
    if width:
        attributes["rotary_embedding_dim"] = width
    nodes.append(new_node("RotaryEmbedding", [x, cos, sin], attributes, like=x))  # type: ignore[arg-type]
    if match.heads_axis == 2:
        nodes.append(_transpose(nodes[-1].outputs[0]))
    graph.insert_before(place, nodes)
    replace_value(whole, nodes[-1].outputs[0])
    graph.remove(place, safe=True)


def _transpose(x: ir.Value) -> ir.Node:
    node = new_node("Transpose", [x], {"perm": _HEADS_FIRST}, like=x)
    assert x.shape is not None
    node.outputs[0].shape = ir.Shape([x.shape[axis] for axis in _HEADS_FIRST])
    return node


def _whole_head(x: ir.Value, rotated: ir.Value) -> tuple[ir.Value, ir.Value, int]:
    """When only x[:r] of a head is rotated and x[r:] appended: the whole head, the Concat's output and r; else x, rotated, 0."""
    none = x, rotated, 0
    cut, joined = x.producer(), sole_user(rotated)
    if not is_op(cut, "Slice") or joined is None or not is_op(joined, "Concat") or len(joined.inputs) != 2:
        return none
    assert cut is not None
    head, rest = cut.inputs[0], joined.inputs[1]
    if joined.inputs[0] is not rotated or head is None or not _is_last(joined.attributes.get_int("axis", 0), joined.outputs[0]):
        return none
    shape, taken = static_shape(head), _slice_of(x, head)
    if shape is None or taken is None or taken[0] != 0 or taken[2] != 1 or _slice_of(rest, head) != (taken[1], shape[-1], 1):
        return none
    return head, joined.outputs[0], taken[1]


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    """Let a RotaryEmbedding of a sliced head, as the exporter makes it, take the whole head."""
    x = node.inputs[0]
    assert x is not None
    head, whole, width = _whole_head(x, node.outputs[0])
    shape = static_shape(head)
    if not width or shape is None or len(shape) != 4 or shape[1] is None:
        return
    attributes = {**node.attributes, "rotary_embedding_dim": ir.AttrInt64("rotary_embedding_dim", width)}
    attributes["num_heads"] = ir.AttrInt64("num_heads", shape[1])
    wide = ir.Node("", "RotaryEmbedding", [head, *node.inputs[1:]], attributes.values())
    place = whole.producer()
    assert place is not None
    graph.insert_before(place, wide)
    replace_value(whole, wide.outputs[0])
    graph.remove([place, node], safe=True)
