"""Launch the kernels on torch tensors: compiled on a GPU, interpreted on a CPU under TRITON_INTERPRET=1.

What the TensorRT plugin does with cubins, done with `triton.jit`; the two share tuning.py. Used by the kernel tests and by
bench/gpu_verify.py. Needs torch and triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import next_power_of_2

from plugins.paged_attention import kernels, kv_write, tuning
from plugins.paged_attention.tuning import AttentionGrid, Tiles

Tensor = torch.Tensor


def pointer_table(pools: list[tuple[Tensor, Tensor]]) -> Tensor:
    """int64 [layers, 2] with the addresses of the key and value pools; the caller keeps the pools alive."""
    rows = [[k.data_ptr(), v.data_ptr()] for k, v in pools]
    return torch.tensor(rows, dtype=torch.int64, device=pools[0][0].device)


def plan(
    grid: AttentionGrid,
    tiles: Tiles,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    window: int = 0,
    fixed_tiles: int = 0,
    query_lens: tuple[int, int] = (1, 2**30),
) -> Tensor:
    """The split plan of one step and window size; layers with the same window share it."""
    num_seqs = seq_lens.numel()
    result = torch.empty(3 * (num_seqs + 1), dtype=torch.int32, device=seq_lens.device)
    kernels.plan_splits[(1,)](
        query_start_loc, seq_lens, result, num_seqs, grid.block_tokens, window, grid.slots, tuning.MIN_TILES, fixed_tiles,
        *query_lens, TILE=tiles.tile, BLOCK=min(tuning.PLAN_BLOCK, next_power_of_2(num_seqs)), WAVES=tuning.PLAN_WAVES,
    )  # fmt: skip
    return result


def attend(
    query: Tensor,  # [T, Hq, D]
    kv_table: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    plan: Tensor,
    out: Tensor,
    *,
    grid: AttentionGrid,
    tiles: Tiles,
    num_kv_heads: int,
    block_size: int,
    key_kind: str,
    value_kind: str,
    scale: float,
    layer: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    partial: Tensor | None = None,
    partial_lse: Tensor | None = None,
) -> Tensor:
    """paged_attention and merge_splits. Kinds are those of kernels.py: fp8soft where the GPU has no E4M3 conversion."""
    num_heads, head_dim = query.shape[1:]
    num_seqs = seq_lens.numel()
    cells = grid.work_items * grid.parts * tiles.block_m
    if partial is None:
        partial = torch.empty(cells * head_dim, dtype=torch.float32, device=query.device)
    if partial_lse is None:
        partial_lse = torch.empty(cells, dtype=torch.float32, device=query.device)
    unused = partial_lse  # any valid address: read only when the kind or flag asks for it
    k_scale = unused if k_scale is None else k_scale
    v_scale = unused if v_scale is None else v_scale
    sink_logits = unused if sinks is None else sinks
    shape: dict[str, Any] = {"HEAD_DIM": head_dim, "HEAD_PAD": tuning.head_pad(head_dim), "BLOCK_M": tiles.block_m}
    kernels.paged_attention[(grid.work_items, grid.parts)](
        query, kv_table, block_table, query_start_loc, seq_lens, plan, k_scale, v_scale, sink_logits, out, partial, partial_lse,
        layer, num_seqs, block_table.stride(0), num_heads, num_kv_heads, window, scale, softcap, int(sinks is not None),
        **shape, TILE=tiles.tile, PAGE=block_size, K_KIND=key_kind, V_KIND=value_kind, SOFTCAP=softcap > 0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    kernels.merge_splits[(grid.blocks, grid.parts, grid.merge_rows)](
        query_start_loc, plan, partial, partial_lse, sink_logits, out,
        num_seqs, num_heads, num_kv_heads, int(sinks is not None), grid.rows_per_program,
        **shape, SPLITS=tuning.MERGE_SPLITS,
    )  # fmt: skip
    return out


def write_kv(
    query: Tensor,  # [T, Hq, D] with any row stride, as are key and value
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_table: Tensor,
    query_out: Tensor,
    *,
    block_size: int,
    key_kind: str,
    value_kind: str,
    layer: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    unused = torch.empty(1, dtype=torch.float32, device=query.device)
    pick = lambda tensor: unused if tensor is None else tensor  # noqa: E731
    heads = tuning.WRITE_HEADS
    programs = -(-num_heads // heads) + -(-num_kv_heads // heads)
    kv_write.write_kv[(num_tokens, programs)](
        query, key, value, positions, slot_mapping, pick(cos), pick(sin),
        query if q_norm is None else q_norm, query if k_norm is None else k_norm, pick(k_scale), pick(v_scale),
        kv_table, query_out, layer, query.stride(0), key.stride(0), value.stride(0), num_heads, num_kv_heads, block_size,
        0 if cos is None else 2 * cos.shape[1], int(interleaved), int(q_norm is not None), eps,
        HEAD_DIM=head_dim, HEAD_PAD=tuning.head_pad(head_dim), HEADS=heads, K_KIND=key_kind, V_KIND=value_kind,
    )  # fmt: skip
    return query_out
