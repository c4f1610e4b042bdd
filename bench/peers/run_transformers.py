"""transformers: eager fp32 forward passes with a dynamic cache, argmax by torch."""

from __future__ import annotations

import argparse
from importlib.metadata import version

import torch
import transformers
from protocol import Generate, Stopwatch, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        watch = Stopwatch(len(prompts))
        tokens, cache = torch.tensor(prompts), transformers.DynamicCache(config=model.config)
        for _ in range(new_tokens):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            watch.add_step()
        return watch.timing()

    return generate, {"transformers": version("transformers"), "torch": version("torch")}


if __name__ == "__main__":
    main(load)
