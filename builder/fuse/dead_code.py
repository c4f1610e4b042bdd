"""Dead code: nodes and initializers whose result nobody reads, and the no-ops that the fusions left behind."""

from __future__ import annotations

import onnx_ir as ir
import onnxscript.rewriter
from onnx_ir.passes import common

from builder.fuse.graph import Decline


def dead_code(model: ir.Model, decline: Decline) -> int:
    """Returns how many nodes disappeared."""
    before = len(model.graph)
    common.RemoveUnusedNodesPass()(model)
    onnxscript.rewriter.rewrite(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    return before - len(model.graph)
