"""gpu_verify.py: the attention kernels, compiled for this GPU, against the numpy reference.

Random inputs with a fixed seed; outputs, free pages and partial results are NaN before a kernel runs. Tolerance: fp16 rounds
queries, probabilities and outputs to 2^-11, so the relative error in the norm stays under 1e-3; bf16 rounds to 2^-8: 8e-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu_verify import Context

from plugins.paged_attention import cubins, launch, matrix, reference, tuning
from plugins.paged_attention.tuning import AttentionVariant, Tiles

TOLERANCE = {"fp16": 1e-3, "bf16": 8e-3}
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
PROGRAMS_PER_SM = 2  # of the attention kernels at 222 to 246 registers


def arch_of(context: Context) -> int:
    if context.device == "cpu":
        return 80
    major, minor = torch.cuda.get_device_capability()
    return cubins.arch_for(10 * major + minor)


def num_sms_of(context: Context) -> int:
    return 2 if context.device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count


@dataclass(frozen=True)
class Case:
    """`rows` are (new tokens, sequence length); length 0 is padding."""

    rows: tuple[tuple[int, int], ...]
    phase: str = "decode"
    dtype: str = "fp16"
    key_kind: str = "fp16"
    value_kind: str = "fp16"
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 64
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0

    @property
    def variant(self) -> AttentionVariant:
        return AttentionVariant(
            self.phase, self.head_dim, self.dtype, self.key_kind, self.value_kind, self.block_size, self.softcap > 0
        )


def cases(*, small: bool) -> list[Case]:
    decode = ((1, 37), (1, 0), (1, 5), (1, 90)) if small else ((1, 700), (1, 0), (1, 5), (1, 3001), (1, 64), (1, 65))
    mixed = ((1, 70), (5, 5), (1, 0), (7, 40)) if small else ((1, 900), (200, 200), (1, 0), (77, 640), (1, 64))
    base = [Case(decode), Case(mixed, "prefill")]
    if small:
        base = [replace(case, head_dim=64, block_size=16, num_heads=4) for case in base]
        return [*base, replace(base[0], key_kind="fp8", value_kind="int8", sinks=True, seed=1)]
    # Each format, head size, page size and soft cap is a kernel of its own, 4 to 7 s of compilation: the phases share them out.
    first, second = base
    found = list(base)
    for case, kinds in (
        (first, ("bf16", "bf16")), (first, ("fp8", "fp8")), (first, ("int8", "int8")), (first, ("fp16", "fp8")),
        (second, ("bf16", "bf16")), (second, ("fp8", "fp8")), (second, ("fp16", "int8")),
    ):  # fmt: skip
        dtype = "bf16" if "bf16" in kinds else "fp16"
        found.append(replace(case, dtype=dtype, key_kind=kinds[0], value_kind=kinds[1]))
    found += [
        replace(first, head_dim=64),
        replace(first, head_dim=80),
        replace(second, head_dim=96),
        replace(second, head_dim=256),
    ]
    found.append(replace(first, block_size=16))
    for case in base:
        found += [replace(case, num_heads=heads, num_kv_heads=kv) for heads, kv in ((2, 2), (8, 1), (6, 1), (40, 1))]
        found += [replace(case, window=100), replace(case, softcap=5.0), replace(case, sinks=True)]
    return [replace(case, seed=seed) for seed, case in enumerate(found)]


@dataclass
class Data:
    """One case's arrays, canonical as the reference takes them, with poison in every page that must not be read."""

    query: Any
    keys: Any
    values: Any
    k_scale: Any
    v_scale: Any
    table: Any
    starts: Any
    lengths: Any
    sinks: Any


