"""Rows that have logits are picked as soon as nothing else is needed of the others."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from fuse_graphs import fire, parse, weight

from builder.targets.openvino_logits import pick_rows_early

SIGNATURE = "g (int64[T] input_ids, float[1,T,8] x, float[1,T,8] attention, int64[T] logits_indices)"
WEIGHTS = {"wo": weight(8, 8), "wu": weight(8, 12), "wd": weight(6, 8), "norm": weight(8), "head": weight(8, 5)}
LAYER = """o = MatMul(attention, wo)  n, r = forgeline.AddRMSNorm <epsilon: float = 1e-5> (x, o, norm)  gu = MatMul(n, wu)
    g, u = Split <axis: int = -1, num_outputs: int = 2> (gu)  m = forgeline.SwiGLU(g, u)  d = MatMul(m, wd)
    h, s = forgeline.AddRMSNorm <epsilon: float = 1e-5> (r, d, norm)"""
HEAD = "rows = Gather <axis: int = 1> (h, logits_indices)  y = MatMul(rows, head)"


def picked(body: str, outputs: str = "float[1,T,5] y") -> list[str]:
    """What is gathered, once the pass has left the outputs as they were."""
    model = parse(f"{SIGNATURE} => ({outputs}) {{ {body} }}", **WEIGHTS)
    for node in model.graph:
        for value in node.outputs:  # shape inference does not know forgeline's ops
            if value.shape is None:
                width = {"g": 6, "u": 6, "m": 6, "gu": 12}.get(value.name or "", 8)
                value.shape = ir.Shape((1, "T", width))

    def apply(model: ir.Model, _: object) -> int:
        pick_rows_early(model.graph)
        return 0

    fire(apply, model)
    return sorted(str(node.inputs[0].name) for node in model.graph if node.op_type == "Gather" and node.inputs[0] is not None)


def test_a_last_layer_runs_on_the_rows_that_have_logits() -> None:
    assert picked(f"{LAYER} {HEAD}") == ["attention", "x"]


@pytest.mark.parametrize(
    ("body", "outputs", "gathered"),
    [
        (f"{LAYER} {HEAD} all = Identity(s)", "float[1,T,5] y, float[1,T,8] all", ["h"]),
        (f"{LAYER} {HEAD} all = Identity(r)", "float[1,T,5] y, float[1,T,8] all", ["n", "r"]),
        (f"{LAYER} {HEAD}".replace("m = ", "c = CumSum(g, one)  m = ").replace("SwiGLU(g", "SwiGLU(c"), "", ["c", "r", "u"]),
        (f"{LAYER} {HEAD}".replace("Split <axis: int = -1", "Split <axis: int = 2"), "", ["attention", "x"]),
    ],
    ids=["total", "residual", "rows that depend on each other", "axis"],
)
def test_what_needs_all_rows_has_them(body: str, outputs: str, gathered: list[str]) -> None:
    body = body.replace("c = CumSum", "one = Constant <value_int: int = 1> ()  c = CumSum")
    assert picked(body, outputs or "float[1,T,5] y") == gathered
