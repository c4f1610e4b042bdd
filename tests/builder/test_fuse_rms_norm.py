from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.rms_norm import rms_norm

NORM = """g (float[1,T,8] x) => (float[1,T,{width}] y) {{
    square = Pow(x, two)   mean = ReduceMean <keepdims: int = 1> (square, axes)   sum = Add(mean, epsilon)
    root = Sqrt(sum)       inverse = Reciprocal(root)        normed = Mul(x, inverse)   y = Mul({product})
}}"""


def norm(product="normed, w", width=8, axes=(-1,), two=2.0, w=None):
    return parse(
        NORM.format(product=product, width=width),
        two=np.float32(two), axes=np.array(axes), epsilon=np.float32(1e-3), w=weight(8) if w is None else w,
    )  # fmt: skip


def test_rms_norm_written_out_becomes_one_op():
    for product in ("normed, w", "w, normed"):
        model = norm(product)
        assert fire(rms_norm, model) == (1, [])
        assert ops(model) == {"RMSNormalization": 1}
        assert model.graph.node(0).attributes.get_float("epsilon") == np.float32(1e-3)


def test_mean_over_another_axis_is_left_alone():
    count, reasons = fire(rms_norm, norm(axes=(1,)))
    assert count == 0
    assert "RMSNorm of x takes its mean over axes (1,), not the last" in reasons


def test_weight_per_token_is_left_alone():
    count, reasons = fire(rms_norm, norm(w=weight(3, 8)))
    assert count == 0
    assert "RMSNorm of x has a weight of shape [3,8] for rows of 8" in reasons


def test_mean_of_another_power_is_no_rms_norm():
    assert fire(rms_norm, norm(two=4.0)) == (0, [])


def test_norm_that_the_exporter_made_counts():
    assert fire(rms_norm, parse("g (float[1,T,8] x) => (float[1,T,8] y) { y = RMSNormalization(x, w) }", w=weight(8))) == (1, [])
