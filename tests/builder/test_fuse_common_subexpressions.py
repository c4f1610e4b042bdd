from __future__ import annotations

from fuse_graphs import fire, ops, parse

from builder.fuse.common_subexpressions import common_subexpressions


def test_repeated_cos_and_sin_are_computed_once():
    text = """g (float[1,T,4] x) => (float[1,T,4] y, float[1,T,4] z) {
        a = Cos(x)  b = Sin(x)  y = Add(a, b)  c = Cos(x)  d = Sin(x)  z = Sub(c, d)
    }"""
    model = parse(text)
    assert fire(common_subexpressions, model) == (2, [])
    assert ops(model) == {"Cos": 1, "Sin": 1, "Add": 1, "Sub": 1}


def test_same_op_with_another_attribute_is_another_expression():
    text = """g (float[1,T,4] x) => (float[1,T,4] y) {
        a = Softmax <axis: int = -1> (x)  b = Softmax <axis: int = 1> (x)  y = Add(a, b)
    }"""
    model = parse(text)
    assert fire(common_subexpressions, model) == (0, [])
    assert ops(model) == {"Softmax": 2, "Add": 1}
