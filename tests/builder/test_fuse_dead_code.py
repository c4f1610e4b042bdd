from __future__ import annotations

from fuse_graphs import fire, ops, parse, weight

from builder.fuse.dead_code import dead_code


def test_unread_nodes_and_initializers_disappear():
    text = "g (float[1,T,8] x) => (float[1,T,8] y) { a = Mul(x, w)  b = Neg(a)  y = Cos(x) }"
    model = parse(text, w=weight(8))
    assert fire(dead_code, model) == (2, [])
    assert ops(model) == {"Cos": 1}
    assert not model.graph.initializers


def test_transposes_that_cancel_disappear():
    text = """g (float[1,T,2,4] x) => (float[1,T,2,4] y) {
        a = Transpose <perm = [0, 2, 1, 3]> (x)  b = Transpose <perm = [0, 2, 1, 3]> (a)  y = Neg(b)
    }"""
    model = parse(text)
    assert fire(dead_code, model) == (2, [])
    assert ops(model) == {"Neg": 1}


def test_everything_read_stays():
    model = parse("g (float[1,T,8] x) => (float[1,T,8] y, float[1,T,8] z) { y = Neg(x)  z = Cos(y) }")
    assert fire(dead_code, model) == (0, [])
    assert ops(model) == {"Neg": 1, "Cos": 1}
