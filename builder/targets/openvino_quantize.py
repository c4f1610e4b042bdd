"""Rounding of inputs and KV cache, on its way to OpenVINO: an option of the plug-in where it has the kernel, else written out.

    DynamicInt8            goes: DYNAMIC_QUANTIZATION_GROUP_SIZE makes integer layers do it
    Store…                 go: KEY_CACHE_PRECISION and VALUE_CACHE_PRECISION make attention do it
    DynamicE4M3            written out in f32, bit for bit what E4M3 hardware rounds to: emulated
    static Q/DQ            written out in f32: emulated

OpenVINO's own conversion to E4M3 rounds twice (wrong for 326 of 20,000 values close to a tie), so rounding is written as
round(x / step) · step with the step of x's power of two from a table. The power is the floor of a logarithm; where that is off,
just below or at a power of two, both neighbours' steps round x to the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builder.quantize import ops
from builder.targets.openvino_build import NodeBuilder, replace
from runtime.contract import DOMAIN

_STEPS = (2.0 ** np.arange(-9, 6)).astype(np.float32)  # of the powers -6 … 8: three bits behind the leading one


@dataclass(frozen=True)
class Rounding:
    group_size: int  # of integer layers' dynamic inputs; 0 = they stay in f32
    emulated: str  # the type whose arithmetic is written out: fp8, int8; empty when none is


def lower_rounding(model: ir.Model) -> Rounding:
    """In place."""
    groups: set[int] = set()
    emulated = ""
    for node in list(model.graph):
        if node.domain == DOMAIN and (node.op_type == ops.DYNAMIC["int8"] or node.op_type in ops.STORES):
            if node.op_type == ops.DYNAMIC["int8"]:
                groups.add(node.attributes.get_int("block_size", 0))
            assert node.inputs[0] is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)
        elif node.domain == DOMAIN and node.op_type == ops.DYNAMIC["fp8"]:
            _write_out(node, _token_scale(node), "fp8")
            emulated = "fp8"
        elif node.op_type == "QuantizeLinear" and node.domain == "":
            emulated = "fp8" if node.outputs[0].dtype == ir.DataType.FLOAT8E4M3FN else "int8"
            (use,) = node.outputs[0].uses()
            _write_out(node, node.inputs[1], emulated, use.node)
    assert len(groups) <= 1, f"OpenVINO has one group size for all layers, not {sorted(groups)}"
    return Rounding(next(iter(groups), 0), emulated)


def _token_scale(node: ir.Node) -> ir.Value:
    build = NodeBuilder(node.graph, anchor=node)  # type: ignore[arg-type]
    amax = build.op("ReduceMax", [build.op("Abs", [node.inputs[0]]), build.constant([-1])], {"keepdims": 1})
    zero, one, largest = (build.constant(value, np.float32) for value in (0.0, 1.0, 448.0))
    return build.op("Where", [build.op("Equal", [amax, zero]), one, build.op("Div", [amax, largest])])


def _write_out(node: ir.Node, scale: ir.Value | None, dtype: str, dequantize: ir.Node | None = None) -> None:
    """round(x / scale) · scale in place of `node`, or of `node` and the DequantizeLinear behind it."""
    graph, last = node.graph, dequantize or node
    assert graph is not None
    build = NodeBuilder(graph, anchor=node)
    x = build.op("Div", [node.inputs[0], scale])
    rounded = e4m3(build, x) if dtype == "fp8" else _int8(build, x)
    replace(last, build.op("Mul", [rounded, scale]))
    if dequantize is not None:
        graph.remove(node, safe=True)


def _int8(build: NodeBuilder, x: ir.Value) -> ir.Value:
    low, high = build.constant(-128.0, np.float32), build.constant(127.0, np.float32)
    return build.op("Clip", [build.op("Round", [x]), low, high])


def e4m3(build: NodeBuilder, x: ir.Value) -> ir.Value:
    """To nearest even, saturating, NaN kept."""

    def constant(value: float) -> ir.Value:
        return build.constant(value, np.float32)

    clipped = build.op("Clip", [x, constant(-448.0), constant(448.0)])
    magnitude = build.op("Max", [build.op("Abs", [clipped]), constant(2.0**-6)])
    power = build.op("Floor", [build.op("Mul", [build.op("Log", [magnitude]), constant(float(1 / np.log(2)))])])
    place = build.op("Add", [build.op("Clip", [power, constant(-6.0), constant(8.0)]), constant(6.0)])
    index = build.op("Cast", [place], {"to": int(ir.DataType.INT64)})
    step = build.op("Gather", [_steps(build), index])
    rounded = build.op("Mul", [build.op("Round", [build.op("Div", [clipped, step])]), step])
    return build.op("Where", [build.op("IsNaN", [x]), x, rounded])


def _steps(build: NodeBuilder) -> ir.Value:
    name = "lowered.e4m3_steps"
    if name not in build.graph.initializers:
        return build.initializer(name, ir.Tensor(_STEPS))
    return build.graph.initializers[name]
