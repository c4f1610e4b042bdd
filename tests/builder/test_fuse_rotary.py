from __future__ import annotations

import numpy as np
import pytest
from fuse_graphs import fire, ops, parse

from builder.fuse.dead_code import dead_code
from builder.fuse.rotary import rotary

END = 2**63 - 1  # what torch exports for "to the end"
CONSTANTS = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "half": np.array([4]), "eight": np.array([8]),
    "end": np.array([END]), "last": np.array([3]), "minus1": np.array([-1]), "scale": np.float32(1.25),
}  # fmt: skip
TABLES = """
    full = Concat <axis: int = -1> (angles, angles)  c = Cos(full)  s = Sin(full)
    cos = Unsqueeze(c, one)  sin = Unsqueeze(s, one)"""
HALVES = """
    lower = Slice(x, zero, half, last, one)  upper = Slice(x, half, end, last, one)  negated = Neg(upper)
    turned = Concat <axis: int = -1> (negated, lower)
    straight = Mul(x, cos)  swung = Mul(turned, sin)  y = Add(straight, swung)"""
PAIRS = """
    even = Slice(x, zero, end, last, two)  odd = Slice(x, one, end, last, two)  negated = Neg(odd)
    a = Unsqueeze(negated, minus1)  b = Unsqueeze(even, minus1)  stack = Concat <axis: int = -1> (a, b)
    turned = Reshape(stack, shape)
    straight = Mul(x, cos)  swung = Mul(turned, sin)  y = Add(straight, swung)"""
PAIR_TABLES = """
    wide = Unsqueeze(angles, last)  twice = Expand(wide, repeats)  full = Reshape(twice, full_shape)
    c = Cos(full)  s = Sin(full)  cos = Unsqueeze(c, {axis})  sin = Unsqueeze(s, {axis})"""
PAIR_SHAPES = {"repeats": np.array([1, 1, 1, 2]), "full_shape": np.array([1, -1, 8])}


def model(body, x="1,2,T,8", y=None, **more):
    text = f"g (float[{x}] x, float[1,T,4] angles) => (float[{y or x}] y) {{ {body} }}"
    return parse(text, **CONSTANTS, **more)


def the_rotary(graph):
    (node,) = (node for node in graph if node.op_type == "RotaryEmbedding")
    return node


