from __future__ import annotations

from fuse_graphs import fire, ops, parse, weight

from builder.fuse.add_rms_norm import add_rms_norm

RESIDUAL = "g (float[1,T,8] x, float[1,T,8] r) => (float[1,T,8] y, float[1,T,8] s) {{ {body} }}"
NORM = "RMSNormalization <axis: int = -1, epsilon: float = 0.001>"


def test_residual_sum_and_norm_become_one_op_that_returns_both():
    model = parse(RESIDUAL.format(body=f"s = Add(x, r)  y = {NORM} (s, w)"), w=weight(8))
    assert fire(add_rms_norm, model) == (1, [])
    assert ops(model) == {"AddRMSNorm": 1}
    node = model.graph.node(0)
    assert [value.name for value in node.inputs] == ["x", "r", "w"]
    assert [value.name for value in node.outputs] == ["y", "s"]
    assert abs(node.attributes.get_float("epsilon") - 0.001) < 1e-9


def test_a_second_norm_of_the_same_sum_reads_the_returned_sum():  # GPT-NeoX's parallel block, with RMSNorm
    text = f"""g (float[1,T,8] x, float[1,T,8] r) => (float[1,T,8] y, float[1,T,8] z) {{
        s = Add(x, r)  y = {NORM} (s, w)  z = {NORM} (s, v)
    }}"""
    model = parse(text, w=weight(8), v=weight(8, seed=1))
    assert fire(add_rms_norm, model) == (1, [])
    assert ops(model) == {"AddRMSNorm": 1, "RMSNormalization": 1}


def test_sum_with_a_bias_is_no_residual():
    text = f"g (float[1,T,8] x) => (float[1,T,8] y) {{ s = Add(x, b)  y = {NORM} (s, w) }}"
    count, reasons = fire(add_rms_norm, parse(text, w=weight(8), b=weight(8, seed=1)))
    assert count == 0
    assert reasons == ["s adds a constant, not a residual"]


def test_broadcast_sum_is_no_residual():
    text = f"g (float[1,T,8] x, float[1,1,8] r) => (float[1,T,8] y) {{ s = Add(x, r)  y = {NORM} (s, w) }}"
    count, reasons = fire(add_rms_norm, parse(text, w=weight(8)))
    assert count == 0
    assert reasons == ["s adds [1,T,8] and [1,1,8]"]


def test_norm_of_a_product_is_left_alone():
    model = parse(RESIDUAL.format(body=f"s = Mul(x, r)  y = {NORM} (s, w)"), w=weight(8))
    assert fire(add_rms_norm, model) == (0, [])
