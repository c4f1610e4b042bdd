"""Where the weights of a canonical graph are and what each of them is for. Changes nothing, except `tie`.

attention   projections that lead into PagedAttention, or out of it
mlp         every other linear layer between embedding and head; the experts of a mixture
embedding   tables looked up with token ids or positions
lm_head     the layer that gives the logits
norms       all vectors: norms and biases
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from plugins.paged_attention.op import DOMAIN, MOE_EXPERTS, PAGED_ATTENTION
from runtime.contract import INPUT_IDS, LOGITS

CLASSES = ("attention", "mlp", "embedding", "lm_head", "norms")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Use:
    """One node that reads a weight matrix."""

    node: ir.Node
    kind: str  # linear: MatMul(x, weight [in, out]); tied: MatMul(x, Transpose(weight [out, in])); lookup: Gather; experts
    role: str  # one of CLASSES


@dataclass(frozen=True)
class Weight:
    value: ir.Value
    uses: tuple[Use, ...]

    @property
    def name(self) -> str:
        assert self.value.name is not None
        return self.value.name

    @property
    def role(self) -> str:
        """Of a matrix with several uses: embedding before lm_head before the others, as a tied table is reported."""
        roles = {use.role for use in self.uses}
        return next(role for role in ("embedding", "lm_head", *CLASSES) if role in roles)

    @property
    def width(self) -> int:
        """Inputs of the linear layer: what one output channel sums over."""
        assert self.value.const_value is not None
        shape = self.value.const_value.numpy().shape
        return int(shape[0] if any(use.kind == "linear" for use in self.uses) else shape[-1])

    @property
    def num_experts(self) -> int:
        """Of an expert weight [E, out, in]; 0 for any other."""
        assert self.value.const_value is not None
        return self.value.const_value.numpy().shape[0] if any(use.kind == "experts" for use in self.uses) else 0

    @property
    def is_looked_up_by_token(self) -> bool:
        return any(use.kind == "lookup" and _depends_on_input(use.node.inputs[1], INPUT_IDS) for use in self.uses)


def find_weights(graph: ir.Graph) -> list[Weight]:
    """Every float matrix that a linear layer, a lookup or an expert layer reads, in the graph's order of initializers."""
    found: dict[ir.Value, list[Use]] = {}
    for node in graph:
        for value, kind in _matrices(node):
            found.setdefault(value, []).append(Use(node, kind, _role(node, kind)))
    return [Weight(value, tuple(found[value])) for value in graph.initializers.values() if value in found]


def float_initializers(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in _FLOATS:
            yield value


def add_initializer(graph: ir.Graph, name: str, tensor: ir.Tensor) -> ir.Value:
    assert name not in graph.initializers, f"{name} exists"
    tensor.name = name
    value = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value


def tie(graph: ir.Graph) -> bool:
    """Store a head that equals the embedding once: the head becomes Transpose(embedding). Returns whether it did."""
    weights = find_weights(graph)
    tables = [weight for weight in weights if weight.is_looked_up_by_token]
    for head in (weight for weight in weights if [use.kind for use in weight.uses] == ["linear"] and weight.role == "lm_head"):
        for table in tables:
            assert head.value.const_value is not None and table.value.const_value is not None
            if tuple(head.value.const_value.shape) != tuple(table.value.const_value.shape)[::-1]:
                continue
            if not np.array_equal(head.value.const_value.numpy().T, table.value.const_value.numpy()):
                continue
            matmul = head.uses[0].node
            transpose = ir.node("Transpose", [table.value], attributes={"perm": [1, 0]})
            transpose.outputs[0].name = f"{head.name}.tied"
            transpose.outputs[0].type, transpose.outputs[0].shape = head.value.type, head.value.shape
            graph.insert_before(matmul, transpose)
            matmul.replace_input_with(1, transpose.outputs[0])
            del graph.initializers[head.name]
            return True
    return False


def _matrices(node: ir.Node) -> Iterator[tuple[ir.Value, str]]:
    """(initializer, kind) pairs that `node` reads as a weight matrix."""
    if node.domain == "" and node.op_type == "MatMul":
        weight = node.inputs[1]
        producer = weight.producer() if weight is not None else None
        if _is_matrix(weight):
            yield weight, "linear"  # type: ignore[misc]
        elif producer is not None and producer.op_type == "Transpose" and _is_matrix(producer.inputs[0]):
            yield producer.inputs[0], "tied"  # type: ignore[misc]
    elif (
        node.domain == "" and node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0 and _is_matrix(node.inputs[0])
    ):
        yield node.inputs[0], "lookup"  # type: ignore[misc]
    elif node.domain == DOMAIN and node.op_type == MOE_EXPERTS:
        for value in node.inputs[3:5]:
            if value is not None and value.is_initializer():
                yield value, "experts"


def _is_matrix(value: ir.Value | None) -> bool:
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    return len(value.const_value.shape) == 2 and value.const_value.dtype in _FLOATS


def _is_linear(node: ir.Node) -> bool:
    return any(kind in ("linear", "tied") for _, kind in _matrices(node))


def _role(node: ir.Node, kind: str) -> str:
    if kind == "lookup":
        return "embedding"
    if kind == "experts":
        return "mlp"
    reached = _reached_before_next_linear(node)
    if any(value.name == LOGITS and value.is_graph_output() for value in reached):
        return "lm_head"
    readers = {use.node.op_type for value in reached for use in value.uses()}
    if PAGED_ATTENTION in readers or _comes_from_attention(node.inputs[0]):
        return "attention"
    return "mlp"


def feeds_experts(node: ir.Node) -> bool:
    """Is this linear layer the router of a mixture of experts? It decides their index and weights, not what they read."""
    uses = (use for value in _reached_before_next_linear(node) for use in value.uses())
    return any(use.node.op_type == MOE_EXPERTS and use.idx in (1, 2) for use in uses)


def _reached_before_next_linear(node: ir.Node) -> list[ir.Value]:
    """Values computed from `node` without another linear layer, expert layer or attention in between."""
    pending, seen = list(node.outputs), set(node.outputs)
    for value in pending:
        for use in value.uses():
            if use.node.op_type in (PAGED_ATTENTION, MOE_EXPERTS) or _is_linear(use.node):
                continue
            fresh = [output for output in use.node.outputs if output not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return pending


def _comes_from_attention(value: ir.Value | None) -> bool:
    """Is `value` an attention output, through no linear layer and no addition (which would be the residual stream)?"""
    pending = [value]
    for current in pending:
        node = current.producer() if current is not None else None
        if node is None or node.op_type == "Add" or _is_linear(node):
            continue
        if node.op_type == PAGED_ATTENTION:
            return True
        pending.extend(node.inputs)
    return False


def _depends_on_input(value: ir.Value | None, name: str) -> bool:
    pending = [value]
    for current in pending:
        if current is None:
            continue
        if current.is_graph_input() and current.name == name:
            return True
        producer = current.producer()
        if producer is not None:
            pending.extend(producer.inputs)
    return False
