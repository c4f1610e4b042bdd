"""gpu_verify.py: the plugin's own launches, from cubins compiled ahead of time, against the kernels compiled at run time."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_attention import PROGRAMS_PER_SM, Case, arch_of, attend, device_pool, make_data, relative_error
from gpu_verify import Context

from plugins.paged_attention import aot, launch, matrix, tuning
from plugins.paged_attention.tensorrt import AttentionNode, KernelStore
from plugins.paged_attention.tensorrt_op import AttentionSpec
from plugins.paged_attention.tensorrt_step import StepShape, kernel_names, workspace_bytes


def cubins_match_jit(context: Context) -> tuple[str, dict[str, Any]]:
    arch, compiled = arch_of(context), 0
    worst = 0.0
    torch.zeros(1, device="cuda")  # makes the device's context current for the driver API
    with tempfile.TemporaryDirectory() as folder:
        store = KernelStore()
        store.directories.append(Path(folder))
        for case in (Case(((1, 700), (1, 5), (1, 3001))), Case(((1, 900), (200, 200), (77, 640)), "prefill")):
            spec = AttentionSpec(
                layer=0, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
                block_size=case.block_size, scale=1 / math.sqrt(case.head_dim), key_kind="fp16", value_kind="fp16",
                decode_blocks_per_sm=PROGRAMS_PER_SM, prefill_blocks_per_sm=1,
            )  # fmt: skip
            names = kernel_names(spec, case.dtype, arch)
            for kernel in matrix.for_variants([replace(case, phase=phase).variant for phase in tuning.PHASES], arch):
                if kernel.name in names:
                    aot.build_one(kernel, arch, Path(folder))
                    compiled += 1
            found, jit = _plugin_and_jit(context, case, spec, store, arch)
            assert torch.isfinite(found).all(), "the cubins left NaN in the output"
            error = relative_error(found.float().cpu().numpy(), jit.float().cpu().numpy())
            assert error < 1e-3, f"{case.phase}: cubins and JIT differ by {error:.1e}"
            worst = max(worst, error)
    return f"{compiled} cubins for sm{arch}, worst difference {worst:.1e}", {"cubins": compiled, "worst": worst}


def _plugin_and_jit(
    context: Context, case: Case, spec: AttentionSpec, store: KernelStore, arch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one step whose new tokens are written first, as the plugin does it; no rotary embedding."""
    data = make_data(case)
    counts = [count for count, _ in case.rows]
    total, width = sum(counts), spec.q_width + 2 * spec.kv_width
    slots, fresh = [], []
    for row, (count, length) in enumerate(case.rows):
        for position in range(length - count, length):
            slots.append(int(data.table[row, position // case.block_size]) * case.block_size + position % case.block_size)
            fresh.append((data.table[row, position // case.block_size], position % case.block_size))
    pages, offsets = (np.array(each) for each in zip(*fresh, strict=True))
    keys, values = (torch.from_numpy(pool[pages, offsets].astype(np.float16)) for pool in (data.keys, data.values))
    flat = [data.query.reshape(total, -1), keys.reshape(total, -1), values.reshape(total, -1)]
    qkv = torch.cat(flat, 1).contiguous().to("cuda")
    jit = attend(context, case, data, arch)
    data.keys[pages, offsets] = data.values[pages, offsets] = np.nan  # the plugin has to write them itself
    pools = device_pool(data.keys, case.key_kind, "cuda"), device_pool(data.values, case.value_kind, "cuda")
    tensors = {
        "qkv": qkv,
        "rows": torch.arange(total, device="cuda"),
        "slot_mapping": torch.tensor(slots, dtype=torch.int32, device="cuda"),
        "block_table": torch.from_numpy(data.table).to("cuda"),
        "query_start_loc": torch.from_numpy(data.starts).to("cuda"),
        "seq_lens": torch.from_numpy(data.lengths).to("cuda"),
        "kv_pointers": launch.pointer_table([pools]),
    }
    assert qkv.shape == (total, width)
    shape = StepShape(num_tokens=total, num_seqs=len(counts), table_width=data.table.shape[1])
    workspace = torch.full((workspace_bytes(spec, case.dtype, arch, shape) // 4 + 64,), math.nan, device="cuda")
    out = torch.full((total, case.num_heads, case.head_dim), math.nan, dtype=torch.float16, device="cuda")
    node = AttentionNode(spec, store, building=False)
    node.prepare(shape, case.dtype)
    stream = torch.cuda.current_stream().cuda_stream
    node.run(
        [tensors[name].data_ptr() for name in spec.inputs], out.data_ptr(), workspace.data_ptr(), stream,
        output_bytes=out.numel() * 2,
    )  # fmt: skip
    torch.cuda.synchronize()
    return out, jit
