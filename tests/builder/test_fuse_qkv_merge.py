from __future__ import annotations

import numpy as np
from fuse_graphs import TOKENS, fire, ops, parse, weight

from builder.fuse.qkv_merge import qkv_merge

POOLS = "float[B,4,1,4] kp, float[B,4,1,4] vp, int32[T] slots, int32[1,B] table, int32[2] starts, int32[1] lens"
ATTENTION = """forgeline.PagedAttention <scale: float = 0.5, sliding_window: int = 0, softcap: float = 0.0, num_heads: int = 2,
    num_kv_heads: int = 1, head_dim: int = 4, layer: int = 0> (q, k, v, kp, vp, slots, table, starts, lens)"""
LAYOUT = "q = Reshape({q}, heads2)  k = Reshape({k}, heads1)  v = Reshape({v}, heads1)"
PRODUCTS = """qp = MatMul(x, h__0__q_proj__weight)  kq = MatMul(x, h__0__k_proj__weight)  vq = MatMul(x, h__0__v_proj__weight)"""
WEIGHTS = {
    "h__0__q_proj__weight": weight(6, 8), "h__0__k_proj__weight": weight(6, 4), "h__0__v_proj__weight": weight(6, 4, seed=1),
}  # fmt: skip
SHAPES = {"heads2": np.array([-1, 2, 4]), "heads1": np.array([-1, 1, 4])}
FEEDS = {
    "x": np.random.default_rng(1).standard_normal((1, TOKENS, 6)).astype(np.float32),
    "z": np.random.default_rng(2).standard_normal((1, TOKENS, 6)).astype(np.float32),
    "kp": np.zeros((1, 4, 1, 4), np.float32),
    "vp": np.zeros((1, 4, 1, 4), np.float32),
    "slots": np.arange(TOKENS, dtype=np.int32),
    "table": np.zeros((1, 1), np.int32),
    "starts": np.array([0, TOKENS], np.int32),
    "lens": np.array([TOKENS], np.int32),
}


def model(body, layout=None, inputs="float[1,T,6] x", extra="", **constants):
    layout = layout or LAYOUT.format(q="qp", k="kq", v="vq")
    outputs = f"float[T,2,4] o, float[B,4,1,4] ko, float[B,4,1,4] vo{extra}"
    return parse(f"g ({inputs}, {POOLS}) => ({outputs}) {{ {body} {layout} o, ko, vo = {ATTENTION} }}", **SHAPES, **constants)


def test_three_projections_become_one_multiplication():
    fused = model(PRODUCTS, **WEIGHTS)
    assert fire(qkv_merge, fused, FEEDS) == (1, [])
    assert ops(fused) == {"MatMul": 1, "Split": 1, "Reshape": 3, "PagedAttention": 1}
    assert set(fused.graph.initializers) == {"h.0.qkv_proj.weight", "h.0.qkv_proj.split", "heads2", "heads1"}
    assert list(fused.graph.initializers["h.0.qkv_proj.split"].const_value.numpy()) == [8, 4, 4]
    merged = fused.graph.initializers["h.0.qkv_proj.weight"].const_value.numpy()
    assert np.array_equal(merged, np.concatenate([*WEIGHTS.values()], axis=1))


def test_biases_are_merged_and_scaling_of_q_stays_behind_the_split():  # OPT
    body = PRODUCTS + " qb = Add(qp, bq)  kb = Add(kq, bk)  vb = Add(vq, bv)  qs = Mul(qb, scale)"
    biases = {"bq": weight(8, seed=3), "bk": weight(4, seed=4), "bv": weight(4, seed=5), "scale": np.float32(0.5)}
    fused = model(body, LAYOUT.format(q="qs", k="kb", v="vb"), **WEIGHTS, **biases)
    assert fire(qkv_merge, fused, FEEDS) == (1, [])
    assert ops(fused) == {"MatMul": 1, "Add": 1, "Split": 1, "Mul": 1, "Reshape": 3, "PagedAttention": 1}
    merged = fused.graph.initializers["h.0.qkv_proj.bias"].const_value.numpy()
    assert np.array_equal(merged, np.concatenate([biases["bq"], biases["bk"], biases["bv"]]))


def test_mlp_that_reads_the_same_input_stays_apart():  # GPT-J's parallel block
    fused = model(f"{PRODUCTS} m = MatMul(x, fc)", extra=", float[1,T,5] m", **WEIGHTS, fc=weight(6, 5))
    assert fire(qkv_merge, fused, FEEDS) == (1, [])
    assert ops(fused)["MatMul"] == 2


def test_head_norms_are_looked_through():  # Qwen3
    body = (
        f"{PRODUCTS} qh = Reshape(qp, heads2)  q = RMSNormalization(qh, w)  kh = Reshape(kq, heads1)  k = RMSNormalization(kh, w)"
    )
    fused = model(body, "v = Reshape(vq, heads1)", **WEIGHTS, w=weight(4))
    assert fire(qkv_merge, fused, FEEDS) == (1, [])


def test_one_multiplication_in_the_checkpoint_is_left_alone():  # Phi-3
    body = "p = MatMul(x, w)  qp, kq, vq = Split <axis: int = -1> (p, sizes)"
    assert fire(qkv_merge, model(body, w=weight(6, 16), sizes=np.array([8, 4, 4])), FEEDS) == (0, [])


def test_projections_of_different_inputs_are_not_merged():
    body = PRODUCTS.replace("MatMul(x, h__0__v", "MatMul(z, h__0__v")
    count, reasons = fire(qkv_merge, model(body, inputs="float[1,T,6] x, float[1,T,6] z", **WEIGHTS), FEEDS)
    assert count == 0
    assert reasons == ["h.0.q_proj.weight, h.0.k_proj.weight, h.0.v_proj.weight: the layers read different inputs"]


def test_computed_weight_is_left_alone():
    body = "w = Neg(h__0__v_proj__weight) " + PRODUCTS.replace("x, h__0__v_proj__weight", "x, w")
    count, reasons = fire(qkv_merge, model(body, **WEIGHTS), FEEDS)
    assert count == 0
    assert reasons == ["layer 0: v does not come from a MatMul with a constant weight"]


def test_merged_weight_copies_nothing_until_it_is_read():
    fused = model(PRODUCTS, **WEIGHTS)
    before = [fused.graph.initializers[name.replace("__", ".")].const_value for name in WEIGHTS]
    assert fire(qkv_merge, fused, FEEDS) == (1, [])
    merged = fused.graph.initializers["h.0.qkv_proj.weight"].const_value
    first, second = merged.numpy(), merged.numpy()
    assert first is not second  # built on each reading, never kept
    assert np.array_equal(first[:, :8], before[0].numpy())
