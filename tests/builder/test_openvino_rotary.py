"""Rotary embeddings on their way to OpenVINO: merged or on rows, by hand-written graphs of one attention layer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from fuse_graphs import TOKENS, fire, ops, parse, weight
from onnx_ir.passes import common as passes

from builder.targets.openvino_build import shorten_reshapes
from builder.targets.openvino_rotary import lower_rotary, merge_rotary

POOLS = "float[B,4,1,4] kp, float[B,4,1,4] vp, int32[T] slots, int32[1,B] table, int32[2] starts, int32[1] lens"
ANGLES = "float[1,T,2] cos, float[1,T,2] sin"
ATTENTION = """forgeline.PagedAttention <scale: float = 0.5, sliding_window: int = 0, softcap: float = 0.0, num_heads: int = 2,
    num_kv_heads: int = 1, head_dim: int = 4, layer: int = 0> (q, k, v, kp, vp, slots, table, starts, lens)"""
SPLIT = "qf, kf, vf = Split <axis: int = -1> (x, sizes)"
ROWS = "qr = Reshape(qf, rows2)  kr = Reshape(kf, rows1)"
PERM = "<perm: ints = [0, 2, 1, 3]>"
TURN = f"""qh = Transpose {PERM} (qr)  kh = Transpose {PERM} (kr)
    qt = RotaryEmbedding (qh, cos, sin)  kt = RotaryEmbedding (kh, cos, sin)
    qu = Transpose {PERM} (qt)  ku = Transpose {PERM} (kt)"""
FLAT = "q = Reshape(qu, heads2)  k = Reshape(ku, heads1)  v = Reshape(vf, heads1)"
SHAPES = {
    "sizes": np.array([8, 4, 4]),
    "heads2": np.array([-1, 2, 4]),
    "heads1": np.array([-1, 1, 4]),
    "rows2": np.array([1, -1, 2, 4]),
    "rows1": np.array([1, -1, 1, 4]),
}
RANDOM = np.random.default_rng(1)
FEEDS = {
    "x": RANDOM.standard_normal((1, TOKENS, 16)).astype(np.float32),
    "cos": RANDOM.standard_normal((1, TOKENS, 2)).astype(np.float32),
    "sin": RANDOM.standard_normal((1, TOKENS, 2)).astype(np.float32),
    "kp": np.zeros((1, 4, 1, 4), np.float32),
    "vp": np.zeros((1, 4, 1, 4), np.float32),
    "slots": np.arange(TOKENS, dtype=np.int32),
    "table": np.zeros((1, 1), np.int32),
    "starts": np.array([0, TOKENS], np.int32),
    "lens": np.array([TOKENS], np.int32),
}


def layer(*body: str, **constants: np.ndarray) -> ir.Model:
    outputs = "float[T,2,4] o, float[B,4,1,4] ko, float[B,4,1,4] vo"
    text = f"g (float[1,T,16] x, {ANGLES}, {POOLS}) => ({outputs}) {{ {' '.join(body)} o, ko, vo = {ATTENTION} }}"
    return parse(text, **SHAPES, **constants)


def merged(model: ir.Model) -> int:
    """Applies the pass, outputs compared; how many embeddings went."""

    def apply(model: ir.Model, _: object) -> int:
        before = embeddings(model)
        merge_rotary(model.graph)
        passes.RemoveUnusedNodesPass()(model)
        return before - embeddings(model)

    return fire(apply, model, FEEDS)[0]


def lowered(model: ir.Model) -> ir.Model:
    def apply(model: ir.Model, _: object) -> int:
        lower_rotary(model.graph)
        shorten_reshapes(model.graph)
        passes.RemoveUnusedNodesPass()(model)
        return 0

    fire(apply, model, FEEDS)
    return model


def embeddings(model: ir.Model) -> int:
    return sum(node.op_type == "RotaryEmbedding" for node in model.graph)


def test_heads_of_one_projection_are_turned_at_once_and_v_stays() -> None:
    model = layer(SPLIT, ROWS, TURN, FLAT)
    assert merged(model) == 1
    counts = Counter(ops(model))
    assert counts["RotaryEmbedding"] == counts["Split"] == 1
    assert counts["Transpose"] == 0
    (split,) = (node for node in model.graph if node.op_type == "Split")
    sizes = split.inputs[1]
    assert sizes is not None and sizes.const_value is not None and sizes.const_value.numpy().tolist() == [8, 4, 4]


@pytest.mark.parametrize(
    "body",
    [
        (SPLIT.replace("qf, kf, vf", "qf, vf, kf"), ROWS, TURN, FLAT),
        (SPLIT, ROWS, TURN.replace("(kh, cos, sin)", "(kh, sin, cos)"), FLAT),
        (SPLIT, ROWS, TURN.replace("RotaryEmbedding", "RotaryEmbedding <interleaved: int = 1>"), FLAT),
        (SPLIT, "qn = RMSNormalization(qf, w)  qr = Reshape(qn, rows2)  kr = Reshape(kf, rows1)", TURN, FLAT),
        (SPLIT, ROWS, "qu = Identity(qr)  ku = Identity(kr)", FLAT),
    ],
    ids=["order", "angles", "interleaved", "norm", "none"],
)
def test_what_is_not_one_turn_of_one_projection_stays(body: tuple[str, ...]) -> None:
    assert merged(layer(*body, w=weight(8))) == 0


@pytest.mark.parametrize("part", ["", "<rotary_embedding_dim: int = 2>"])
def test_no_transposes_around_heads_with_norms(part: str) -> None:
    norms = "qn = RMSNormalization(qr, w)  kn = RMSNormalization(kr, w)"
    turn = TURN.replace("(qr)", "(qn)").replace("(kr)", "(kn)").replace("RotaryEmbedding (", f"RotaryEmbedding {part} (")
    if part:
        turn = turn.replace("cos, sin", "cos1, sin1")
        turn = "cos1, cos2 = Split <axis: int = -1> (cos, ones)  sin1, sin2 = Split <axis: int = -1> (sin, ones) " + turn
    model = lowered(layer(SPLIT, ROWS, norms, turn, FLAT, w=weight(4), ones=np.array([1, 1])))
    assert "Transpose" not in ops(model)
    assert embeddings(model) == (0 if part else 2)


def test_heads_that_someone_else_reads_transposed_keep_their_layout() -> None:
    model = layer(SPLIT, ROWS, f"{TURN} other = Identity(qt)", FLAT)
    assert ops(lowered(model))["Transpose"] == 4 - 2  # those of k go


def test_a_reshape_reads_past_others_unless_it_copies_sizes() -> None:
    text = "g (float[1,T,8] x) => (float[T,8] y, float[1,T,8] z) { a = Reshape(x, heads) b = Reshape(a, flat)"
    model = parse(
        f"{text} y = Identity(b) c = Reshape(b, heads) z = Reshape(c, zeros) }}",
        heads=np.array([1, -1, 2, 4]),
        flat=np.array([-1, 8]),
        zeros=np.array([0, -1, 8]),
    )

    def apply(model: ir.Model, _: object) -> int:
        shorten_reshapes(model.graph)
        return 0

    fire(apply, model)
    reads = {node.outputs[0].name: value.name for node in model.graph if (value := node.inputs[0]) is not None}
    assert reads == {"a": "x", "b": "x", "y": "b", "c": "x", "z": "c"}
