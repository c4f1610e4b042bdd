from __future__ import annotations

import numpy as np
import pytest
from fuse_graphs import fire, ops, parse

from builder.fuse.swiglu import swiglu

SIGNATURE = "g (float[1,T,8] gate, float[1,T,8] up) => (float[1,T,8] y)"


@pytest.mark.parametrize(
    "body",
    [
        "s = Sigmoid(gate)  a = Mul(gate, s)  y = Mul(a, up)",
        "s = Sigmoid(gate)  a = Mul(s, gate)  y = Mul(up, a)",  # Phi-3 writes up * silu(gate)
    ],
)
def test_gated_silu_becomes_one_op(body):
    model = parse(f"{SIGNATURE} {{ {body} }}")
    assert fire(swiglu, model) == (1, [])
    assert ops(model) == {"SwiGLU": 1}
    assert [value.name for value in model.graph.node(0).inputs] == ["gate", "up"]


def test_gate_of_another_width_is_left_alone():
    model = parse(
        "g (float[1,T,8] gate, float[1,T,1] up) => (float[1,T,8] y) { s = Sigmoid(gate) a = Mul(gate, s) y = Mul(a, up) }"
    )
    count, reasons = fire(swiglu, model)
    assert count == 0
    assert "gate gate is [1,T,8] but up up is [1,T,1]" in reasons


def test_silu_times_a_constant_is_not_gated():
    model = parse(
        "g (float[1,T,8] x) => (float[1,T,8] y) { s = Sigmoid(x) a = Mul(x, s) y = Mul(a, w) }", w=np.full(8, 2, np.float32)
    )
    count, reasons = fire(swiglu, model)
    assert count == 0
    assert "SiLU of x is scaled by a constant, not gated" in reasons


def test_sigmoid_of_something_else_is_no_silu():
    model = parse("g (float[1,T,8] x, float[1,T,8] z) => (float[1,T,8] y) { s = Sigmoid(z) a = Mul(x, s) y = Mul(a, x) }")
    assert fire(swiglu, model) == (0, [])
