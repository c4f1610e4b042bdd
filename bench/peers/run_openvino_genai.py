"""openvino-genai: ContinuousBatchingPipeline, stepped by hand.

Its defaults, which on this device are an 8-bit KV cache and bf16 arithmetic where the processor has it, but for the group of
dynamic quantization, whose fastest is taken: 128 where that divides the hidden size (llama-1b: 1.05 to 1.14 times its 64),
else 64 (SmolLM2: prefill 1.1 times its 128); the default is 32.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Generate, Stopwatch, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = max(options.batches)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 4  # GB
    hidden_size = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    group = 64 if hidden_size % 128 else 128
    pipeline = genai.ContinuousBatchingPipeline(
        options.model,
        scheduler,
        "CPU",
        {"INFERENCE_NUM_THREADS": options.threads, "PERFORMANCE_HINT": "LATENCY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": group},
    )
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens = new_tokens, new_tokens
        config.ignore_eos, config.do_sample = True, False
        watch = Stopwatch(len(prompts))
        handles = [pipeline.add_request(next(numbers), ov.Tensor(np.array([prompt], np.int64)), config) for prompt in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    watch.add(index, sum(len(output.generated_ids) for output in handle.read().values()))
        return watch.timing()

    return generate, {name: version(name) for name in ("openvino-genai", "openvino")}


if __name__ == "__main__":
    main(load)
