"""Rounding that depends on the values seen, as ONNX functions of standard ops: any ONNX runtime runs the file.

    DynamicInt8(x; block_size, padding)   Q/DQ to int8, a symmetric scale per `block_size` values along the last axis, from their
                                          extreme (DynamicScale); `padding` values are missing from a last, shorter group
    DynamicE4M3(x; block_size, padding)   the same to E4M3
    StoreFloat16(x)                       what a cache of that type gives back
    StoreBFloat16(x)
    StoreUInt(x; levels, block_size)      a cache of unsigned integers below `levels`: scale and offset per token and block_size
                                          values of a head, from their extremes

A target that does this itself takes the nodes out and sets its own option; see builder.targets.openvino_quantize.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript import script
from onnxscript.values import Opset

from runtime.contract import DOMAIN, DOMAIN_VERSION

# mypy: ignore-errors
# The bodies below are ONNX, parsed by onnxscript and never run as Python.
_forgeline = Opset(DOMAIN, DOMAIN_VERSION)


@script(_forgeline, default_opset=op)
def DynamicScale(x, block_size: int, padding: int, largest: float):
    size = op.Reshape(op.Constant(value_int=block_size), op.Constant(value_ints=[1]))
    shape = op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[-1]), size, axis=0)
    pads = op.Concat(op.Constant(value_ints=[0]), op.Reshape(op.Constant(value_int=padding), op.Constant(value_ints=[1])), axis=0)
    whole = op.Pad(x, pads, op.Constant(value_float=0.0), op.Constant(value_ints=[-1]))
    amax = op.ReduceMax(op.Abs(op.Reshape(whole, shape)), op.Constant(value_ints=[-1]), keepdims=0)
    one = op.Constant(value_float=1.0)
    return op.Where(op.Equal(amax, op.Constant(value_float=0.0)), one, op.Div(amax, op.Constant(value_float=largest)))


@script(_forgeline, default_opset=op)
def DynamicInt8(x, block_size: int, padding: int):
    scale = DynamicScale(x, block_size=block_size, padding=padding, largest=127.0)
    q = op.QuantizeLinear(x, scale, axis=-1, block_size=block_size, output_dtype=3)
    return op.DequantizeLinear(q, scale, axis=-1, block_size=block_size)


@script(_forgeline, default_opset=op)
def DynamicE4M3(x, block_size: int, padding: int):
    scale = DynamicScale(x, block_size=block_size, padding=padding, largest=448.0)
    q = op.QuantizeLinear(x, scale, axis=-1, block_size=block_size, output_dtype=17)
    return op.DequantizeLinear(q, scale, axis=-1, block_size=block_size)


@script(_forgeline, default_opset=op)
def StoreFloat16(x):
    return op.Cast(op.Cast(x, to=10), to=1)


@script(_forgeline, default_opset=op)
def StoreBFloat16(x):
    return op.Cast(op.Cast(x, to=16), to=1)


@script(_forgeline, default_opset=op)
def StoreUInt(x, levels: float, block_size: int):
    size = op.Reshape(op.Constant(value_int=block_size), op.Constant(value_ints=[1]))
    groups = op.Reshape(x, op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[-1]), size, axis=0))
    least = op.ReduceMin(groups, op.Constant(value_ints=[-1]), keepdims=1)
    span = op.Sub(op.ReduceMax(groups, op.Constant(value_ints=[-1]), keepdims=1), least)
    one = op.Constant(value_float=1.0)
    step = op.Div(span, op.Sub(op.Constant(value_float=levels), one))
    scale = op.Where(op.Equal(span, op.Constant(value_float=0.0)), one, step)
    stored = op.Add(op.Mul(op.Round(op.Div(op.Sub(groups, least), scale)), scale), least)
    return op.Reshape(stored, op.Shape(x))


_SCRIPTS = (DynamicScale, DynamicInt8, DynamicE4M3, StoreFloat16, StoreBFloat16, StoreUInt)
FUNCTIONS = {function.name: function for function in _SCRIPTS}
DYNAMIC = {"int8": DynamicInt8.name, "fp8": DynamicE4M3.name}
STORES = (StoreFloat16.name, StoreBFloat16.name, StoreUInt.name)


def attach(model: ir.Model) -> ir.Model:
    """Add the functions `model` uses; returns the same model."""
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    used |= {DynamicScale.name for name in used if name in DYNAMIC.values()}
    for name in sorted(used & set(FUNCTIONS)):
        function = ir.serde.deserialize_function(FUNCTIONS[name].to_function_proto())
        model.functions[function.identifier()] = function
        for domain, version in function.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
        model.opset_imports.setdefault(DOMAIN, DOMAIN_VERSION)
    return model
