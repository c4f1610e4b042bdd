"""Common subexpressions: each layer's cos and sin of the same angles are computed once for the whole model."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from builder.fuse.graph import Decline


def common_subexpressions(model: ir.Model, decline: Decline) -> int:
    """Returns how many nodes disappeared."""
    before = len(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    return before - len(model.graph)
