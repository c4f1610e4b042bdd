"""Ragged batches for the kernel tests, and what runs in the interpreter's process (see interpreter.py). Not a test.

Everything a kernel must not read is poison: free pages, the table's unused entries (which point to a poisoned page), pages wholly
before a sliding window, cells past a sequence's end, and every output before it is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plugins.paged_attention import reference, tuning
from plugins.paged_attention.tuning import Tiles

DECODE, PREFILL = Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)  # small enough for the interpreter


@dataclass(frozen=True)
class Case:
    """`rows` are (new tokens, sequence length) pairs; length 0 is padding."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    key_kind: str = "fp16"  # fp8soft is fp8, read without hardware conversion
    value_kind: str = "fp16"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tiles: Tiles = DECODE
    slots: int = 2
    fixed_tiles: int = 0
    query_lens: tuple[int, int] = (1, 2**30)
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    query: Any
    key_pool: Any  # as stored, canonical order; bf16 as float32
    value_pool: Any
    k_scale: Any
    v_scale: Any
    block_table: Any
    query_start_loc: Any
    seq_lens: Any
    sinks: Any


def _poison(stored: Any, kind: str, pages: Any, tails: list[tuple[int, int]]) -> None:
    value = {"fp8": 0x7F, "int8": -128}.get(kind, np.nan)
    stored[pages] = value
    for page, offset in tails:
        stored[page, offset:] = value


