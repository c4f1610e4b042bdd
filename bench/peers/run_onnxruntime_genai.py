"""onnxruntime-genai: one Generator per batch."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version

import numpy as np
import onnxruntime_genai as og
from protocol import Generate, Stopwatch, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    config = og.Config(options.model)
    threads = {"intra_op_num_threads": options.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = og.Model(config)

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        length = len(prompts[0]) + new_tokens
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(prompts))
        watch = Stopwatch(len(prompts))
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
            watch.add_step()
        return watch.timing()

    return generate, {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}


if __name__ == "__main__":
    main(load)
