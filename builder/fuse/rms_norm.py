"""RMSNorm written out → opset-23 RMSNormalization. Gemma's 1 + w arrives here already folded into the weight.

    weight * (x * 1 / sqrt(mean(x²) + epsilon))

Source   Root Mean Square Layer Normalization, arXiv:1910.07467
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from builder.fuse.graph import Decline, Rule, ints, is_op, scalar, static_shape


def normalized(op, x, axes, epsilon):
    """x / sqrt(mean(x²) + epsilon), as exported by torch."""
    mean_square = op.ReduceMean(op.Pow(x, 2.0), axes, keepdims=1, _allow_other_attributes=True)
    return op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean_square, epsilon))))


class RMSNorm(Rule):
    def pattern(self, op, x, axes, epsilon, weight):
        return op.Mul(normalized(op, x, axes, epsilon), weight)

    def check(self, context, x, axes, epsilon, weight, **_):  # type: ignore[override]
        shape = static_shape(x)
        if shape is None or ints(axes) not in ((-1,), (len(shape) - 1,)):
            return self.fail(f"RMSNorm of {x.name} takes its mean over axes {ints(axes)}, not the last", x)
        if scalar(epsilon) is None:
            return self.fail(f"RMSNorm of {x.name} has a computed epsilon", epsilon)
        if static_shape(weight) != shape[-1:]:
            return self.fail(f"RMSNorm of {x.name} has a weight of shape {weight.shape} for rows of {shape[-1]}", weight)
        return pattern.MatchResult()

    def rewrite(self, op, x, epsilon, weight, **_):
        return op.RMSNormalization(x, weight, axis=-1, epsilon=scalar(epsilon), stash_type=1)


def rms_norm(model: ir.Model, decline: Decline) -> int:
    """Returns how many RMSNormalization nodes the graph then has; the exporter may have made some."""
    pattern.RewriteRuleSet([RMSNorm.rule(decline)], commute=True).apply_to_model(model)
    return sum(is_op(node, "RMSNormalization") for node in model.graph)
