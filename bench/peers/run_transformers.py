"""transformers: eager forward passes with a dynamic cache, argmax by torch.

bf16 where the processor computes in it (a half to a third of the processor time of fp32 there), else fp32.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from protocol import Generate, Stopwatch, Timing, main


def has_bf16() -> bool:
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if has_bf16() else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        watch = Stopwatch(len(prompts))
        tokens, cache = torch.tensor(prompts), transformers.DynamicCache(config=model.config)
        for _ in range(new_tokens):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            watch.add_step()
        return watch.timing()

    return generate, {
        "transformers": version("transformers"),
        "torch": version("torch"),
        "dtype": str(dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    main(load)
