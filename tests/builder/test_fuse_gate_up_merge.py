from __future__ import annotations

import numpy as np
from fuse_graphs import fire, ops, parse, weight

from builder.fuse.gate_up_merge import gate_up_merge

SIGNATURE = "g (float[1,T,4] x) => (float[1,T,6] y)"
PLAIN = f"{SIGNATURE} {{ a = MatMul(x, m__gate_proj__weight)  b = MatMul(x, m__up_proj__weight)  y = forgeline.SwiGLU(a, b) }}"
WEIGHTS = {"m__gate_proj__weight": weight(4, 6), "m__up_proj__weight": weight(4, 6, seed=1)}


def test_gate_and_up_become_one_multiplication():
    model = parse(PLAIN, **WEIGHTS)
    assert fire(gate_up_merge, model) == (1, [])
    assert ops(model) == {"MatMul": 1, "Split": 1, "SwiGLU": 1}
    assert set(model.graph.initializers) == {"m.gate_up_proj.weight", "m.gate_up_proj.split"}
    merged = model.graph.initializers["m.gate_up_proj.weight"].const_value
    assert np.array_equal(merged.numpy(), np.concatenate([*WEIGHTS.values()], axis=1))


def test_biases_are_merged_and_a_missing_one_is_zero():
    text = f"""{SIGNATURE} {{
        a = MatMul(x, m__gate_proj__weight)  c = Add(a, bias)  b = MatMul(x, m__up_proj__weight)
        y = forgeline.GeGLU <approximate: string = "tanh"> (c, b)
    }}"""
    model = parse(text, **WEIGHTS, bias=weight(6, seed=2))
    assert fire(gate_up_merge, model) == (1, [])
    merged = model.graph.initializers["m.gate_up_proj.bias"].const_value
    assert np.array_equal(merged.numpy(), np.concatenate([weight(6, seed=2), np.zeros(6, np.float32)]))


def test_weight_with_another_reader_is_kept_for_it():
    text = PLAIN.replace("(float[1,T,6] y)", "(float[1,T,6] y, float[1,T,6] z)").replace("}", "z = Mul(b, b) }")
    model = parse(text, **WEIGHTS)
    assert fire(gate_up_merge, model) == (1, [])
    assert ops(model) == {"MatMul": 1, "Split": 1, "SwiGLU": 1, "Mul": 1}


def test_different_inputs_are_not_merged():
    text = """g (float[1,T,4] x, float[1,T,4] z) => (float[1,T,6] y) {
        a = MatMul(x, v)  b = MatMul(z, w)  y = forgeline.SwiGLU(a, b)
    }"""
    count, reasons = fire(gate_up_merge, parse(text, v=weight(4, 6), w=weight(4, 6, seed=1)))
    assert count == 0
    assert reasons == ["v, w: the layers read different inputs"]


def test_halves_of_one_multiplication_are_left_alone():  # Phi-3
    text = (
        f"{SIGNATURE} {{ p = MatMul(x, w)  a, b = Split <axis: int = -1, num_outputs: int = 2> (p)  y = forgeline.SwiGLU(a, b) }}"
    )
    assert fire(gate_up_merge, parse(text, w=weight(4, 12))) == (0, [])


def test_two_multiplications_that_gate_nothing_are_left_alone():
    text = "g (float[1,T,4] x) => (float[1,T,6] y) { a = MatMul(x, v)  b = MatMul(x, w)  y = Add(a, b) }"
    assert fire(gate_up_merge, parse(text, v=weight(4, 6), w=weight(4, 6, seed=1))) == (0, [])
