"""Small questions about, and edits of, an onnx_ir graph that several fusions need. Knows no model and no fusion.

`Decline`   a fusion calls it with one sentence when it meets its pattern but a condition is not met; `fuse` quotes the
            sentences when a count is wrong
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import pattern

Decline = Callable[[str], None]


class Rule(pattern.RewriteRuleClassBase):
    """A rewrite rule that says why a match was declined."""

    def __init__(self, decline: Decline) -> None:
        super().__init__()
        self._decline = decline

    def fail(self, reason: str, *values: ir.Value) -> pattern.MatchResult:
        self._decline(reason)
        return pattern.MatchResult().fail(reason, list(values))


def is_op(node: ir.Node | None, op_type: str, domain: str = "") -> bool:
    return node is not None and node.op_type == op_type and node.domain == domain


def constant(value: ir.Value | None) -> npt.NDArray | None:
    """The array behind an initializer or Constant node; None when `value` is computed or fed."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """As `constant(value) is not None`, without reading a large weight."""
    return value is not None and not value.is_graph_input() and ir.convenience.get_const_tensor(value) is not None


def scalar(value: ir.Value | None) -> float | None:
    """The number behind a one-element constant."""
    if not is_constant(value):
        return None
    assert value is not None
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return float(tensor.numpy().reshape(())) if tensor.size == 1 else None


def ints(value: ir.Value | None) -> tuple[int, ...] | None:
    """The numbers behind a constant axis list, shape or index list."""
    array = constant(value)
    return None if array is None else tuple(int(number) for number in array.reshape(-1))


def static_shape(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Dimensions, None where symbolic; None as a whole when the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def same_shape(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Both shapes known and equal, symbols included."""
    return a is not None and b is not None and a.shape is not None and a.shape == b.shape


def sole_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`; None when there are more, none, or it is a graph output."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    return next(iter(uses)).node


def typed_like(value: ir.Value, model: ir.Value) -> ir.Value:
    """Give `value` the type and shape of `model`; returns `value`."""
    value.type, value.shape = model.type, model.shape
    return value


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, object] | None = None,
    *,
    like: ir.Value,
    domain: str = "",
) -> ir.Node:
    """A node of one output that has the type and shape of `like`."""
    node = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain)  # type: ignore[arg-type]
    typed_like(node.outputs[0], like)
    return node


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Every reader of `old` reads `new`, which also takes over the name; the producer of `old` is left for dead-code removal."""
    name, old.name = old.name, None
    new.name = name
    if new.shape is None:
        new.shape = old.shape
    if new.type is None:
        new.type = old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | npt.NDArray) -> ir.Value:
    """A new initializer, its name made unique."""
    unique, number = name, 1
    while unique in graph.initializers:
        number += 1
        unique = f"{name}_{number}"
    data = ir.tensor(tensor, name=unique) if isinstance(tensor, np.ndarray) else tensor
    data.name = unique
    value = ir.Value(name=unique, const_value=data, shape=data.shape, type=ir.TensorType(data.dtype))  # type: ignore[arg-type]
    graph.register_initializer(value)
    return value
