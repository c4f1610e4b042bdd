"""What the fused ops mean: ONNX functions of standard ops, attached to the model so that any ONNX runtime runs the file.

    SwiGLU(gate, up)                      gate * sigmoid(gate) * up
    GeGLU(gate, up; approximate)          Gelu(gate) * up
    AddRMSNorm(x, residual, weight; epsilon)             →  normed, total = x + residual
    AddLayerNorm(x, residual, weight, bias; epsilon)     →  normed, total = x + residual

A lowering that has no kernel for them calls `inline_forgeline_ops` and sees standard ops again; PagedAttention stays.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import opset23 as op
from onnxscript import script
from onnxscript.values import Opset

from builder.fuse.graph import is_op
from runtime.contract import DOMAIN, DOMAIN_VERSION

# mypy: ignore-errors
# The bodies below are ONNX, parsed by onnxscript and never run as Python.
_forgeline = Opset(DOMAIN, DOMAIN_VERSION)


@script(_forgeline, default_opset=op)
def SwiGLU(gate, up):
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


@script(_forgeline, default_opset=op)
def GeGLU(gate, up, approximate: str):
    return op.Mul(op.Gelu(gate, approximate=approximate), up)


@script(_forgeline, default_opset=op)
def AddRMSNorm(x, residual, weight, epsilon: float):
    total = op.Add(x, residual)
    normed = op.RMSNormalization(total, weight, axis=-1, epsilon=epsilon, stash_type=1)
    return normed, total


@script(_forgeline, default_opset=op)
def AddLayerNorm(x, residual, weight, bias, epsilon: float):
    total = op.Add(x, residual)
    normed = op.LayerNormalization(total, weight, bias, axis=-1, epsilon=epsilon, stash_type=1)
    return normed, total


FUSED_OPS = {function.name: function for function in (SwiGLU, GeGLU, AddRMSNorm, AddLayerNorm)}


def attach(model: ir.Model) -> ir.Model:
    """Add the functions of the fused ops that `model` uses; returns the same model."""
    for name, scripted in FUSED_OPS.items():
        if any(is_op(node, name, DOMAIN) for node in model.graph.all_nodes()):
            function = ir.serde.deserialize_function(scripted.to_function_proto())
            model.functions[function.identifier()] = function
            for domain, version in function.opset_imports.items():
                model.opset_imports.setdefault(domain, version)
    return model


def inline_forgeline_ops(model: ir.Model) -> int:
    """Expand the fused ops to standard ops in place; returns how many. PagedAttention and MoEExperts stay as they are."""
    attach(model)
    before = sum(node.domain == DOMAIN and node.op_type in FUSED_OPS for node in model.graph)
    common.InlinePass(criteria=lambda function: function.domain == DOMAIN and function.name in FUSED_OPS)(model)
    return before
