"""Many requests later an engine holds what it held before: nothing is kept of one that has ended."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import LLM
from runtime.bench.roofline import LiveRoofline
from runtime.request import SamplingParams

STOPPED = SamplingParams(max_tokens=3, ignore_eos=True, stop=("zzz",))
SAMPLED = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=1, logprobs=2, frequency_penalty=0.5)


def test_requests_that_ended_take_no_memory(tiny_engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is not forgotten takes 2 kB at least. Prefix cache and pieces of text are full after the first round, and so
    is the record of recent steps."""
    monkeypatch.setattr(LiveRoofline, "MAX_STEPS", 16)
    with LLM(tiny_engine("fp32"), num_blocks=16, max_model_len=256) as llm:

        def serve(first: int, count: int) -> int:
            for number in range(first, first + count):
                prompts = [[5 + (number % 5 * 31 + i) % 2000 for i in range(40 + shift)] for shift in range(2)]
                llm.generate(prompts, [STOPPED, SAMPLED])
                for _ in llm.stream(prompts[0], STOPPED):
                    break  # cancelled
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = serve(0, 5)
            grown = serve(5, 15) - before
        finally:
            tracemalloc.stop()
    assert grown < 45 * 1000, f"{grown} bytes after 45 requests"
