"""Operator fusions on the canonical graph: `fuse(model, spec)` runs `PASSES` in order and checks their counts.

The graph stays fp32 and target-neutral. Fused ops live in domain forgeline and come with an ONNX function of standard ops
(functions.py), so ONNX Runtime runs the fused file as it is; a lowering may expand them again with `inline_forgeline_ops`.

Raises  FusionMismatch when a count is not what the model's layers imply (expectations.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from builder.fuse.add_layer_norm import add_layer_norm
from builder.fuse.add_rms_norm import add_rms_norm
from builder.fuse.common_subexpressions import common_subexpressions
from builder.fuse.dead_code import dead_code
from builder.fuse.expectations import check_counts, facts
from builder.fuse.fold_constants import fold_constants
from builder.fuse.functions import attach, inline_forgeline_ops
from builder.fuse.gate_up_merge import gate_up_merge
from builder.fuse.geglu import geglu
from builder.fuse.gelu import gelu
from builder.fuse.graph import Decline
from builder.fuse.layer_norm import layer_norm
from builder.fuse.qkv_merge import qkv_merge
from builder.fuse.rms_norm import rms_norm
from builder.fuse.rotary import rotary
from builder.fuse.row_reshapes import row_reshapes
from builder.fuse.swiglu import swiglu
from runtime.contract import ModelSpec

__all__ = ["PASSES", "FusionReport", "fuse", "inline_forgeline_ops"]

# Name → pass; a pass returns its count. The order matters: norms before residual norms, gates before the merge they name.
PASSES: dict[str, Callable[[ir.Model, Decline], int]] = {
    "fold_constants": fold_constants,
    "common_subexpressions": common_subexpressions,
    "row_reshapes": row_reshapes,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "gelu": gelu,
    "swiglu": swiglu,
    "geglu": geglu,
    "qkv_merge": qkv_merge,
    "gate_up_merge": gate_up_merge,
    "add_rms_norm": add_rms_norm,
    "add_layer_norm": add_layer_norm,
    "dead_code": dead_code,
}


@dataclass(frozen=True)
class FusionReport:
    nodes_before: int
    nodes_after: int
    counts: dict[str, int]  # pass → count, in the order they ran
    expected: dict[str, int]  # pass → count implied by the layers; the other passes are not checked
    declined: dict[str, list[str]]  # pass → why matches were left alone
    ops: dict[str, int]  # op → nodes after fusing, most frequent first


def fuse(model: ir.Model, spec: ModelSpec) -> FusionReport:
    """Fuse `model` in place. Call once, on the exported graph."""
    nodes_before = len(model.graph)
    known = facts(model)
    functions = dict(model.functions)
    model.functions.clear()  # rewrite the graph, not the specifications of its custom ops
    counts: dict[str, int] = {}
    declined: dict[str, list[str]] = {}
    for name, run in PASSES.items():
        reasons: list[str] = []
        counts[name] = run(model, reasons.append)
        if reasons:
            declined[name] = reasons
    model.functions.update(functions)
    attach(model)
    expected = check_counts(counts, spec, known, declined)
    ops = Counter(node.op_type for node in model.graph)
    return FusionReport(nodes_before, len(model.graph), counts, expected, declined, dict(ops.most_common()))
