"""Constant folding and no-op removal: what the exporter computes from constants alone becomes an initializer.

The exporter folds too (export.py); what is left here is small, and nothing at all would be a sign of a graph built otherwise.
Large results stay computed, so that a weight is never stored twice.
"""

from __future__ import annotations

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter
from onnx_ir.passes import common

from builder.fuse.graph import Decline, typed_like

_FOLD_LIMIT = 1 << 16  # elements
_SAME_SHAPE_OPS = ("Cos", "Sin")  # outputs that the exporter's own rotary fusion leaves without a shape


def fold_constants(model: ir.Model, decline: Decline) -> int:
    """Returns how many nodes disappeared."""
    before = len(model.graph)
    onnxscript.optimizer.fold_constants(
        model, onnx_shape_inference=True, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT
    )
    onnxscript.rewriter.rewrite(model)  # no-ops, back-to-back reshapes and transposes
    common.IdentityEliminationPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        if node.op_type in _SAME_SHAPE_OPS and node.inputs[0] is not None and node.outputs[0].shape is None:
            typed_like(node.outputs[0], node.inputs[0])
    return before - len(model.graph)
