"""Linear layers that read the same input → one MatMul and a Split. Shared by qkv_merge and gate_up_merge.

    MatMul(x, W₁) [+ b₁], MatMul(x, W₂) [+ b₂], …      →  Split(MatMul(x, [W₁ W₂ …]) [+ [b₁ b₂ …]])

One large multiplication, and one quantizer of x for all of them. The merged weight is a lazy concatenation of the old ones:
nothing is copied until it is read or written to disk, and then one weight at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builder.fuse.graph import Decline, add_initializer, is_constant, is_op, new_node, replace_value, sole_user, static_shape

PARTS = "forgeline.parts"  # in a merged weight's `meta`: the names of the weights it was made of, for as long as it is in memory


@dataclass(frozen=True)
class Linear:
    """MatMul with a constant weight [in, out], and its bias when the only reader of the product adds one."""

    matmul: ir.Node
    add: ir.Node | None

    @property
    def output(self) -> ir.Value:
        return (self.add or self.matmul).outputs[0]

    @property
    def x(self) -> ir.Value:
        value = self.matmul.inputs[0]
        assert value is not None
        return value

    @property
    def weight(self) -> ir.Value:
        value = self.matmul.inputs[1]
        assert value is not None
        return value

    @property
    def bias(self) -> ir.Value | None:
        return None if self.add is None else next(value for value in self.add.inputs if value is not self.matmul.outputs[0])

    @property
    def width(self) -> int:
        shape = static_shape(self.weight)
        assert shape is not None and shape[1] is not None
        return shape[1]


def as_linear(matmul: ir.Node) -> Linear | None:
    if not is_op(matmul, "MatMul") or not is_constant(matmul.inputs[1]) or len(static_shape(matmul.inputs[1]) or ()) != 2:
        return None
    linear = Linear(matmul, None)
    add = sole_user(matmul.outputs[0])
    if add is not None and is_op(add, "Add"):
        other = next((value for value in add.inputs if value is not matmul.outputs[0]), None)
        if is_constant(other) and static_shape(other) == (linear.width,):
            return Linear(matmul, add)
    return linear


def merge(graph: ir.Graph, linears: Sequence[Linear], joint: str, fallback: str, decline: Decline) -> bool:
    """`joint` names the merged layer (qkv_proj), `fallback` the whole weight when the old names have no common form."""
    first = linears[0]
    what = ", ".join(str(linear.weight.name) for linear in linears)
    if len({linear.matmul for linear in linears}) < len(linears):
        decline(f"{what}: already one multiplication")
        return False
    if any(linear.x is not first.x for linear in linears):
        decline(f"{what}: the layers read different inputs")
        return False
    rows = {(static_shape(linear.weight) or (None,))[0] for linear in linears}
    dtypes = {linear.weight.dtype for linear in linears}
    if len(rows) > 1 or len(dtypes) > 1:
        decline(f"{what}: weights of {len(rows)} input sizes and {len(dtypes)} types")
        return False

    name = _joined_name([str(linear.weight.name) for linear in linears], joint) or fallback
    stem = name.removesuffix(".weight")
    widths = [linear.width for linear in linears]
    weight = add_initializer(graph, name, _concatenated([linear.weight for linear in linears], widths, axis=1))
    weight.meta[PARTS] = tuple(str(linear.weight.name) for linear in linears)
    product = ir.node("MatMul", [first.x, weight])
    _typed(product.outputs[0], first, sum(widths))
    nodes = [product]
    if any(linear.add is not None for linear in linears):
        bias = add_initializer(graph, f"{stem}.bias", _concatenated([linear.bias for linear in linears], widths, axis=0))
        nodes.append(new_node("Add", [product.outputs[0], bias], like=product.outputs[0]))
    sizes = add_initializer(graph, f"{stem}.split", np.array(widths, np.int64))
    split = ir.node("Split", [nodes[-1].outputs[0], sizes], attributes={"axis": -1}, num_outputs=len(linears))
    order = {node: index for index, node in enumerate(graph)}
    graph.insert_before(min((linear.matmul for linear in linears), key=order.__getitem__), [*nodes, split])
    for linear, output in zip(linears, split.outputs, strict=True):
        output.shape, output.type = linear.output.shape, linear.output.type
        replace_value(linear.output, output)
    old = [value for linear in linears for value in (linear.weight, linear.bias) if value is not None]
    for linear in linears:
        graph.remove([node for node in (linear.add, linear.matmul) if node is not None], safe=True)
    for value in old:
        if not value.uses() and value.name in graph.initializers:
            graph.initializers.pop(str(value.name))
    return True


def _typed(value: ir.Value, linear: Linear, width: int) -> None:
    product = linear.matmul.outputs[0]
    value.type = product.type
    if product.shape is not None:
        value.shape = ir.Shape([*product.shape[:-1], width])


def _concatenated(values: Sequence[ir.Value | None], widths: Sequence[int], axis: int) -> ir.LazyTensor:
    """Constants side by side along `axis`; None stands for zeros (a missing bias)."""
    tensors = [value.const_value if value is not None else None for value in values]
    known = next(tensor for tensor in tensors if tensor is not None)
    dtype = known.dtype

    def build() -> ir.TensorProtocol:
        arrays = [
            np.zeros(width, known.numpy().dtype) if tensor is None else tensor.numpy()
            for tensor, width in zip(tensors, widths, strict=True)
        ]
        return ir.tensor(np.concatenate(arrays, axis=axis), dtype=dtype)

    shape = list(known.numpy().shape)
    shape[axis] = sum(widths)
    return ir.LazyTensor(build, dtype=dtype, shape=ir.Shape(shape))


def _joined_name(names: Sequence[str], joint: str) -> str | None:
    """layers.3.self_attn.{q,k,v}_proj.weight → layers.3.self_attn.<joint>.weight; None when more than one part differs."""
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) != 1:
        return None
    differing = [index for index, each in enumerate(zip(*parts, strict=True)) if len(set(each)) > 1]
    if len(differing) != 1 or len(parts[0]) < 2:
        return None
    joined = list(parts[0])
    joined[differing[0]] = joint
    return ".".join(joined)
