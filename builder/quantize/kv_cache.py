"""The KV cache's rounding on the canonical graph, before each PagedAttention: what the cache gives back is what goes in.

    f32         as it is
    f16, bf16   one cast and back
    u8, u4      scale and offset per token and head, for u4 per 32 values of it, from their extremes
    f8, i8      one scale per head from calibration, QuantizeLinear → DequantizeLinear along the head axis

A target that stores the type itself takes the nodes out. Keys and values are told apart: keys need more.

Shapes   k, v [T, Hkv, D]; scale [Hkv]
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize import ops
from builder.quantize.activations import LIMITS
from builder.quantize.kv_dtypes import parse_pair as parse_pair
from builder.quantize.weights import add_initializer
from plugins.paged_attention.op import PAGED_ATTENTION
from plugins.paged_attention.openvino import u4_group
from runtime.contract import DOMAIN

Array = npt.NDArray[np.float32]
CALIBRATED = ("f8", "i8")
_LARGEST = {"f8": LIMITS["fp8"], "i8": LIMITS["int8"]}
_ZERO = {"f8": ml_dtypes.float8_e4m3fn, "i8": np.int8}
_KEY, _VALUE = 1, 2  # inputs of PagedAttention


def cached_tensors(model: ir.Model, key_dtype: str, value_dtype: str) -> dict[str, int]:
    """Keys and values to calibrate, with their head axis, as `builder.calibrate.calibrate` takes them."""
    wanted = [index for index, dtype in ((_KEY, key_dtype), (_VALUE, value_dtype)) if dtype in CALIBRATED]
    return {str(node.inputs[index].name): -2 for node in _attention(model) for index in wanted}  # type: ignore[union-attr]


def unit_scales(model: ir.Model, key_dtype: str, value_dtype: str) -> dict[str, Array]:
    """`amax` for `insert` whose scales are 1: what stacks do that cast keys and values uncalibrated. E4M3 then ends at ±448."""
    found = {}
    for node in _attention(model):
        heads = node.attributes.get_int("num_kv_heads", 0)
        for index, dtype in ((_KEY, key_dtype), (_VALUE, value_dtype)):
            if dtype in CALIBRATED:
                found[str(node.inputs[index].name)] = np.full(heads, _LARGEST[dtype], np.float32)  # type: ignore[union-attr]
    return found


def insert(model: ir.Model, key_dtype: str, value_dtype: str, amax: Mapping[str, Array] | None = None) -> None:
    """In place. `amax` [Hkv] per name of `cached_tensors`."""
    group = u4_group(node.attributes.get_int("head_dim", 0) for node in _attention(model))
    for node in _attention(model):
        head_dim = node.attributes.get_int("head_dim", 0)
        for index, dtype in ((_KEY, key_dtype), (_VALUE, value_dtype)):
            if dtype != "f32":
                _insert(model.graph, node, index, dtype, amax or {}, group if dtype == "u4" and group else head_dim)
    ops.attach(model)


def _attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type == PAGED_ATTENTION]


def _insert(graph: ir.Graph, node: ir.Node, index: int, dtype: str, amax: Mapping[str, Array], block_size: int) -> None:
    x = node.inputs[index]
    assert x is not None
    name = str(x.name)
    if dtype in CALIBRATED:
        assert name in amax, f"no calibrated range for {name}"
        largest = np.asarray(amax[name], np.float32)
        scales = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[dtype])).astype(np.float32)
        scale = add_initializer(graph, f"{name}.cache_scale", ir.Tensor(scales))
        zero = add_initializer(graph, f"{name}.cache_zero", ir.Tensor(np.zeros(scales.shape, _ZERO[dtype])))
        quantize = ir.node("QuantizeLinear", [x, scale, zero], attributes={"axis": -2})
        stored = quantize.outputs[0]
        stored.name, stored.dtype, stored.shape = f"{name}.{dtype}", ir.DataType(int(zero.dtype)), x.shape  # type: ignore[arg-type]
        nodes = [quantize, ir.node("DequantizeLinear", [stored, scale, zero], attributes={"axis": -2})]
    elif dtype in ("u8", "u4"):
        attributes = {"levels": 256.0 if dtype == "u8" else 16.0, "block_size": block_size}
        nodes = [ir.node("StoreUInt", [x], attributes=attributes, domain=DOMAIN)]
    else:
        nodes = [ir.node("StoreFloat16" if dtype == "f16" else "StoreBFloat16", [x], domain=DOMAIN)]
    out = nodes[-1].outputs[0]
    out.name, out.dtype, out.shape = f"{name}.cached", ir.DataType.FLOAT, x.shape
    graph.insert_before(node, nodes)
    node.replace_input_with(index, out)
