from __future__ import annotations

import pytest
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.geglu import geglu

SIGNATURE = "g (float[1,T,8] gate, float[1,T,8] up) => (float[1,T,8] y)"


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("product", ["Mul(a, up)", "Mul(up, a)"])
def test_gated_gelu_becomes_one_op_and_keeps_its_kind(approximate, product):
    model = parse(f'{SIGNATURE} {{ a = Gelu <approximate: string = "{approximate}"> (gate)  y = {product} }}')
    assert fire(geglu, model) == (1, [])
    assert ops(model) == {"GeGLU": 1}
    assert model.graph.node(0).attributes.get_string("approximate") == approximate


def test_gelu_without_the_attribute_is_the_exact_one():
    model = parse(f"{SIGNATURE} {{ a = Gelu(gate)  y = Mul(a, up) }}")
    assert fire(geglu, model) == (1, [])
    assert model.graph.node(0).attributes.get_string("approximate") == "none"


def test_gelu_times_a_constant_is_not_gated():
    model = parse("g (float[1,T,8] x) => (float[1,T,8] y) { a = Gelu(x)  y = Mul(a, w) }", w=weight(8))
    count, reasons = fire(geglu, model)
    assert count == 0
    assert "GELU of x is scaled by a constant, not gated" in reasons


def test_gate_of_another_width_is_left_alone():
    model = parse("g (float[1,T,8] gate, float[1,T,1] up) => (float[1,T,8] y) { a = Gelu(gate)  y = Mul(a, up) }")
    count, reasons = fire(geglu, model)
    assert count == 0
    assert "gate gate is [1,T,8] but up up is [1,T,1]" in reasons