def test_rotation_by_halves_becomes_one_op_on_half_tables():
    fused = model(TABLES + HALVES)
    assert fire(rotary, fused) == (1, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Sin": 1, "RotaryEmbedding": 1}
    node = the_rotary(fused.graph)
    assert node.inputs[0].name == "x"
    assert node.inputs[1].producer().inputs[0].name == "angles"
    assert (node.attributes.get_int("interleaved"), node.attributes.get_int("num_heads")) == (0, 2)


def test_operands_may_stand_the_other_way_round():
    body = HALVES.replace("Mul(x, cos)", "Mul(cos, x)").replace("Mul(turned, sin)", "Mul(sin, turned)")
    assert fire(rotary, model(TABLES + body.replace("Add(straight, swung)", "Add(swung, straight)"))) == (1, [])


def test_scaled_tables_stay_scaled():  # YaRN multiplies cos and sin by an attention factor
    scaled = TABLES.replace("Unsqueeze(c, one)", "Unsqueeze(cs, one)").replace("cos =", "cs = Mul(c, scale)  cos =")
    fused = model(scaled + HALVES)
    assert fire(rotary, fused) == (1, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Mul": 1, "Sin": 1, "RotaryEmbedding": 1}


def test_two_rotations_share_their_tables():
    second = HALVES
    for name in ("lower", "upper", "negated", "turned", "straight", "swung", "y"):
        second = second.replace(f"{name} =", f"{name}2 =").replace(f"({name}", f"({name}2").replace(f", {name})", f", {name}2)")
    second = second.replace("(x, ", "(x2, ")
    text = f"""g (float[1,2,T,8] x, float[1,1,T,8] x2, float[1,T,4] angles) => (float[1,2,T,8] y, float[1,1,T,8] y2)
        {{ {TABLES} {HALVES} {second} }}"""
    fused = parse(text, **CONSTANTS)
    assert fire(rotary, fused) == (2, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Sin": 1, "RotaryEmbedding": 2}


def test_interleaved_rotation_becomes_one_op():  # Cohere
    fused = model(PAIR_TABLES.format(axis="one") + PAIRS, shape=np.array([1, 2, -1, 8]), **PAIR_SHAPES)
    assert fire(rotary, fused) == (1, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Sin": 1, "RotaryEmbedding": 1}
    assert the_rotary(fused.graph).attributes.get_int("interleaved") == 1


def test_heads_after_tokens_are_transposed():  # GPT-J
    body = PAIR_TABLES.format(axis="two") + PAIRS
    fused = model(body, x="1,T,2,8", shape=np.array([1, -1, 2, 8]), **PAIR_SHAPES)
    assert fire(rotary, fused) == (1, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Sin": 1, "Transpose": 2, "RotaryEmbedding": 1}


@pytest.mark.parametrize("exporter_fired", [False, True])
def test_rotation_of_the_first_part_of_a_head_takes_the_whole_head(exporter_fired):  # GPT-NeoX, StableLM
    cut = "x = Slice(head, zero, eight, last, one)  rest = Slice(head, eight, end, last, one)"
    fired = "c = Cos(angles)  s = Sin(angles)  y = RotaryEmbedding <num_heads: int = 2> (x, c, s)"
    body = f"{cut} {fired if exporter_fired else TABLES + HALVES}  z = Concat <axis: int = -1> (y, rest)"
    text = f"g (float[1,2,T,12] head, float[1,T,4] angles) => (float[1,2,T,12] z) {{ {body} }}"
    fused = parse(text, **CONSTANTS)
    assert fire(rotary, fused) == (1, [])
    dead_code(fused, print)
    assert ops(fused) == {"Cos": 1, "Sin": 1, "RotaryEmbedding": 1}
    node = the_rotary(fused.graph)
    assert node.inputs[0].name == "head"
    assert node.attributes.get_int("rotary_embedding_dim") == 8


def test_rotated_part_that_is_not_the_rest_of_its_head_stays_a_part():
    cut = "x = Slice(head, zero, eight, last, one)  rest = Slice(head, half, eight, last, one)"
    body = f"{cut} {TABLES} {HALVES}  z = Concat <axis: int = -1> (y, rest)"
    fused = parse(f"g (float[1,2,T,12] head, float[1,T,4] angles) => (float[1,2,T,12] z) {{ {body} }}", **CONSTANTS)
    assert fire(rotary, fused) == (1, [])
    assert "rotary_embedding_dim" not in the_rotary(fused.graph).attributes


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("not negated", lambda body: body.replace("(negated, lower)", "(upper, lower)")),
        ("halves not swapped", lambda body: body.replace("(negated, lower)", "(lower, negated)")),
        ("cut elsewhere", lambda body: body.replace("Slice(x, half, end", "Slice(x, zero, half")),
        ("halves of something else", lambda body: body.replace("Slice(x, half, end", "Slice(cos2, half, end")),
    ],
)
def test_other_arithmetic_is_no_rotation(what, change):
    body = "cos2 = Cos(x)" + TABLES + HALVES
    assert fire(rotary, model(change(body))) == (0, [])


def test_tables_with_unequal_halves_are_left_alone():
    body = TABLES.replace("(angles, angles)", "(angles, more)").replace("full =", "more = Neg(angles)  full =") + HALVES
    count, reasons = fire(rotary, model(body))
    assert count == 0
    assert reasons == ["rotary of x: the two halves of cos are not known to be equal"]


def test_tables_that_differ_between_heads_are_left_alone():
    text = f"g (float[1,2,T,8] x, float[1,2,T,8] cos, float[1,2,T,8] sin) => (float[1,2,T,8] y) {{ {HALVES} }}"
    count, reasons = fire(rotary, parse(text, **CONSTANTS))
    assert count == 0
    assert reasons == ["rotary of x: cos [1,2,T,8] differs between heads"]
