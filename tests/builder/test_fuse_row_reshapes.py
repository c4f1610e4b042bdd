from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.row_reshapes import row_reshapes

ROWS = {"rows4": np.array([-1, 4]), "back6": np.array([1, -1, 6]), "w": weight(4, 6), "b": weight(6)}


def test_reshapes_around_a_linear_layer_cancel():  # GPT-2
    text = """g (float[1,T,4] x) => (float[1,T,6] z) {
        r = Reshape(x, rows4)  m = MatMul(r, w)  a = Add(m, b)  y = Reshape(a, back6)  z = Neg(y)
    }"""
    model = parse(text, **ROWS)
    assert fire(row_reshapes, model) == (2, [])
    assert ops(model) == {"MatMul": 1, "Add": 1, "Neg": 1}


def test_reshape_moves_past_a_residual_block():  # OPT
    text = """g (float[1,T,4] x) => (float[1,T,4] z) {
        r = Reshape(x, rows4)  n = LayerNormalization <axis: int = -1> (r, lw, lb)  m = MatMul(n, w)  a = Relu(m)
        d = MatMul(a, v)  s = Add(r, d)  y = Reshape(s, back4)  z = Neg(y)
    }"""
    more = {"lw": weight(4), "lb": weight(4, seed=1), "v": weight(6, 4), "back4": np.array([1, -1, 4])}
    model = parse(text, **ROWS, **more)
    assert fire(row_reshapes, model) == (2, [])
    assert ops(model) == {"LayerNormalization": 1, "MatMul": 2, "Relu": 1, "Add": 1, "Neg": 1}


def test_reshape_stays_when_a_reader_needs_two_dimensions():  # expert MLPs
    text = "g (float[1,T,4] x) => (float[T,6] y, float[T,2] i) { r = Reshape(x, rows4)  y = MatMul(r, w)  i, j = TopK(r, two) }"
    text = text.replace("float[T,2] i", "float[T,2] i, int64[T,2] j")
    model = parse(text, **ROWS, two=np.array([2]))
    assert fire(row_reshapes, model) == (0, [])
    assert ops(model) == {"Reshape": 1, "MatMul": 1, "TopK": 1}


def test_reshape_that_splits_heads_stays():
    text = "g (float[1,T,4] x) => (float[1,T,2,2] z) { y = Reshape(x, heads)  z = Neg(y) }"
    model = parse(text, heads=np.array([1, -1, 2, 2]))
    assert fire(row_reshapes, model) == (0, [])
    assert ops(model) == {"Reshape": 1, "Neg": 1}


def test_reshape_that_cuts_rows_in_two_stays():
    text = "g (float[1,T,4] x) => (float[S,6] y) { r = Reshape(x, rows2)  y = MatMul(r, w2) }"
    model = parse(text, rows2=np.array([-1, 2]), w2=weight(2, 6))
    assert fire(row_reshapes, model) == (0, [])
    assert ops(model) == {"Reshape": 1, "MatMul": 1}
    assert model.graph.node(0).op_type == "Reshape"
