"""GELU-gated unit (Gemma) → forgeline::GeGLU, exact or tanh.

    Gelu(gate) * up

Source   GLU Variants Improve Transformer, arXiv:2002.05202
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from builder.fuse.graph import Decline, Rule, is_constant, same_shape
from runtime.contract import DOMAIN


class GeGLU(Rule):
    def pattern(self, op, gate, up):
        return op.Mul(op.Gelu(gate, _allow_other_attributes=True, _outputs=["activated"]), up)

    def check(self, context, gate, up, **_):  # type: ignore[override]
        if is_constant(up):
            return self.fail(f"GELU of {gate.name} is scaled by a constant, not gated", up)
        if not same_shape(gate, up):
            return self.fail(f"gate {gate.name} is {gate.shape} but up {up.name} is {up.shape}", gate, up)
        if gate.dtype is None or gate.dtype != up.dtype:
            return self.fail(f"gate {gate.name} is {gate.dtype} but up {up.name} is {up.dtype}", gate, up)
        return pattern.MatchResult()

    def rewrite(self, op, gate, up, activated):
        approximate = activated.producer().attributes.get_string("approximate", "none")
        return op.GeGLU(gate, up, approximate=approximate, _domain=DOMAIN)


def geglu(model: ir.Model, decline: Decline) -> int:
    return pattern.RewriteRuleSet([GeGLU.rule(decline)], commute=True).apply_to_model(model)
