"""GELU written out with tanh → Gelu(approximate="tanh"). GPT-2 and GPT-J export it so; others arrive as Gelu.

    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))

Source   Gaussian Error Linear Units, arXiv:1606.08415, section 2
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnxscript.rewriter import pattern

from builder.fuse.graph import Decline, Rule, is_op, scalar

_CONSTANTS = {"half": 0.5, "slope": math.sqrt(2 / math.pi), "cubic": 0.044715, "one": 1.0}


class GeluTanh(Rule):
    def pattern(self, op, x, half, slope, cubic, one):
        inner = op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), cubic)), slope)
        return op.Mul(op.Mul(x, half), op.Add(op.Tanh(inner), one))

    def check(self, context, x, **constants):  # type: ignore[override]
        for name, expected in _CONSTANTS.items():
            found = scalar(constants[name])
            if found is None or abs(found - expected) > 1e-6:
                return self.fail(f"GELU of {x.name} has {found} where {expected:.6f} belongs", x)
        return pattern.MatchResult()

    def rewrite(self, op, x, **_):
        return op.Gelu(x, approximate="tanh")


def gelu(model: ir.Model, decline: Decline) -> int:
    """Returns how many Gelu nodes the graph then has."""
    pattern.RewriteRuleSet([GeluTanh.rule(decline)], commute=True).apply_to_model(model)
    return sum(is_op(node, "Gelu") for node in model.graph)