def make_inputs(case: Case) -> Inputs:
    rng = np.random.default_rng(case.seed)
    needed = [-(-length // case.block_size) for _, length in case.rows]
    num_blocks = sum(needed) + 2
    order = rng.permutation(num_blocks)
    free = order[sum(needed) :]
    table = np.full((len(case.rows), max(*needed, 1) + 1), free[0], np.int32)
    dead = list(free)
    tails = []  # (page, offset): what the last page holds past the end
    used = 0
    for row, (count, length) in enumerate(case.rows):
        table[row, : needed[row]] = order[used : used + needed[row]]
        used += needed[row]
        if length % case.block_size:
            tails.append((table[row, needed[row] - 1], length % case.block_size))
        if case.window:
            expired = max(0, length - count - case.window + 1) // case.block_size
            dead += list(table[row, :expired])

    def pool(kind: str, scale: Any) -> Any:
        kind = kind.removesuffix("soft")
        values = rng.standard_normal((num_blocks, case.block_size, case.num_kv_heads, case.head_dim)).astype(np.float32)
        stored = reference.quantize(values, kind, scale)
        _poison(stored, kind, dead, tails)
        return stored

    k_scale, v_scale = (rng.uniform(0.01, 0.03, case.num_kv_heads).astype(np.float32) for _ in range(2))
    counts = [count for count, _ in case.rows]
    return Inputs(
        query=rng.standard_normal((sum(counts), case.num_heads, case.head_dim)).astype(np.float16),
        key_pool=pool(case.key_kind, k_scale),
        value_pool=pool(case.value_kind, v_scale),
        k_scale=k_scale,
        v_scale=v_scale,
        block_table=table,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=np.array([length for _, length in case.rows], np.int32),
        sinks=rng.standard_normal(case.num_heads).astype(np.float32) * 2 if case.sinks else None,
    )


def expected(case: Case, inputs: Inputs) -> Any:
    return reference.attention(
        inputs.query.astype(np.float32),
        reference.dequantize(inputs.key_pool, case.key_kind.removesuffix("soft"), inputs.k_scale),
        reference.dequantize(inputs.value_pool, case.value_kind.removesuffix("soft"), inputs.v_scale),
        inputs.block_table,
        inputs.query_start_loc,
        inputs.seq_lens,
        scale=1 / math.sqrt(case.head_dim),
        sliding_window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
    )


def relative_error(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# In the interpreter's process.


def _pool_tensor(stored: Any, kind: str) -> Any:
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(stored.transpose(0, 2, 1, 3)))
    return tensor.to(torch.bfloat16) if kind == "bf16" else tensor


def run_attention(case: Case, inputs: Inputs) -> tuple[Any, Any]:
    """(out as float32, plan [3, num_seqs + 1])."""
    import torch

    from plugins.paged_attention import launch

    def tensor(array: Any) -> Any:
        return torch.from_numpy(array.copy())

    counts = [count for count, _ in case.rows]
    longest = max(max(length for _, length in case.rows), 1)
    grid = tuning.attention_grid(
        num_tokens=sum(counts),
        num_seqs=len(counts),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_m=case.tiles.block_m,
        resident_programs=case.slots * tuning.grid_parts(case.num_heads, case.num_kv_heads, case.tiles.block_m),
        max_query_len=max(counts),
        fixed_splits=-(-longest // (case.tiles.tile * case.fixed_tiles)) if case.fixed_tiles else 0,
    )
    starts, lengths = tensor(inputs.query_start_loc), tensor(inputs.seq_lens)
    plan = launch.plan(
        grid, case.tiles, starts, lengths, window=case.window, fixed_tiles=case.fixed_tiles, query_lens=case.query_lens
    )
    pools = _pool_tensor(inputs.key_pool, case.key_kind), _pool_tensor(inputs.value_pool, case.value_kind)
    cells = grid.work_items * grid.parts * case.tiles.block_m
    out = launch.attend(
        tensor(inputs.query),
        launch.pointer_table([pools, pools][: 1 + case.seed % 2]),
        tensor(inputs.block_table),
        starts,
        lengths,
        plan,
        torch.full(inputs.query.shape, math.nan, dtype=torch.float16),
        grid=grid,
        tiles=case.tiles,
        layer=case.seed % 2,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        key_kind=case.key_kind,
        value_kind=case.value_kind,
        scale=1 / math.sqrt(case.head_dim),
        window=case.window,
        softcap=case.softcap,
        sinks=None if inputs.sinks is None else tensor(inputs.sinks),
        k_scale=tensor(inputs.k_scale),
        v_scale=tensor(inputs.v_scale),
        partial=torch.full((cells * case.head_dim,), math.nan),
        partial_lse=torch.full((cells,), math.nan),
    )
    return out.float().numpy(), plan.view(3, -1).numpy()


def run_plan(
    rows: tuple[tuple[int, int], ...],
    *,
    block_tokens: int,
    slots: int,
    tile: int = 16,
    window: int = 0,
    fixed_tiles: int = 0,
    query_lens: tuple[int, int] = (1, 2**30),
    block: int = 4,
) -> list[list[int]]:
    import torch

    from plugins.paged_attention import kernels

    starts = torch.tensor(np.cumsum([0, *(count for count, _ in rows)]), dtype=torch.int32)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    plan = torch.full((3, len(rows) + 1), -9, dtype=torch.int32)
    kernels.plan_splits[(1,)](
        starts, lengths, plan, len(rows), block_tokens, window, slots, tuning.MIN_TILES, fixed_tiles, *query_lens,
        TILE=tile, BLOCK=block, WAVES=tuning.PLAN_WAVES,
    )  # fmt: skip
    return plan.tolist()


def run_write(arrays: dict[str, Any], *, block_size: int, key_kind: str, value_kind: str, **options: Any) -> tuple[Any, Any, Any]:
    """(rotated query, key pool, value pool) from canonical pools; bf16 pools travel as float32."""
    import torch

    from plugins.paged_attention import launch

    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    key_pool = _pool_tensor(arrays["key_pool"], key_kind)
    value_pool = _pool_tensor(arrays["value_pool"], value_kind)
    qkv = tensors["qkv"]  # [T, Hq + 2 Hkv, D]: slices of one projection
    num_kv_heads = key_pool.shape[1]
    heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = qkv[:, :heads], qkv[:, heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    out = torch.full(query.shape, math.nan, dtype=qkv.dtype)
    named = ("cos", "sin", "q_norm", "k_norm", "k_scale", "v_scale")
    launch.write_kv(
        query, key, value, tensors["positions"], tensors["slot_mapping"], launch.pointer_table([(key_pool, value_pool)]), out,
        block_size=block_size, key_kind=key_kind, value_kind=value_kind,
        **{name: tensors.get(name) for name in named}, **options,
    )  # fmt: skip

    def canonical(pool: Any) -> Any:
        return (pool.float() if pool.dtype == torch.bfloat16 else pool).numpy().transpose(0, 2, 1, 3)

    return out.numpy(), canonical(key_pool), canonical(value_pool)


def run_decode(kind: str) -> Any:
    """The 256 codes of an 8-bit format as the attention kernel reads them."""
    import torch
    import triton
    import triton.language as tl

    from plugins.paged_attention.kernels import decode

    globals().update(tl=tl, decode=decode)

    @triton.jit
    def kernel(codes, out, KIND: tl.constexpr):
        lanes = tl.arange(0, 256)
        tl.store(out + lanes, decode(tl.load(codes + lanes), KIND, tl.float16))

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    kernel[(1,)](codes.view(torch.int8) if kind == "int8" else codes, out, KIND=kind)
    return out.numpy()


def run_sample(
    logits: Any, state: dict[str, Any], *, steps: int = 1, history: dict[int, tuple[list[int], int]] | None = None
) -> Any:
    """(token ids, logprobs, counts, steps) of the last of `steps` calls; `state` sets fields of SamplingState."""
    import torch

    from plugins.sampling import launch

    slots = state.pop("slots")
    states = launch.SamplingState(int(slots.max()) + 1, logits.shape[1])
    for name, values in state.items():
        getattr(states, name)[:] = torch.from_numpy(np.asarray(values))
    for slot, (tokens, num_prompt) in (history or {}).items():
        states.load_history(slot, torch.tensor(tokens, dtype=torch.int64), num_prompt)
    for _ in range(steps):
        tokens, logprobs = launch.sample(
            torch.from_numpy(logits), torch.from_numpy(slots.astype(np.int32)), states, use_masks="masks" in state
        )
    return tokens.numpy(), logprobs.numpy(), states.counts.numpy(), states.steps.numpy()


__all__ = ["Case", "Inputs", "expected", "make_inputs", "relative_error", "replace"]
