from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.layer_norm import layer_norm

SIGNATURE = "g (float[1,T,8] x) => (float[1,T,8] y)"
MEAN = "ReduceMean <keepdims: int = 1>"
WRITTEN_OUT = f"""{SIGNATURE} {{
    mean = {MEAN} (x, axes)         centred = Sub(x, mean)       square = Pow(centred, two)   variance = {MEAN} (square, axes)
    sum = Add(variance, epsilon)    root = Sqrt(sum)             inverse = Reciprocal(root)
    normed = Mul(centred, inverse)  y = Mul(w, normed)
}}"""
HALF_FUSED = f"""{SIGNATURE} {{
    mean = {MEAN} (x, axes)  centred = Sub(x, mean)
    y = RMSNormalization <axis: int = -1, epsilon: float = 0.001> (centred, w)
}}"""


def constants(axes=(-1,), **more):
    return {"axes": np.array(axes), "two": np.float32(2), "epsilon": np.float32(1e-3), "w": weight(8), **more}


def test_layer_norm_written_out_becomes_one_op():
    model = parse(WRITTEN_OUT, **constants())
    assert fire(layer_norm, model) == (1, [])
    assert ops(model) == {"LayerNormalization": 1}
    assert model.graph.node(0).attributes.get_float("epsilon") == np.float32(1e-3)


def test_layer_norm_that_the_exporter_took_for_an_rms_norm_becomes_one_op():
    model = parse(HALF_FUSED, **constants())
    assert fire(layer_norm, model) == (1, [])
    assert ops(model) == {"LayerNormalization": 1}
    assert model.graph.node(0).attributes.get_float("epsilon") == np.float32(1e-3)


def test_mean_over_another_axis_is_left_alone():
    for text in (WRITTEN_OUT, HALF_FUSED):
        count, reasons = fire(layer_norm, parse(text, **constants(axes=(1,))))
        assert count == 0
        assert any(reason.startswith("LayerNorm of x takes its mean over axes [(1,)") for reason in reasons)


def test_weight_per_head_is_left_alone():
    text = WRITTEN_OUT.replace("[1,T,8]", "[1,T,4,8]")
    count, reasons = fire(layer_norm, parse(text, **constants(w=weight(4, 8))))
    assert count == 0
    assert "LayerNorm of x has a weight of shape [4,8] for rows of 8" in reasons


def test_subtracting_something_else_is_no_layer_norm():
    text = HALF_FUSED.replace("ReduceMean", "ReduceMax")
    assert fire(layer_norm, parse(text, **constants())) == (0, [])