def make_data(case: Case) -> Data:
    rng = np.random.default_rng(case.seed)
    needed = [-(-length // case.block_size) for _, length in case.rows]
    order = rng.permutation(sum(needed) + 2)
    free = order[sum(needed) :]
    table = np.full((len(case.rows), max(needed) + 1), free[0], np.int32)
    used = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[used : used + count]
        used += count

    def pool(kind: str, scale: Any) -> Any:
        shape = (len(order), case.block_size, case.num_kv_heads, case.head_dim)
        stored = reference.quantize(rng.standard_normal(shape).astype(np.float32), kind, scale)
        stored[free] = {"fp8": 0x7F, "int8": -128}.get(kind, np.nan)
        return stored

    k_scale, v_scale = (rng.uniform(0.01, 0.03, case.num_kv_heads).astype(np.float32) for _ in range(2))
    counts = [count for count, _ in case.rows]
    query = rng.standard_normal((sum(counts), case.num_heads, case.head_dim)).astype(np.float32)
    return Data(
        query=torch.from_numpy(query).to(TORCH[case.dtype]),
        keys=pool(case.key_kind, k_scale),
        values=pool(case.value_kind, v_scale),
        k_scale=k_scale,
        v_scale=v_scale,
        table=table,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        lengths=np.array([length for _, length in case.rows], np.int32),
        sinks=2 * rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None,
    )


def wanted(case: Case, data: Data) -> Any:
    return reference.attention(
        data.query.float().numpy(),
        reference.dequantize(data.keys, case.key_kind, data.k_scale),
        reference.dequantize(data.values, case.value_kind, data.v_scale),
        data.table,
        data.starts,
        data.lengths,
        scale=1 / math.sqrt(case.head_dim),
        sliding_window=case.window,
        softcap=case.softcap,
        sinks=data.sinks,
    )


def device_pool(stored: Any, kind: str, device: str) -> torch.Tensor:
    """Canonical → [num_blocks, Hkv, block_size, D]."""
    tensor = torch.from_numpy(np.ascontiguousarray(stored.transpose(0, 2, 1, 3)))
    return (tensor.to(torch.bfloat16) if kind == "bf16" else tensor).to(device)


def grid_of(case: Case, tiles: Tiles, num_sms: int) -> tuning.AttentionGrid:
    counts = [count for count, _ in case.rows]
    return tuning.attention_grid(
        num_tokens=sum(counts),
        num_seqs=len(counts),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_m=tiles.block_m,
        resident_programs=num_sms * PROGRAMS_PER_SM,
        max_query_len=max(counts),
    )


def attend(context: Context, case: Case, data: Data, arch: int) -> torch.Tensor:
    """The kernels, compiled for this GPU, on poisoned outputs."""
    tiles = Tiles(16, 32, 4, 1) if context.small else case.variant.tiles(arch)
    grid = grid_of(case, tiles, num_sms_of(context))

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(context.device)

    pools = device_pool(data.keys, case.key_kind, context.device), device_pool(data.values, case.value_kind, context.device)
    starts, lengths = tensor(data.starts), tensor(data.lengths)
    cells = grid.work_items * grid.parts * tiles.block_m
    query = data.query.to(context.device)
    return launch.attend(
        query,
        launch.pointer_table([pools]),
        tensor(data.table),
        starts,
        lengths,
        launch.plan(grid, tiles, starts, lengths, window=case.window),
        torch.full_like(query, math.nan),
        grid=grid,
        tiles=tiles,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        key_kind=matrix.device_kind(case.key_kind, arch),
        value_kind=matrix.device_kind(case.value_kind, arch),
        scale=1 / math.sqrt(case.head_dim),
        window=case.window,
        softcap=case.softcap,
        sinks=None if data.sinks is None else tensor(data.sinks),
        k_scale=tensor(data.k_scale),
        v_scale=tensor(data.v_scale),
        partial=torch.full((cells * case.head_dim,), math.nan, device=context.device),
        partial_lse=torch.full((cells,), math.nan, device=context.device),
    )


def relative_error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def attention_correct(context: Context) -> tuple[str, dict[str, Any]]:
    arch = arch_of(context)
    worst = 0.0
    tried = [case for case in cases(small=context.small) if case.variant.supported(arch)]
    for case in tried:
        data = make_data(case)
        found = attend(context, case, data, arch).float().cpu().numpy()
        assert np.isfinite(found).all(), f"{case}: the output holds NaN: something unwritten or a free page was read"
        error = relative_error(found, wanted(case, data))
        assert error < TOLERANCE[case.dtype], f"{case}: relative error {error:.1e}"
        worst = max(worst, error / TOLERANCE[case.dtype])
    return f"{len(tried)} cases, worst error {worst:.2f} of its tolerance", {"cases": len(tried), "worst_share": worst}
