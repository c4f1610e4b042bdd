"""Launch the sampling kernels on torch tensors, and the per-slot state they need. Needs torch and triton.

Compiled on a GPU, interpreted on a CPU under TRITON_INTERPRET=1. The TensorRT executor keeps the same arrays in its own memory.
"""

from __future__ import annotations

import torch

from plugins.paged_attention.tuning import SAMPLE_BLOCK, SAMPLE_PIVOTS
from plugins.sampling import kernels

Tensor = torch.Tensor


class SamplingState:
    """Parameters and counters of `num_slots` requests, greedy until set."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        self.vocab_size = vocab_size
        self.temperature = full(0.0, torch.float32)
        self.top_k = full(0, torch.int32)
        self.top_p = full(1.0, torch.float32)
        self.min_p = full(0.0, torch.float32)
        self.repetition = full(1.0, torch.float32)
        self.presence = full(0.0, torch.float32)
        self.frequency = full(0.0, torch.float32)
        self.seeds = full(0, torch.int64)
        self.steps = full(0, torch.int32)
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self.masks = torch.full((num_slots, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    def load_history(self, slot: int, tokens: Tensor, num_prompt: int) -> None:
        """`tokens` int64: the prompt's num_prompt tokens, then the output so far."""
        kernels.load_history[(1,)](self.counts, slot, tokens, num_prompt, tokens.numel(), self.vocab_size, BLOCK=SAMPLE_BLOCK)


def sample(logits: Tensor, slots: Tensor, state: SamplingState, *, use_masks: bool = False) -> tuple[Tensor, Tensor]:
    """(token ids int64, logprobs fp32) of each row; advances `state`."""
    rows, vocab_size = logits.shape
    scratch = torch.empty((rows, 2, vocab_size), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    kernels.sample[(rows,)](
        logits, scratch, slots, state.temperature, state.top_k, state.top_p, state.min_p, state.repetition, state.presence,
        state.frequency, state.seeds, state.steps, state.counts, state.masks, tokens, logprobs, vocab_size,
        state.masks.shape[1] if use_masks else 0, BLOCK=SAMPLE_BLOCK, PIVOTS=SAMPLE_PIVOTS, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
