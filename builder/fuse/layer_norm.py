"""LayerNorm without bias (Cohere), written out or half fused by the exporter → LayerNormalization.

weight * (c * 1 / sqrt(mean(c²) + epsilon))   with c = x - mean(x)
RMSNormalization(c, weight)
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from builder.fuse.graph import Decline, Rule, ints, is_op, scalar, static_shape
from builder.fuse.rms_norm import normalized


class _Centred(Rule):
    def centred(self, op, x, mean_axes):
        return op.Sub(x, op.ReduceMean(x, mean_axes, keepdims=1, _allow_other_attributes=True))

    def check_rows(self, x, weight, *axes):
        shape = static_shape(x)
        if shape is None or any(ints(each) not in ((-1,), (len(shape) - 1,)) for each in axes):
            return self.fail(f"LayerNorm of {x.name} takes its mean over axes {[ints(each) for each in axes]}, not the last", x)
        if static_shape(weight) != shape[-1:]:
            return self.fail(f"LayerNorm of {x.name} has a weight of shape {weight.shape} for rows of {shape[-1]}", weight)
        return pattern.MatchResult()


class LayerNormWrittenOut(_Centred):
    def pattern(self, op, x, mean_axes, axes, epsilon, weight):
        return op.Mul(normalized(op, self.centred(op, x, mean_axes), axes, epsilon), weight)

    def check(self, context, x, mean_axes, axes, epsilon, weight, **_):  # type: ignore[override]
        if scalar(epsilon) is None:
            return self.fail(f"LayerNorm of {x.name} has a computed epsilon", epsilon)
        return self.check_rows(x, weight, mean_axes, axes)

    def rewrite(self, op, x, epsilon, weight, **_):
        return op.LayerNormalization(x, weight, axis=-1, epsilon=scalar(epsilon), stash_type=1)


class LayerNormOfRMSNorm(_Centred):
    def pattern(self, op, x, mean_axes, weight):
        centred = self.centred(op, x, mean_axes)
        return op.RMSNormalization(centred, weight, axis=-1, _allow_other_attributes=True, _outputs=["normed"])

    def check(self, context, x, mean_axes, weight, **_):  # type: ignore[override]
        return self.check_rows(x, weight, mean_axes)

    def rewrite(self, op, x, weight, normed, **_):
        epsilon = normed.producer().attributes.get_float("epsilon", 1e-5)
        return op.LayerNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1)


def layer_norm(model: ir.Model, decline: Decline) -> int:
    """Returns how many LayerNormalization nodes the graph then has."""
    pattern.RewriteRuleSet([LayerNormWrittenOut.rule(decline)], commute=True).apply_to_model(model)
    pattern.RewriteRuleSet([LayerNormOfRMSNorm.rule(decline)]).apply_to_model(model)
    return sum(is_op(node, "LayerNormalization") for node in model.graph)
