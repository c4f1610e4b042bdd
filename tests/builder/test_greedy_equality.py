"""The whole path against Hugging Face: greedy tokens of a ragged batch with chunked prefill are those of the eager model.

The eager model is asked once per prompt, teacher-forced: its choice after prompt + tokens[:n] must be tokens[n] for every n. By
induction these are the tokens that its own greedy generation gives, end-of-sequence ignored, and a failure shows where they part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tokenizers import Tokenizer

from builder import model_zoo
from builder.accuracy import evaluate
from builder.build import build
from builder.checkpoint import load_checkpoint
from builder.config import BuildConfig
from builder.data import calibration_text, heldout_text
from builder.export import export_model
from builder.fuse import fuse
from plugins.paged_attention.op import attach_functions
from runtime.batch import BatchBuilder, StepInputs
from runtime.block_pool import BlockPool
from runtime.config import RuntimeConfig, resolve
from runtime.contract import TOKENIZER_DIR, load_manifest
from runtime.executors import load_executor
from runtime.executors.base import Executor, StepOutput
from runtime.executors.reference import ReferenceExecutor
from runtime.loop import Loop
from runtime.request import Request, SamplingParams
from runtime.sampler import Sampler
from runtime.scheduler import Scheduler

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"
PROMPT_LENGTHS = (1, 3, 17, 32, 33, 64, 100, 150)  # around the block sizes 16 and 32
NUM_TOKENS = 64
TOKENS_PER_STEP = 24  # so prompts of 32 and more are split


Shape = list[tuple[int, int]]  # of a step: tokens computed and tokens cached before, per sequence


def record_steps(executor: Executor) -> list[Shape]:
    """The list to which every later step of `executor` adds its shape."""
    steps: list[Shape] = []
    execute = executor.execute

    def recorded(inputs: StepInputs) -> StepOutput:
        counts = np.diff(inputs.query_start_loc)
        steps.append(list(zip(counts.tolist(), (inputs.seq_lens - counts).tolist(), strict=True)))
        return execute(inputs)

    executor.execute = recorded  # type: ignore[method-assign]
    return steps


def prompts_from(tokenizer_directory: Path) -> list[list[int]]:
    """Token ids of mixed lengths, from different places of the built-in text."""
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    text = calibration_text()
    places = range(0, len(text), len(text) // len(PROMPT_LENGTHS))
    return [tokenizer.encode(text[at : at + 2000]).ids[:n] for at, n in zip(places, PROMPT_LENGTHS, strict=False)]


def greedy_batch(executor: Executor, prompts: list[list[int]]) -> list[list[int]]:
    steps = record_steps(executor)
    scheduler = Scheduler(
        BlockPool(executor.num_blocks, executor.block_size),
        max_num_seqs=len(prompts),
        max_num_batched_tokens=TOKENS_PER_STEP,
        max_model_len=256,
    )
    builder = BatchBuilder(executor.block_size, TOKENS_PER_STEP)
    loop = Loop(executor, scheduler, Sampler(executor.vocab_size), builder)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [Request(f"{n}", prompt, params) for n, prompt in enumerate(prompts)]
    for request in requests:
        loop.submit(request)
    while loop.step():
        pass
    mixed = [step for step in steps if any(n == 1 for n, _ in step) and any(n > 1 and cached for n, cached in step)]
    assert mixed, "no step ran a decode beside a later chunk of a prompt"
    assert [request.error for request in requests] == [""] * len(prompts)
    return [request.token_ids[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]


@torch.no_grad()
def eager_choices(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def assert_greedy_equals_eager(executor: Executor, model: Any, tokenizer_directory: Path) -> None:
    prompts = prompts_from(tokenizer_directory)
    assert [len(prompt) for prompt in prompts] == list(PROMPT_LENGTHS)
    outputs = greedy_batch(executor, prompts)
    assert [len(tokens) for tokens in outputs] == [NUM_TOKENS] * len(prompts)
    assert outputs == [eager_choices(model, prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]


def cpu_executor(source: str, engine: Path, *, use_cache: bool) -> Executor:
    build(BuildConfig(source, engine, kv_cache_dtype="f32", eval_tokens=0, use_cache=use_cache), quiet=True)
    manifest = load_manifest(engine)
    return load_executor(engine, manifest, resolve(RuntimeConfig(num_blocks=256, num_threads=1), manifest))


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    return load_checkpoint(str(TINY)).model


@pytest.fixture(scope="module")
def tiny_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fused canonical graph with the specification of its custom ops."""
    path = tmp_path_factory.mktemp("canonical") / "model.onnx"
    checkpoint = load_checkpoint(str(TINY))
    graph = export_model(checkpoint.model, checkpoint.spec)
    fuse(graph, checkpoint.spec)
    ir.save(attach_functions(graph), path)
    return path


def reference_executor(graph: Path) -> ReferenceExecutor:
    return ReferenceExecutor(graph, num_blocks=128, num_threads=1, pool_fill=float("nan"))


def test_tiny_llama_on_the_reference(tiny_graph: Path, tiny_model: Any) -> None:
    assert_greedy_equals_eager(reference_executor(tiny_graph), tiny_model, TINY)


@torch.no_grad()
def test_perplexity_on_the_reference_is_that_of_the_eager_model(tiny_graph: Path, tiny_model: Any) -> None:
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(heldout_text()[:3000]).ids[: 4 * 128 + 1]
    windows = torch.tensor(ids[:-1]).reshape(4, 128)
    loss = torch.nn.functional.cross_entropy(tiny_model(windows).logits.flatten(0, 1), torch.tensor(ids[1:]))
    result = evaluate(reference_executor(tiny_graph), ids, context=128, batch=3, rows_per_step=100)
    assert result.num_tokens == 512
    assert result.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)  # fp32, different order of summation


def test_tiny_llama_on_the_cpu_engine(tmp_path: Path, tiny_model: Any) -> None:
    executor = cpu_executor(str(TINY), tmp_path / "engine", use_cache=False)
    assert_greedy_equals_eager(executor, tiny_model, TINY)


@pytest.mark.real_model
def test_smollm2_on_the_cpu_engine(tmp_path: Path) -> None:
    source = str(model_zoo.smollm2())
    executor = cpu_executor(source, tmp_path / "engine", use_cache=True)
    assert_greedy_equals_eager(executor, load_checkpoint(source).model, tmp_path / "engine" / TOKENIZER_DIR)
