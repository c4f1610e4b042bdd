"""Expert layers for OpenVINO: forgeline::MoEExperts → matrices of two axes, the only ones its quantized kernels take.

    gate_up [E, 2I, C]   one layer [E * 2I, C] for all experts, since they read the same tokens
    down    [E, C, I]    one layer per expert, its output weighted by the router

Every expert sees every token, and the weight of those not chosen is zero. Expert matrices are slices of the stored tensor: no
byte of the weights file is written twice.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from builder.targets.openvino_build import NodeBuilder, replace


def lower_experts(node: ir.Node) -> None:
    graph = node.graph
    hidden, index, chosen, gate_up, down = node.inputs
    assert isinstance(graph, ir.Graph) and gate_up is not None and down is not None
    build = NodeBuilder(graph, anchor=node)
    num_experts, two_i, _ = _dims(gate_up)
    intermediate = two_i // 2
    gated = build.op("MatMul", [hidden, _matrix(build, gate_up, 0, num_experts)])
    split = build.op("Reshape", [gated, build.constant([-1, num_experts, 2, intermediate])])
    halves = build.ops("Split", [split], {"axis": 2, "num_outputs": 2}, num_outputs=2)
    gate, up = (build.op("Squeeze", [half, build.constant([2])]) for half in halves)
    active = build.op("Mul", [build.op("Mul", [gate, build.op("Sigmoid", [gate])]), up])  # [T, E, I]

    rows = build.op("Shape", [hidden], {"start": 0, "end": 1})
    shape = build.op("Concat", [rows, build.constant([num_experts])], {"axis": 0})
    none = build.op("Expand", [build.constant(0.0, np.float32), shape])
    weights = build.op("ScatterElements", [none, index, chosen], {"axis": 1})
    weighted = build.op("Mul", [active, build.op("Unsqueeze", [weights, build.constant([2])])])
    per_expert = build.ops("Split", [weighted], {"axis": 1, "num_outputs": num_experts}, num_outputs=num_experts)
    total: ir.Value | None = None
    for expert, value in enumerate(per_expert):
        flat = build.op("Squeeze", [value, build.constant([1])])
        part = build.op("MatMul", [flat, _matrix(build, down, expert, 1)])
        total = part if total is None else build.op("Add", [total, part])
    assert total is not None
    replace(node, total)


def _matrix(build: NodeBuilder, value: ir.Value, first: int, count: int) -> ir.Value:
    """Experts first … first + count of a [E, out, in] weight, stored as it is, cast or dequantized, as [in, count * out]."""
    producer = value.producer()
    if producer is None:
        dense = _slice(build, value, first, count)
    elif producer.op_type == "Cast":
        dense = build.op("Cast", [_slice(build, producer.inputs[0], first, count)], {"to": producer.attributes["to"].value})
    else:
        assert producer.op_type == "DequantizeLinear", f"{value.name} comes from {producer.op_type}"
        q, scale = (_slice(build, source, first, count) for source in producer.inputs[:2])
        block = producer.attributes.get_int("block_size", 0)
        per_row = scale.shape is not None and scale.shape[1] == 1
        if per_row:
            scale = _vector(build, scale)
        dense = build.op("DequantizeLinear", [q, scale], {"axis": 0} if per_row else {"axis": 1, "block_size": block})
    return build.op("Transpose", [dense], {"perm": [1, 0]})


def _slice(build: NodeBuilder, value: ir.Value | None, first: int, count: int) -> ir.Value:
    """[count * out, in] of a stored [E, out, in]."""
    assert value is not None and value.const_value is not None
    tensor = value.const_value
    experts, rows, width = _dims(value)
    name = f"{value.name}[{first}]" if count < experts else f"{value.name}[all]"
    if name in build.graph.initializers:
        return build.graph.initializers[name]
    if not isinstance(tensor, ir.ExternalTensor):  # too small to be in the weights file
        array = np.ascontiguousarray(tensor.numpy()[first : first + count].reshape(count * rows, width))
        return build.initializer(name, ir.Tensor(array, dtype=tensor.dtype))
    size = math.ceil(rows * width * tensor.dtype.bitwidth / 8)
    assert rows * width * tensor.dtype.bitwidth % 8 == 0, f"experts of {value.name} do not start on a byte"
    part = ir.ExternalTensor(
        tensor.location,
        offset=(tensor.offset or 0) + first * size,
        length=count * size,
        dtype=tensor.dtype,
        shape=ir.Shape([count * rows, width]),
        name=name,
        base_dir=tensor.base_dir,
    )
    return build.initializer(name, part)


def _vector(build: NodeBuilder, column: ir.Value) -> ir.Value:
    """[N, 1] as [N], the same bytes."""
    name = f"{column.name}.vector"
    tensor = column.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        shape = ir.Shape([tensor.size])
        flat: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=shape, name=name, base_dir=tensor.base_dir
        )
    else:
        flat = ir.tensor(tensor.numpy().reshape(-1))
    return build.initializer(name, flat)


def _dims(value: ir.Value) -> tuple[int, int, int]:
    producer = value.producer()
    source = value if producer is None else producer.inputs[0]
    assert source is not None and source.const_value is not None
    experts, rows, width = source.const_value.shape
    return int(experts), int(rows), int(width)  # type: ignore[arg-type]
