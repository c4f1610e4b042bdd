"""Residual add + LayerNormalization → forgeline::AddLayerNorm. See add_norm.py.

A norm without bias (Cohere) gets one of zeros: ONNX Runtime 1.32 crashes on a model-local function with an omitted input.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder.fuse.add_norm import fuse_add_norm
from builder.fuse.graph import Decline, add_initializer, constant, is_op


def add_layer_norm(model: ir.Model, decline: Decline) -> int:
    for norm in model.graph:
        if is_op(norm, "LayerNormalization") and (len(norm.inputs) < 3 or norm.inputs[2] is None):
            weight = constant(norm.inputs[1])
            if weight is not None:
                name = str(norm.inputs[1].name).removesuffix(".weight")  # type: ignore[union-attr]
                norm.resize_inputs(3)
                norm.replace_input_with(2, add_initializer(model.graph, f"{name}.bias", np.zeros_like(weight)))
    return fuse_add_norm(model, "LayerNormalization", "AddLayerNorm", decline)
