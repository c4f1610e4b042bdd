from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.fold_constants import fold_constants


def test_one_plus_weight_becomes_the_weight():  # Gemma
    text = "g (float[1,T,8] x) => (float[1,T,8] y) { v = Add(one, w)  y = RMSNormalization(x, v) }"
    model = parse(text, one=np.float32(1), w=weight(8))
    assert fire(fold_constants, model) == (1, [])
    assert ops(model) == {"RMSNormalization": 1}
    (folded,) = model.graph.initializers.values()
    assert np.array_equal(folded.const_value.numpy(), weight(8) + np.float32(1))


def test_factor_of_one_and_identity_disappear():
    model = parse("g (float[1,T,8] x) => (float[1,T,8] y) { a = Mul(x, one)  b = Identity(a)  y = Neg(b) }", one=np.float32(1))
    assert fire(fold_constants, model) == (2, [])
    assert ops(model) == {"Neg": 1}


def test_other_factor_stays():
    model = parse("g (float[1,T,8] x) => (float[1,T,8] y) { a = Mul(x, two)  y = Neg(a) }", two=np.float32(2))
    assert fire(fold_constants, model) == (0, [])
    assert ops(model) == {"Mul": 1, "Neg": 1}


def test_large_result_is_not_stored_a_second_time():
    text = "g (float[1,T,300] x) => (float[1,T,300] y, float[300,300] w2) { v = Add(w, one)  y = MatMul(x, v)  w2 = Neg(w) }"
    model = parse(text, one=np.float32(1), w=weight(300, 300))
    assert fire(fold_constants, model) == (0, [])
    assert ops(model) == {"Add": 1, "MatMul": 1, "Neg": 1}


def test_constant_nodes_become_initializers():
    model = parse("g (float[1,T,8] x) => (float[T,8] y) { a = Constant <value_ints = [0]> ()  y = Squeeze(x, a) }")
    assert fire(fold_constants, model) == (1, [])
    assert list(model.graph.initializers["a"].const_value.numpy()) == [0]
