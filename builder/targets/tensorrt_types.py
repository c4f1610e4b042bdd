"""Narrow a lowered fp32 graph to fp16 or bf16, with Casts where the two meet. TensorRT networks are strongly typed: what the
graph says is what runs.

fp32 stays   norms and softmax; everything that depends on positions only (angles, cos, sin); the logits and what makes them from
             the head's product; the plugin's fp32 inputs
the rest     16 bit: matrix products, lookups, activations, the residual stream
"""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from plugins.paged_attention import tensorrt_op
from runtime.contract import LOGITS

_WIDE_OPS = ("RMSNormalization", "LayerNormalization", "Softmax", "LogSoftmax")
_WIDE_PLUGIN_INPUTS = ("cos", "sin", "k_scale", "v_scale", "sinks")
_NUMPY = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16, ir.DataType.FLOAT: np.float32}
_INT64_OPS = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero")
_BOOL_OPS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor", "IsNaN", "IsInf")


def narrow(model: ir.Model, dtype: ir.DataType) -> None:
    """In place. `dtype` is FLOAT16 or BFLOAT16."""
    assert dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), dtype
    graph = model.graph
    assign_types(graph)
    wide = _wide_nodes(graph)
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for node in list(graph):
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in _NUMPY:
                continue
            want = ir.DataType.FLOAT if node in wide or _is_wide_plugin_input(node, index) else dtype
            if value.dtype != want:
                node.replace_input_with(index, _converted(graph, node, value, want, casts))
        if node in wide:
            continue
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                value.type = ir.TensorType(dtype)
        if node.op_type == "Cast" and node.attributes["to"].value == int(ir.DataType.FLOAT):
            node.attributes["to"] = ir.AttrInt64("to", int(dtype))
    _widen_outputs(graph, casts)
    for value in [value for value in graph.initializers.values() if not value.uses()]:
        del graph.initializers[str(value.name)]
    passes.RemoveUnusedNodesPass()(model)


def assign_types(graph: ir.Graph) -> None:
    """An element type for every value that has none: most ops keep their first input's."""
    for node in graph:
        for value in node.outputs:
            if value.dtype is not None:
                continue
            if node.op_type in _INT64_OPS:
                value.type = ir.TensorType(ir.DataType.INT64)
            elif node.op_type in _BOOL_OPS:
                value.type = ir.TensorType(ir.DataType.BOOL)
            elif node.op_type == "Cast":
                value.type = ir.TensorType(ir.DataType(node.attributes["to"].value))
            else:
                source = {"Where": 1, "CastLike": 1, "DequantizeLinear": 1, "QuantizeLinear": 2}.get(node.op_type, 0)
                first = node.inputs[source]
                value.type = ir.TensorType(first.dtype) if first is not None and first.dtype is not None else None


def _wide_nodes(graph: ir.Graph) -> set[ir.Node]:
    wide = {node for node in graph if node.op_type in _WIDE_OPS}
    carries_tokens: set[ir.Value] = set()
    for node in graph:
        reads_weights = node.op_type in ("Gather", "MatMul", "Gemm") and any(map(_is_matrix, node.inputs))
        if reads_weights or any(value in carries_tokens for value in node.inputs):
            carries_tokens.update(node.outputs)
        elif node.op_type != "DequantizeLinear" and not _only_weights(node.inputs):
            wide.add(node)
    pending = [value for value in graph.outputs if value.name == LOGITS]
    while pending:
        maker = pending.pop().producer()
        if maker is not None and maker.op_type not in ("MatMul", "Gemm"):
            wide.add(maker)
            pending.extend(value for value in maker.inputs if value is not None)
    wide.update(use.node for value in graph.outputs if value.name == LOGITS for use in value.uses())
    return wide


def _is_matrix(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) >= 2


def _only_weights(values: Iterable[ir.Value | None]) -> bool:
    """Is everything read a constant or made of dequantized ones, such as the Transpose of a weight?"""
    pending = [value for value in values if value is not None]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None:
            if not value.is_initializer():
                return False
        else:
            pending.extend(each for each in node.inputs if each is not None)
    return True


def _is_wide_plugin_input(node: ir.Node, index: int) -> bool:
    if node.domain != tensorrt_op.NODE_DOMAIN:
        return False
    return plugin_spec(node).inputs[index] in _WIDE_PLUGIN_INPUTS


def plugin_spec(node: ir.Node) -> tensorrt_op.AttentionSpec:
    names = tensorrt_op.AttentionSpec.__dataclass_fields__
    return tensorrt_op.AttentionSpec.from_dict({name: a.value for name, a in node.attributes.items() if name in names})


def _converted(
    graph: ir.Graph, reader: ir.Node, value: ir.Value, dtype: ir.DataType, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]
) -> ir.Value:
    key = (value, dtype)
    if key in casts:
        return casts[key]
    suffix = {ir.DataType.FLOAT: "f32", ir.DataType.FLOAT16: "f16", ir.DataType.BFLOAT16: "bf16"}[dtype]
    name = f"{value.name}.{suffix}"
    if value.is_initializer():
        new = ir.Value(name=name, const_value=_lazy(value, dtype, name), shape=value.shape, type=ir.TensorType(dtype))
        graph.register_initializer(new)
    else:
        cast = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name)
        new = cast.outputs[0]
        new.name, new.dtype, new.shape = name, dtype, value.shape
        producer = value.producer()
        if producer is None:
            graph.insert_before(reader, cast)
        else:
            graph.insert_after(producer, cast)
    casts[key] = new
    return new


def _lazy(value: ir.Value, dtype: ir.DataType, name: str) -> ir.LazyTensor:
    """Converted when written to disk, one weight at a time."""
    tensor = value.const_value
    assert tensor is not None
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(_NUMPY[dtype]), dtype=dtype),
        dtype=dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
    )


def _widen_outputs(graph: ir.Graph, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]) -> None:
    """Logits leave in fp32 under their name."""
    for index, value in enumerate(graph.outputs):
        if value.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        wide = casts.get((value, ir.DataType.FLOAT))
        if wide is None:
            cast = ir.node("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)})
            wide = cast.outputs[0]
            wide.dtype, wide.shape = ir.DataType.FLOAT, value.shape
            producer = value.producer()
            assert producer is not None
            graph.insert_after(producer, cast)
        name, value.name = value.name, f"{value.name}.narrow"
        wide.name = name
        graph.outputs[index] = wide
