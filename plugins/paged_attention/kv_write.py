"""Write new keys and values into the paged pools, with q/k norm and rotary embedding applied on the way. One launch per layer.

Without this fusion the norm, the rotation, the cast and the scatter each read and write q and k once. Every part is optional at
run time: has_norm 0, rotary_dim 0. All arithmetic is fp32; the only rounding is the store.

Rotary       first `rotary_dim` elements of a head; "neox" pairs (i, i + rotary_dim/2), interleaved pairs (2i, 2i+1). The cos and
             sin tables [max position, rotary_dim/2] hold whatever scaling the model uses
Norm         RMS over the head, before the rotation; weights [D] (a model that adds 1 folds it in)
Quantizing   stored = round to nearest even(x / scale[head]), saturating: ±127 for int8, ±448 for fp8 (E4M3)
Padding      slot -1 stores nothing and gives a query of zeros
"""

import triton
import triton.language as tl

from plugins.paged_attention.kernels import pool_pointer


@triton.jit
def to_e4m3(x):
    """fp32 to the bits of E4M3, round to nearest even, saturating at 448. Integer arithmetic, so every GPU does the same."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the format is fixed point with steps of 2^-9; adding 2^23 rounds to an integer.
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """fp32, already divided by the scale, as the stored type."""
    if KIND == "int8":
        clipped = tl.minimum(tl.maximum(x, -127.0), 127.0)
        value = ((clipped + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: rounds to nearest even
    elif KIND == "fp8":
        value = to_e4m3(x)
    elif KIND == "fp16":
        value = x.to(tl.float16)
    else:
        value = x.to(tl.bfloat16)
    return value


@triton.jit
def norm_and_rotate(
    source, heads, in_head, position, extent, norm, cos, sin, has_norm, eps, rotary_dim, interleaved,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """`heads` rows of `source` [.., D], normalized and rotated, fp32 [rows, HEAD_PAD]; zeros when `extent` is 0, not HEAD_DIM."""
    dims = tl.arange(0, HEAD_PAD)
    half = rotary_dim // 2
    rotated = dims < tl.minimum(rotary_dim, extent)
    weighted = dims < has_norm * HEAD_DIM
    first = tl.where(interleaved != 0, dims % 2 == 0, dims < half)  # first of its pair
    partner = tl.where(interleaved != 0, dims ^ 1, tl.where(first, dims + half, dims - half))
    partner = tl.where(rotated, partner, dims)
    angle = tl.where(interleaved != 0, dims // 2, tl.where(first, dims, dims - half))

    mask = in_head[:, None] & (dims < extent)[None, :]
    x = tl.load(source + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + heads[:, None] * HEAD_DIM + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.where(has_norm != 0, tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps), 1.0)
    x_weight = tl.load(norm + dims, mask=weighted, other=1.0).to(tl.float32)
    y_weight = tl.load(norm + partner, mask=weighted, other=1.0).to(tl.float32)
    x = x * inverse[:, None] * x_weight[None, :]
    y = y * inverse[:, None] * y_weight[None, :]
    table = position * half + angle
    c = tl.load(cos + table, mask=rotated, other=1.0)
    s = tl.load(sin + table, mask=rotated, other=0.0)
    return x * c[None, :] + y * tl.where(first, -s, s)[None, :]


@triton.jit
def write_kv(
    query,  # [T, Hq, D], row stride q_stride: the three may be slices of one fused projection
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    positions,  # int64 [T]
    slot_mapping,  # int32 [T]: block * block_size + offset; -1 = padding
    cos,  # fp32 [max position, rotary_dim / 2]
    sin,
    q_norm,  # [D], query's type
    k_norm,
    k_scale,  # fp32 [Hkv], read for 8-bit formats only
    v_scale,
    kv_table,  # int64 [layers, 2]
    query_out,  # [T, Hq, D] contiguous; must not overlap query
    layer,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    block_size,
    rotary_dim,  # 0 = no rotary embedding
    interleaved,
    has_norm,
    eps,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
):
    """Grid (T, ceil(Hq / HEADS) + ceil(Hkv / HEADS)): programs of the second part take keys and values together."""
    token = tl.program_id(0)
    group = tl.program_id(1)
    query_groups = tl.cdiv(num_heads, HEADS)
    slot = tl.load(slot_mapping + token)
    extent = tl.where(slot >= 0, HEAD_DIM, 0)
    position = tl.load(positions + token, mask=slot >= 0, other=0)
    dims = tl.arange(0, HEAD_PAD)
    inside = dims < HEAD_DIM
    row = token.to(tl.int64)
    if group < query_groups:
        heads = group * HEADS + tl.arange(0, HEADS)
        in_head = heads < num_heads
        q = norm_and_rotate(
            query + row * q_stride, heads, in_head, position, extent, q_norm, cos, sin, has_norm, eps, rotary_dim, interleaved,
            HEAD_DIM, HEAD_PAD,
        )  # fmt: skip
        cells = (row * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(query_out + cells, q.to(query_out.dtype.element_ty), mask=in_head[:, None] & inside[None, :])
    else:
        heads = (group - query_groups) * HEADS + tl.arange(0, HEADS)
        in_head = heads < num_kv_heads
        k = norm_and_rotate(
            key + row * k_stride, heads, in_head, position, extent, k_norm, cos, sin, has_norm, eps, rotary_dim, interleaved,
            HEAD_DIM, HEAD_PAD,
        )  # fmt: skip
        mask = in_head[:, None] & (dims < extent)[None, :]
        v = tl.load(value + row * v_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if (K_KIND == "int8") | (K_KIND == "fp8"):
            k = k / tl.load(k_scale + heads, mask=in_head, other=1.0)[:, None]
        if (V_KIND == "int8") | (V_KIND == "fp8"):
            v = v / tl.load(v_scale + heads, mask=in_head, other=1.0)[:, None]
        page = (slot // block_size).to(tl.int64)
        cells = ((page * num_kv_heads + heads) * block_size + slot % block_size)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pool_pointer(kv_table, layer, 0, K_KIND) + cells, encode(k, K_KIND), mask=mask)
        tl.store(pool_pointer(kv_table, layer, 1, V_KIND) + cells, encode(v, V_KIND), mask=mask)
