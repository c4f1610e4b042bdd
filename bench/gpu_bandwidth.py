"""gpu_verify.py: how fast memory can be read here, and how much of that a skinny matrix product and decode attention reach."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gpu_attention import Case, arch_of, grid_of, num_sms_of
from gpu_verify import Context

from plugins.paged_attention import launch, matrix

MIN_SHARE = 0.5  # of the copy bandwidth, where a step reads enough to fill the GPU
ENOUGH_BYTES = 512 << 20


def _milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median GPU time of one call, captured in a CUDA graph so that launching costs nothing."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def copy_bandwidth(_context: Context) -> tuple[str, dict[str, Any]]:
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = _milliseconds(lambda: target.copy_(source))
    assert torch.equal(source[:: 1 << 20], target[:: 1 << 20]), "a copy on the device is not exact"
    gbps = 2 * size / ms / 1e6
    return f"{gbps:.0f} GB/s read and written", {"gb_per_s": gbps, "bytes": 2 * size}


def skinny_gemm(context: Context) -> tuple[str, dict[str, Any]]:
    width = 8192
    weight = torch.randn(width, width, dtype=torch.float16, device="cuda") / math.sqrt(width)
    ceiling = context.figures.get("copy bandwidth", {}).get("gb_per_s", 0.0)
    rows = []
    for batch in (1, 8, 16, 64):
        x = torch.randn(batch, width, dtype=torch.float16, device="cuda")
        found = x @ weight.T
        wanted = x.double() @ weight.T.double()
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error < 2e-3, f"batch {batch}: relative error {error:.1e}"
        ms = _milliseconds(lambda x=x: torch.matmul(x, weight.T))  # type: ignore[misc]
        gbps = weight.numel() * 2 / ms / 1e6
        rows.append({"batch": batch, "ms": ms, "gb_per_s": gbps, "share": gbps / ceiling if ceiling else 0.0})
    text = ", ".join(f"{row['batch']}: {row['gb_per_s']:.0f} GB/s" for row in rows)
    return f"weights of {width}×{width} fp16 read at batch {text}", {"rows": rows}


def attention_bandwidth(context: Context) -> tuple[str, dict[str, Any]]:
    """Decode over contexts and batches of a Llama-8B-shaped layer; bytes are those of the keys and values of the sequences."""
    arch = arch_of(context)
    free = torch.cuda.mem_get_info()[0]
    ceiling = context.figures.get("copy bandwidth", {}).get("gb_per_s", 0.0)
    points, low = [], []
    for kind, size in (("fp16", 2), ("fp8", 1)):
        for batch in (1, 8, 32, 128):
            for length in (1024, 8192, 32768):
                case = Case(((1, length),) * batch, num_heads=32, num_kv_heads=8, key_kind=kind, value_kind=kind)
                num_bytes = 2 * batch * length * case.num_kv_heads * case.head_dim * size
                if num_bytes > free // 3:
                    continue
                ms = _decode_ms(context, case, arch)
                share = num_bytes / ms / 1e6 / ceiling if ceiling else 0.0
                point = {
                    "kv": kind,
                    "batch": batch,
                    "context": length,
                    "ms": ms,
                    "gb_per_s": num_bytes / ms / 1e6,
                    "share": share,
                }
                points.append(point)
                if ceiling and num_bytes >= ENOUGH_BYTES and share < MIN_SHARE:
                    low.append(f"{kind} {batch}×{length} {share:.0%}")
    assert not low, f"below {MIN_SHARE:.0%} of the copy bandwidth: {', '.join(low)}"
    best = max(points, key=lambda point: point["gb_per_s"])
    where = f"{best['batch']}×{best['context']}"
    text = f"{len(points)} points, best {best['gb_per_s']:.0f} GB/s ({best['share']:.0%} of copying) at {where}"
    return text, {"points": points}


def _decode_ms(context: Context, case: Case, arch: int) -> float:
    tiles = case.variant.tiles(arch)
    grid = grid_of(case, tiles, num_sms_of(context))
    batch, length = len(case.rows), case.rows[0][1]
    blocks = -(-length // case.block_size)
    shape = (batch * blocks, case.num_kv_heads, case.block_size, case.head_dim)
    stored = torch.float16 if case.key_kind == "fp16" else torch.uint8
    pools = [torch.zeros(shape, dtype=stored, device="cuda") for _ in range(2)]
    table = torch.randperm(batch * blocks, device="cuda", dtype=torch.int32).view(batch, blocks)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    query = torch.randn(batch, case.num_heads, case.head_dim, dtype=torch.float16, device="cuda")
    out, pointers = torch.empty_like(query), launch.pointer_table([(pools[0], pools[1])])
    scales = torch.ones(case.num_kv_heads, device="cuda")
    kind = matrix.device_kind(case.key_kind, arch)

    def step() -> None:
        launch.attend(
            query, pointers, table, starts, lengths, launch.plan(grid, tiles, starts, lengths), out, grid=grid, tiles=tiles,
            num_kv_heads=case.num_kv_heads, block_size=case.block_size, key_kind=kind, value_kind=kind, scale=0.1,
            k_scale=scales, v_scale=scales,
        )  # fmt: skip

    return _milliseconds(step)
