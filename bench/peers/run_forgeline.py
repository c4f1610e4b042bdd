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
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        watch = Stopwatch(len(prompts))

        def receive(output: Output) -> None:
            watch.add(int(output.request_id), len(output.token_ids))
            if output.finish_reason is not None:
                ended.put(output.error)

        for index, prompt in enumerate(prompts):
            engine.submit(prompt, params, request_id=str(index), on_output=receive)
        for _ in prompts:
            if error := ended.get(timeout=600):
                raise RuntimeError(error)
        return watch.timing()

    return generate, {"forgeline": version("forgeline"), "openvino": version("openvino")}


if __name__ == "__main__":
    main(load)
