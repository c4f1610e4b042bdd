"""A real int8 model gives a prompt the same greedy tokens however it runs: alone, in a batch, in chunks, from the prefix cache,
as a fork. Its layers quantize their inputs on the fly, so a difference of 1e-6 in attention would show; the tiny one hides it."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from builder.build import build
from builder.config import BuildConfig
from builder.data import heldout_text
from runtime import LLM, SamplingParams
from runtime.contract import load_manifest
from runtime.engine import Output

LENGTHS = (1, 2, 31, 33, 40, 65, 97, 150)  # 33, 65 and 97 leave one token beside full blocks of 32
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["auto", "openvino"])  # kernels; without a compiler both are OpenVINO's
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "smollm2-int8"
    options = {"precision": "int8", "max_model_len": 512, "eval_tokens": 0, "cpu_kernels": request.param}
    build(BuildConfig("smollm2-135m-instruct", output, **options), quiet=True)
    return output


@pytest.mark.real_model
@pytest.mark.slow
def test_tokens_do_not_depend_on_company_chunks_or_cache(engine: Path) -> None:
    with LLM(engine, num_blocks=128) as llm:
        ids = llm.encode(heldout_text()[:3000])
        prompts = [ids[3 * i : 3 * i + n] for i, n in enumerate(LENGTHS)]
        first = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
        again = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
        assert [c.num_cached_tokens for c in first] == [0] * len(prompts)
        few = load_manifest(engine).precision.details["rows_independent"]  # otherwise two tokens are left to compute
        assert [c.num_cached_tokens for c in again] == [0, 0, 0, 32 if few else 0, 32, 64 if few else 32, 96 if few else 64, 128]
        alone = [c.token_ids for c in first]
        assert [c.token_ids for c in again] == alone
        assert [c.token_ids for c in llm.generate(prompts, PARAMS)] == alone
    with LLM(engine, num_blocks=128, enable_prefix_caching=False, max_num_batched_tokens=40, max_num_seqs=8) as llm:
        assert [c.token_ids for c in llm.generate(prompts, PARAMS)] == alone
        for prompt, expected in zip(prompts, alone, strict=True):
            assert forked(llm, prompt) == {0: list(expected), 1: list(expected)}


def forked(llm: LLM, prompt: list[int]) -> dict[int, list[int]]:
    """The tokens of two sequences of one request."""
    tokens: dict[int, list[int]] = {0: [], 1: []}
    results: queue.SimpleQueue[Output] = queue.SimpleQueue()
    llm.engine.submit(prompt, PARAMS, n=2, on_output=results.put)
    ends = 0
    while ends < 2:
        output = results.get(timeout=60)
        tokens[output.index] += output.token_ids
        ends += output.finish_reason is not None
    return tokens
