"""What the kernels must compute, in numpy, one token and one head at a time. For tests and bench/gpu_verify.py.

Same meaning as the executable specification of op.py, plus what the canonical graph does not have: quantized pools, and the norm
and rotary embedding that write_kv applies. Pools here are the canonical [num_blocks, block_size, Hkv, D].
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


def e4m3_values() -> Array:
    """The 256 values of FP8 E4M3 (FN): bias 7, no infinity, NaN at 0x7F and 0xFF."""
    values = np.empty(256, np.float32)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = math.nan if code & 0x7F == 0x7F else (-magnitude if code & 0x80 else magnitude)
    return values


def to_e4m3(x: Array) -> npt.NDArray[np.uint8]:
    """Nearest code, ties to the even one, saturating at ±448."""
    positive = e4m3_values()[:127].astype(np.float64)
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), 448.0)
    upper = np.searchsorted(positive, magnitude).clip(0, 126)
    lower = np.maximum(upper - 1, 0)
    below, above = magnitude - positive[lower], positive[upper] - magnitude
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    code = np.where(take_lower, lower, upper)
    return (code | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def quantize(x: Array, kind: str, scale: Array) -> npt.NDArray[np.generic]:
    """[.., Hkv, D] as stored in a pool of `kind`; bf16 is left as float32 rounded to bf16."""
    if kind == "fp16":
        return x.astype(np.float16)
    if kind == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    scaled = x / scale[:, None]
    if kind == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return to_e4m3(scaled)


def dequantize(stored: npt.NDArray[np.generic], kind: str, scale: Array) -> Array:
    if kind == "fp8":
        return e4m3_values()[stored] * scale[:, None]
    if kind == "int8":
        return stored.astype(np.float32) * scale[:, None]
    return stored.astype(np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: npt.NDArray[np.int64], cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Rotary embedding of [T, H, D]; the tables [max position, R / 2] say how many elements rotate."""
    half = cos.shape[1]
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    out = x.copy()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def attention(
    q: Array,  # [T, Hq, D]
    k_pool: Array,  # [num_blocks, block_size, Hkv, D], dequantized
    v_pool: Array,
    block_table: IntArray,
    query_start_loc: IntArray,
    seq_lens: IntArray,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Rows of empty sequences are zero; rows past query_start_loc[-1] belong to nobody and stay NaN."""
    block_size, num_kv_heads = k_pool.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = np.full(q.shape, np.nan, np.float64)
    for row, length in enumerate(seq_lens):
        begin, end = query_start_loc[row], query_start_loc[row + 1]
        for token in range(begin, end):
            position = length - (end - token)
            if length == 0:
                out[token] = 0.0
                continue
            low = max(0, position - sliding_window + 1) if sliding_window else 0
            at = np.arange(low, position + 1)
            cells = block_table[row, at // block_size], at % block_size
            keys, values = k_pool[cells].astype(np.float64), v_pool[cells].astype(np.float64)
            for head in range(q.shape[1]):
                scores = keys[:, head // group] @ q[token, head].astype(np.float64) * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if sinks is not None:
                    scores = np.append(scores, sinks[head])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[token, head] = weights[: len(at)] @ values[:, head // group]
    return out.astype(np.float32)
