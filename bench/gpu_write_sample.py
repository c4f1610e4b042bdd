"""gpu_verify.py: writing keys and values into pages, and sampling, against numpy and torch on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gpu_attention import arch_of, relative_error
from gpu_verify import Context

from plugins.paged_attention import launch, reference


def write_correct(context: Context) -> tuple[str, dict[str, Any]]:
    """Norm, rotary embedding and the pages, for every KV format; padding stores nothing."""
    rng = np.random.default_rng(3)
    tokens, heads, kv_heads, dim, block = (6, 4, 2, 64, 16) if context.small else (97, 32, 8, 128, 64)
    arch, worst = arch_of(context), 0.0
    kinds = ("fp16", "int8") if context.small else ("fp16", "fp8", "int8")
    for kind in kinds:
        qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, dim)).astype(np.float16)
        positions = rng.integers(0, 500, tokens)
        slots = rng.permutation((tokens // block + 2) * block)[:tokens].astype(np.int32)
        slots[-1] = -1
        angles = np.arange(500)[:, None] * 10000.0 ** (-2 * np.arange(dim // 2) / dim)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        norms = rng.uniform(0.5, 1.5, (2, dim)).astype(np.float16)
        scale = rng.uniform(0.02, 0.04, (2, kv_heads)).astype(np.float32)
        pool_shape = (tokens // block + 2, kv_heads, block, dim)
        stored = torch.float16 if kind == "fp16" else torch.int8 if kind == "int8" else torch.uint8
        pools = [torch.zeros(pool_shape, dtype=stored, device=context.device) for _ in range(2)]
        packed = torch.from_numpy(qkv).to(context.device)
        out = torch.full((tokens, heads, dim), math.nan, dtype=torch.float16, device=context.device)

        def tensor(array: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(context.device)

        launch.write_kv(
            packed[:, :heads],
            packed[:, heads : heads + kv_heads],
            packed[:, heads + kv_heads :],
            tensor(positions),
            tensor(slots),
            launch.pointer_table([(pools[0], pools[1])]),
            out,
            block_size=block,
            key_kind=kind,
            value_kind=kind,
            cos=tensor(cos),
            sin=tensor(sin),
            q_norm=tensor(norms[0]),
            k_norm=tensor(norms[1]),
            eps=1e-6,
            k_scale=tensor(scale[0]),
            v_scale=tensor(scale[1]),
        )
        x = qkv.astype(np.float32)
        norm = norms.astype(np.float32)
        query = reference.rotate(reference.rms_norm(x[:, :heads], norm[0], 1e-6), positions, cos, sin, interleaved=False)
        key = reference.rms_norm(x[:, heads : heads + kv_heads], norm[1], 1e-6)
        key = reference.rotate(key, positions, cos, sin, interleaved=False)
        live = slots >= 0
        worst = max(worst, relative_error(out.float().cpu().numpy()[live], query[live]))
        for side, values in enumerate((key, x[:, heads + kv_heads :])):
            pages = pools[side].cpu().numpy().transpose(0, 2, 1, 3).reshape(-1, kv_heads, dim)
            found = reference.dequantize(pages, kind, scale[side])
            expected = reference.dequantize(reference.quantize(values, kind, scale[side]), kind, scale[side])
            error = relative_error(found[slots[live]], expected[live])
            assert error < {"fp16": 1e-3, "fp8": 3e-3, "int8": 3e-3}[kind], f"{kind}, side {side}: relative error {error:.1e}"
            assert not np.delete(pages, slots[live], axis=0).any(), (
                f"{kind}: padding, or a token, was stored where nothing belongs"
            )
    assert worst < 1e-3, f"queries: relative error {worst:.1e}"
    return f"{', '.join(kinds)}; queries within {worst:.1e}", {"arch": arch, "worst": worst}


def sampling_correct(context: Context) -> tuple[str, dict[str, Any]]:
    """Greedy is argmax; sampled tokens follow the distribution, by a chi-square test at one in a million."""
    from plugins.sampling.launch import SamplingState, sample

    rows, vocab = (24, 40) if context.small else (20000, 1000)
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, vocab, generator=generator)
    slots = torch.arange(rows, dtype=torch.int32)
    state = SamplingState(rows, vocab, context.device)
    tokens, logprobs = sample(logits.to(context.device), slots.to(context.device), state)
    assert torch.equal(tokens.cpu(), logits.argmax(-1)), "greedy sampling is not argmax"
    best = torch.log_softmax(logits.double(), -1).amax(-1)
    assert float((logprobs.cpu().double() - best).abs().max()) < 1e-3, "log-probabilities are off"

    kept = 12
    row = torch.randn(vocab, generator=generator)
    state = SamplingState(rows, vocab, context.device)
    state.temperature.fill_(0.8)
    state.top_k.fill_(kept)
    state.seeds.copy_(torch.arange(rows, dtype=torch.int64))
    counts = np.zeros(vocab)
    for _ in range(4):
        tokens, _ = sample(row.expand(rows, vocab).contiguous().to(context.device), slots.to(context.device), state)
        counts += np.bincount(tokens.cpu().numpy(), minlength=vocab)
    chosen = torch.topk(row, kept).indices
    chance = torch.softmax(row[chosen].double() / 0.8, 0).numpy()
    assert counts.sum() == counts[chosen.numpy()].sum(), "a token outside top-k was sampled"
    expected = chance * counts.sum()
    chi_square = float((((counts[chosen.numpy()] - expected) ** 2) / expected).sum())
    limit = 51.1  # 11 degrees of freedom, p = 4e-7
    assert chi_square < limit, f"chi-square {chi_square:.1f} exceeds {limit}"
    return f"argmax of {rows} rows; chi-square {chi_square:.1f} < {limit}", {"chi_square": chi_square, "rows": rows}
