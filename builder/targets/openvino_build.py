"""Adds nodes to a graph that is being lowered. Knows no op in particular."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")


class NodeBuilder:
    """Inserts nodes before `anchor`, the first node of the graph by default."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node | None = None) -> None:
        self.graph = graph
        self._anchor = anchor or graph[0]

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, object] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        """The only output of a new node."""
        return self.ops(op_type, inputs, attributes, domain=domain, name=name)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, object] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
        num_outputs: int = 1,
    ) -> Sequence[ir.Value]:
        node = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain, num_outputs=num_outputs)  # type: ignore[arg-type]
        if name is not None:
            node.outputs[0].name = name
        self.graph.insert_before(self._anchor, node)
        return node.outputs

    def constant(self, value: float | Sequence[int], dtype: type = np.int64) -> ir.Value:
        """An initializer, shared between equal ones."""
        text = "_".join(map(str, value)) if isinstance(value, Sequence) else f"scalar_{value}"
        name = f"lowered.{np.dtype(dtype).name}.{text}"
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        return self.initializer(name, ir.tensor(np.array(value, dtype)))

    def array(self, name: str, value: np.ndarray) -> ir.Value:
        """An initializer of its own name."""
        taken = sum(known.startswith(f"lowered.{name}") for known in self.graph.initializers)
        return self.initializer(f"lowered.{name}.{taken}", ir.Tensor(value))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype))  # type: ignore[arg-type]
        self.graph.register_initializer(value)
        return value


def replace(node: ir.Node, new: ir.Value) -> None:
    """Readers of the node's first output read `new`; the node goes."""
    out = node.outputs[0]
    new.type, new.shape = out.type, out.shape
    ir.convenience.replace_all_uses_with(out, new)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def unshaped(value: ir.Value) -> ir.Value:
    """The same numbers in the same order before they were reshaped."""
    while (node := value.producer()) is not None and node.op_type in RESHAPES:
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def shorten_reshapes(graph: ir.Graph) -> None:
    """A Reshape to a shape that is known reads what earlier ones read: each costs OpenVINO 1 to 2 µs of a step."""
    for node in graph:
        target = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] is not None else None
        if target is not None and 0 not in target.numpy():
            assert node.inputs[0] is not None
            node.replace_input_with(0, unshaped(node.inputs[0]))
