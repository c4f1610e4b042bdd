"""Ours: the engine in this process, chunked prefill and sampling as served."""

from __future__ import annotations

import argparse
import queue
from importlib.metadata import version

from protocol import Generate, Stopwatch, Timing, main

from runtime.config import RuntimeConfig
from runtime.engine import Engine, Output
from runtime.request import SamplingParams


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    largest = max(options.batches)
    config = RuntimeConfig(num_threads=options.threads, max_num_seqs=largest, enable_prefix_caching=False)
    engine = Engine.load(options.model, config)

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        outputs: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        watch = Stopwatch(len(prompts))
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, params, on_output=lambda output, index=index: outputs.put((index, output)))  # type: ignore[misc]
        left = len(prompts)
        while left:
            index, output = outputs.get(timeout=600)
            watch.add(index, len(output.token_ids))
            watch.step_done()
            if output.finish_reason is not None:
                if output.error:
                    raise RuntimeError(output.error)
                left -= 1
        return watch.timing()

    return generate, {"forgeline": version("forgeline"), "openvino": version("openvino")}


if __name__ == "__main__":
    main(load)
