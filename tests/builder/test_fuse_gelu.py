from __future__ import annotations

import math

import numpy as np
import pytest
from fuse_graphs import fire, ops, parse

from builder.fuse.gelu import gelu

GELU = """g (float[1,T,8] x) => (float[1,T,8] y) {
    cube = Pow(x, three)   small = Mul(cube, cubic)   sum = Add(x, small)   inner = Mul(sum, slope)
    tanh = Tanh(inner)     upper = Add(tanh, one)     half_x = Mul(x, half)  y = Mul(half_x, upper)
}"""
CONSTANTS = {"three": 3.0, "cubic": 0.044715, "slope": math.sqrt(2 / math.pi), "one": 1.0, "half": 0.5}


def constants(**changed):
    return {name: np.float32(value) for name, value in {**CONSTANTS, **changed}.items()}


def test_gelu_written_out_becomes_one_op():
    model = parse(GELU, **constants())
    assert fire(gelu, model) == (1, [])
    assert ops(model) == {"Gelu": 1}
    assert model.graph.node(0).attributes.get_string("approximate") == "tanh"


@pytest.mark.parametrize(("name", "value"), [("cubic", 0.0447), ("slope", 0.8), ("half", 0.4), ("one", 2.0)])
def test_other_constants_are_no_gelu(name, value):
    count, reasons = fire(gelu, parse(GELU, **constants(**{name: value})))
    assert count == 0
    assert any(reason.startswith(f"GELU of x has {value:.2g}"[:16]) for reason in reasons)


def test_other_power_is_no_gelu():
    assert fire(gelu, parse(GELU, **constants(three=2.0))) == (0, [])


def test_gelu_that_the_exporter_made_counts():
    assert fire(gelu, parse("g (float[1,T,8] x) => (float[1,T,8] y) { y = Gelu(x) }")) == (1, [])
