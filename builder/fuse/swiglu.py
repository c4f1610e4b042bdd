"""SiLU-gated unit → forgeline::SwiGLU.

    gate * sigmoid(gate) * up

Source   GLU Variants Improve Transformer, arXiv:2002.05202
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from builder.fuse.graph import Decline, Rule, is_constant, same_shape
from runtime.contract import DOMAIN


class SwiGLU(Rule):
    def pattern(self, op, gate, up):
        return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)

    def check(self, context, gate, up, **_):  # type: ignore[override]
        if is_constant(up):
            return self.fail(f"SiLU of {gate.name} is scaled by a constant, not gated", up)
        if not same_shape(gate, up):
            return self.fail(f"gate {gate.name} is {gate.shape} but up {up.name} is {up.shape}", gate, up)
        if gate.dtype is None or gate.dtype != up.dtype:
            return self.fail(f"gate {gate.name} is {gate.dtype} but up {up.name} is {up.dtype}", gate, up)
        return pattern.MatchResult()

    def rewrite(self, op, gate, up):
        return op.SwiGLU(gate, up, _domain=DOMAIN)


def swiglu(model: ir.Model, decline: Decline) -> int:
    return pattern.RewriteRuleSet([SwiGLU.rule(decline)], commute=True).apply_to_model(model)
