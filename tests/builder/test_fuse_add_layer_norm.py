from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.add_layer_norm import add_layer_norm

RESIDUAL = "g (float[1,T,8] x, float[1,T,8] r) => (float[1,T,8] y, float[1,T,8] s) {{ s = Add(x, r)  y = {} }}"
NORM = "LayerNormalization <axis: int = -1, epsilon: float = 0.001>"


def test_residual_sum_and_norm_become_one_op_that_returns_both():
    model = parse(RESIDUAL.format(f"{NORM} (s, w, b)"), w=weight(8), b=weight(8, seed=1))
    assert fire(add_layer_norm, model) == (1, [])
    assert ops(model) == {"AddLayerNorm": 1}
    assert [value.name for value in model.graph.node(0).inputs] == ["x", "r", "w", "b"]
    assert [value.name for value in model.graph.node(0).outputs] == ["y", "s"]


def test_norm_without_bias_gets_one_of_zeros():
    model = parse(RESIDUAL.format(f"{NORM} (s, norm__weight)"), norm__weight=weight(8))
    assert fire(add_layer_norm, model) == (1, [])
    bias = model.graph.node(0).inputs[3]
    assert bias.name == "norm.bias"
    assert np.array_equal(bias.const_value.numpy(), np.zeros(8, np.float32))


def test_norm_over_two_axes_is_left_alone():
    model = parse(RESIDUAL.format("LayerNormalization <axis: int = 1> (s, w, b)"), w=weight(3, 8), b=weight(3, 8, seed=1))
    count, reasons = fire(add_layer_norm, model)
    assert count == 0
    assert reasons == ["LayerNormalization of s is over more than the last axis"]


def test_norm_whose_statistics_are_read_is_left_alone():
    text = """g (float[1,T,8] x, float[1,T,8] r) => (float[1,T,8] y, float[1,T,1] mean) {
        s = Add(x, r)  y, mean = LayerNormalization(s, w, b)
    }"""
    count, reasons = fire(add_layer_norm, parse(text, w=weight(8), b=weight(8, seed=1)))
    assert count == 0
    assert reasons == ["LayerNormalization of s also returns its statistics"]


def test_sum_with_a_bias_is_no_residual():
    text = f"g (float[1,T,8] x) => (float[1,T,8] y) {{ s = Add(x, c)  y = {NORM} (s, w, b) }}"
    count, reasons = fire(add_layer_norm, parse(text, w=weight(8), b=weight(8, seed=1), c=weight(8, seed=2)))
    assert count == 0
    assert reasons == ["s adds a constant, not a residual"]
