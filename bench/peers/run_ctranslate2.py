"""CTranslate2: Generator.generate_batch, all prompts in one batch; tokens are seen through its callback.

int8 weights and products, the rest fp32: it has no bf16 for this combination on the CPU.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import ctranslate2
from protocol import Generate, Stopwatch, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    generator = ctranslate2.Generator(
        options.model, device="cpu", compute_type="int8_float32", intra_threads=options.threads, inter_threads=1
    )
    tokens: list[str] = json.loads((Path(options.model) / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        watch = Stopwatch(len(prompts))

        def seen(step: ctranslate2.GenerationStepResult) -> bool:
            watch.add(step.batch_id)
            return False

        generator.generate_batch(
            [[tokens[token] for token in prompt] for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=seen,
        )
        return watch.timing()

    return generate, {"ctranslate2": version("ctranslate2")}


if __name__ == "__main__":
    main(load)
