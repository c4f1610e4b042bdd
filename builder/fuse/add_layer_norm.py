"""Residual add + LayerNormalization → forgeline::AddLayerNorm. See add_norm.py."""

from __future__ import annotations

import onnx_ir as ir

from builder.fuse.add_norm import fuse_add_norm
from builder.fuse.graph import Decline


def add_layer_norm(model: ir.Model, decline: Decline) -> int:
    return fuse_add_norm(model, "LayerNormalization", "AddLayerNorm", decline)
