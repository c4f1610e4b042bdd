"""write_kv: norm, rotary embedding, quantization and the store into pages, interpreted, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import run_write

from plugins.paged_attention import reference

BLOCK_SIZE, NUM_BLOCKS = 16, 3


def _arrays(key_kind, value_kind, *, head_dim=64, num_heads=6, num_kv_heads=3, rotary_dim=0, norm=False, seed=0):
    rng = np.random.default_rng(seed)
    tokens = 5
    poison = {"fp8": np.uint8(0x7F), "int8": np.int8(-128), "fp16": np.float16(np.nan), "bf16": np.float32(np.nan)}
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    arrays = {
        "qkv": rng.standard_normal((tokens, num_heads + 2 * num_kv_heads, head_dim)).astype(np.float16),
        "positions": np.array([3, 0, 60, 7, 21]),
        "slot_mapping": np.array([3, 40, 16, -1, 47], np.int32),
        "key_pool": np.full(shape, poison[key_kind]),
        "value_pool": np.full(shape, poison[value_kind]),
        "k_scale": rng.uniform(0.01, 0.03, num_kv_heads).astype(np.float32),
        "v_scale": rng.uniform(0.01, 0.03, num_kv_heads).astype(np.float32),
    }
    if rotary_dim:
        angles = np.arange(64)[:, None] * 0.3 ** np.arange(rotary_dim // 2)
        arrays.update(cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32))
    if norm:
        arrays.update({name: rng.uniform(0.5, 2, head_dim).astype(np.float16) for name in ("q_norm", "k_norm")})
    return arrays


def _expected(arrays, key_kind, value_kind, *, interleaved=False, eps=1e-6):
    num_kv_heads = arrays["key_pool"].shape[2]
    heads = arrays["qkv"].shape[1] - 2 * num_kv_heads
    qkv = arrays["qkv"].astype(np.float32)
    query, key, value = qkv[:, :heads], qkv[:, heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    if "q_norm" in arrays:
        query = reference.rms_norm(query, arrays["q_norm"].astype(np.float32), eps)
        key = reference.rms_norm(key, arrays["k_norm"].astype(np.float32), eps)
    if "cos" in arrays:
        turn = (arrays["positions"], arrays["cos"], arrays["sin"])
        query, key = (reference.rotate(x, *turn, interleaved=interleaved) for x in (query, key))
    live = arrays["slot_mapping"] >= 0
    query = np.where(live[:, None, None], query, 0)
    pools = []
    for pool, x, kind, scale in (("key_pool", key, key_kind, "k_scale"), ("value_pool", value, value_kind, "v_scale")):
        stored = arrays[pool].copy()
        slots = arrays["slot_mapping"][live]
        stored[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = reference.quantize(x[live], kind, arrays[scale])
        pools.append(stored)
    return query, *pools


def _close(found, wanted, kind, scale):
    """Equal but for values that fp32 arithmetic in another order moves across a rounding boundary: one step, and rarely."""
    if kind in ("fp8", "int8"):
        steps = np.abs(found.astype(np.int32) - wanted.astype(np.int32))
        return steps.max() <= 1 and (steps > 0).mean() < 0.002
    tolerance = {"fp16": 2**-10, "bf16": 2**-7}[kind]
    return np.allclose(found.astype(np.float32), wanted.astype(np.float32), rtol=tolerance, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("key_kind, value_kind", [("fp16", "fp16"), ("bf16", "int8"), ("fp8", "fp8"), ("int8", "fp8")])
@pytest.mark.parametrize("rotary, norm", [("none", False), ("neox", True), ("interleaved", False), ("partial", True)])
def test_write(interpreter, key_kind, value_kind, rotary, norm):
    head_dim = 80 if key_kind == "fp8" else 64
    rotary_dim = {"none": 0, "neox": head_dim, "interleaved": head_dim, "partial": 32}[rotary]
    arrays = _arrays(key_kind, value_kind, head_dim=head_dim, rotary_dim=rotary_dim, norm=norm)
    interleaved = rotary == "interleaved"
    query, key_pool, value_pool = interpreter.call(
        run_write, arrays, block_size=BLOCK_SIZE, key_kind=key_kind, value_kind=value_kind, interleaved=interleaved
    )
    wanted = _expected(arrays, key_kind, value_kind, interleaved=interleaved)
    assert np.allclose(query.astype(np.float32), wanted[0], rtol=2**-10, atol=1e-6)
    assert _close(key_pool, wanted[1], key_kind, arrays["k_scale"])
    assert _close(value_pool, wanted[2], value_kind, arrays["v_scale"])


def test_only_the_named_slots_change(interpreter):
    arrays = _arrays("int8", "fp16")
    _, key_pool, value_pool = interpreter.call(
        run_write, arrays, block_size=BLOCK_SIZE, key_kind="int8", value_kind="fp16", interleaved=False
    )
    untouched = np.ones(NUM_BLOCKS * BLOCK_SIZE, bool)
    untouched[[3, 40, 16, 47]] = False
    assert (key_pool.reshape(len(untouched), -1)[untouched] == -128).all()
    assert np.isnan(value_pool.reshape(len(untouched), -1)[untouched].astype(np.float32)).all()
    assert (key_pool.reshape(len(untouched), -1)[~untouched] != -128).all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_fp16_value_is_rounded_to_nearest_even_and_saturates(interpreter, kind):
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.sort(codes[np.isfinite(codes)])
    numbers = np.resize(numbers, (16, 16, 256))  # 65536 cells: T tokens, KV heads, D; a few repeat
    tokens = len(numbers)
    arrays = {
        "qkv": np.concatenate([np.zeros((tokens, 1, 256), np.float16), np.zeros_like(numbers), numbers], axis=1),
        "positions": np.arange(tokens),
        "slot_mapping": np.arange(tokens, dtype=np.int32),
        "key_pool": np.zeros((1, tokens, 16, 256), np.int8),
        "value_pool": np.zeros((1, tokens, 16, 256), np.uint8 if kind == "fp8" else np.int8),
        "k_scale": np.ones(16, np.float32),
        "v_scale": np.ones(16, np.float32),
    }
    _, _, pool = interpreter.call(run_write, arrays, block_size=tokens, key_kind="int8", value_kind=kind, interleaved=False)
    wanted = reference.quantize(numbers.astype(np.float32), kind, np.ones(16, np.float32))
    assert np.array_equal(pool[0], wanted)
    assert wanted.astype(np.int32).max() == {"fp8": 0xFE, "int8": 127}[kind]  # ±448, ±127: the ends were reached
