"""A lowered TensorRT graph → one that ONNX Runtime runs, for tests and for the accuracy of engines no GPU here can run.

The plugin's node is replaced by what it does: norm and rotary embedding in fp32, rounding to the engine's types, quantization of
keys and values where the pools are 8-bit, and the canonical PagedAttention with its executable specification. The pools come back
as inputs and outputs. bfloat16 has no arithmetic in ONNX Runtime: weights keep its rounding, arithmetic is fp32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from builder.targets.openvino_build import NodeBuilder
from builder.targets.tensorrt_types import assign_types, plugin_spec
from plugins.paged_attention import tensorrt_op
from plugins.paged_attention.op import DOMAIN, DOMAIN_VERSION, PAGED_ATTENTION, attach_functions
from plugins.paged_attention.tensorrt_op import AttentionSpec
from runtime import contract

_FLOAT = int(ir.DataType.FLOAT)
_QUANTIZED = {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8}


def to_reference(model: ir.Model) -> ir.Model:
    """In place; returns the same model."""
    graph = model.graph
    assign_types(graph)
    for value in list(graph.inputs):
        if value.name == tensorrt_op.KV_POINTERS:
            graph.inputs.remove(value)
    for node in [node for node in graph if node.domain == tensorrt_op.NODE_DOMAIN]:
        _expand(graph, node)
    model.opset_imports.pop(tensorrt_op.NODE_DOMAIN, None)
    model.opset_imports[DOMAIN] = DOMAIN_VERSION
    _widen_bfloat16(graph)
    return attach_functions(model)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    spec = plugin_spec(node)
    build = NodeBuilder(graph, anchor=node)
    inputs = dict(zip(spec.inputs, node.inputs, strict=True))
    qkv = inputs["qkv"]
    assert qkv is not None and qkv.dtype is not None
    stored = int(qkv.dtype)  # what the kernel writes queries as, and 16-bit pools hold
    sizes = build.constant([spec.q_width, spec.kv_width, spec.kv_width])
    parts = build.ops("Split", [qkv, sizes], {"axis": -1}, num_outputs=3)
    heads = [build.op("Reshape", [part, build.constant([-1, count, spec.head_dim])]) for part, count in _counts(spec, parts)]
    q, k, v = (build.op("Cast", [x], {"to": _FLOAT}) for x in heads)
    if spec.has_norm:
        q, k = (
            build.op("RMSNormalization", [x, build.op("Cast", [inputs[w]], {"to": _FLOAT})], {"axis": -1, "epsilon": spec.eps})
            for x, w in ((q, "q_norm"), (k, "k_norm"))
        )
    if spec.rotary_dim:
        q, k = (_rotate(build, x, spec, inputs) for x in (q, k))
    q = build.op("Cast", [q], {"to": stored})
    k = _as_stored(build, k, spec.key_kind, inputs.get("k_scale"), stored)
    v = _as_stored(build, v, spec.value_kind, inputs.get("v_scale"), stored)
    pools = [_pool(graph, name(spec.layer), spec) for name in (contract.k_pool, contract.v_pool)]
    attributes = {
        "scale": spec.scale, "sliding_window": spec.sliding_window, "softcap": spec.softcap, "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "layer": spec.layer,
    }  # fmt: skip
    steps = [inputs[name] for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")]
    sinks = [inputs["sinks"]] if spec.has_sinks else []
    outputs = build.ops(PAGED_ATTENTION, [q, k, v, *pools, *steps, *sinks], attributes, domain=DOMAIN, num_outputs=3)
    for output, name, pool in zip(outputs[1:], (contract.k_pool_out, contract.v_pool_out), pools, strict=True):
        output.name, output.dtype, output.shape = name(spec.layer), ir.DataType.FLOAT, pool.shape
        graph.outputs.append(output)
    out = build.op("Reshape", [outputs[0], build.constant([-1, spec.q_width])])
    out.type, out.shape = ir.TensorType(qkv.dtype), node.outputs[0].shape
    ir.convenience.replace_all_uses_with(node.outputs[0], out)
    graph.remove(node, safe=True)


def _counts(spec: AttentionSpec, parts: object) -> list[tuple[ir.Value, int]]:
    return list(zip(parts, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True))  # type: ignore[call-overload]


def _rotate(build: NodeBuilder, x: ir.Value, spec: AttentionSpec, inputs: dict[str, ir.Value | None]) -> ir.Value:
    front = build.constant([0])
    tables = [build.op("Unsqueeze", [build.op("Gather", [inputs[name], inputs["rows"]]), front]) for name in ("cos", "sin")]
    turned = build.op("Transpose", [build.op("Unsqueeze", [x, front])], {"perm": [0, 2, 1, 3]})
    partial = spec.rotary_dim if spec.rotary_dim != spec.head_dim else 0
    attributes: dict[str, object] = {"interleaved": spec.interleaved}
    if partial:
        attributes |= {"rotary_embedding_dim": partial, "num_heads": 0}
    turned = build.op("RotaryEmbedding", [turned, *tables], attributes)
    return build.op("Squeeze", [build.op("Transpose", [turned], {"perm": [0, 2, 1, 3]}), front])


def _as_stored(build: NodeBuilder, x: ir.Value, kind: str, scale: ir.Value | None, stored: int) -> ir.Value:
    """fp32 values as they come back from the pool."""
    if kind not in _QUANTIZED:
        return build.op("Cast", [build.op("Cast", [x], {"to": stored})], {"to": _FLOAT})
    assert scale is not None and scale.shape is not None
    name = f"zero_points.{kind}.{scale.shape[0]}"
    zeros = build.graph.initializers.get(name)
    if zeros is None:
        zeros = build.initializer(name, ir.Tensor(np.zeros(int(scale.shape[0]), _QUANTIZED[kind])))  # type: ignore[arg-type]
    quantized = build.op("QuantizeLinear", [x, scale, zeros], {"axis": 1})
    return build.op("DequantizeLinear", [quantized, scale, zeros], {"axis": 1})


def _pool(graph: ir.Graph, name: str, spec: AttentionSpec) -> ir.Value:
    shape = ir.Shape(["num_blocks", "block_size", spec.num_kv_heads, spec.head_dim])
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    graph.inputs.append(value)
    return value


def _widened(value: ir.Value) -> ir.LazyTensor:
    tensor = value.const_value
    assert tensor is not None
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(np.float32)),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(tensor.shape.numpy()),
        name=value.name,
    )


def _widen_bfloat16(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        if value.dtype == ir.DataType.BFLOAT16:
            value.const_value = _widened(value)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].value == int(ir.DataType.BFLOAT16):
            node.attributes["to"] = ir.AttrInt64("to", _FLOAT)
        for output in node.outputs:
            if output.dtype == ir.DataType.BFLOAT16:
                output.type = ir.TensorType(ir.DataType.FLOAT)
