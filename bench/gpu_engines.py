"""gpu_verify.py: an engine on this GPU: built, loaded, its tokens beside the CPU engine's, its steps timed by bucket."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_verify import ROOT, Context, NotRun

from builder.build import build
from builder.config import BuildConfig
from runtime.batch import StepInputs
from runtime.config import RuntimeConfig
from runtime.contract import Manifest, load_manifest
from runtime.driver import read_driver
from runtime.engine import Engine
from runtime.executors.base import PipelinedExecutor
from runtime.executors.tensorrt import TensorRTExecutor
from runtime.llm import LLM
from runtime.request import SamplingParams

NEW_TOKENS = 48
NEAR_TIE = 0.1  # nats between the two best tokens: fp16 may choose either
CACHED_TOKENS = 256  # of each sequence whose decoding is timed
STEPS = 50


def _source(model: str) -> str:
    return str(ROOT / "tests" / "models" / "tiny-llama") if model == "tiny-llama" else model


def build_engines(context: Context) -> tuple[str, dict[str, Any]]:
    """The same model for this GPU in fp16 and for the CPU in fp32."""
    arch = f"sm{read_driver().gpus[0].capability}"
    source = _source(context.model)
    figures: dict[str, Any] = {}
    for name, config in (
        ("gpu", BuildConfig(source, context.work / "gpu", context.target, "fp16", target_arch=(arch,), eval_tokens=0)),
        ("cpu", BuildConfig(source, context.work / "cpu", "cpu", "fp32", eval_tokens=0)),
    ):
        started = time.perf_counter()
        build(config, quiet=True)
        figures[f"{name}_seconds"] = round(time.perf_counter() - started, 1)
    manifest = load_manifest(context.work / "gpu", verify_checksums=False)
    mib = manifest.weight_bytes / 2**20
    text = f"{manifest.model.name} for {context.target} {arch}: {figures['gpu_seconds']} s, plan of {mib:.0f} MiB"
    return text, {**figures, "plan_bytes": manifest.weight_bytes}


def _engine(context: Context) -> tuple[Path, Manifest]:
    path = context.work / "gpu"
    if "engine build" not in context.figures and not (path / "manifest.json").is_file():
        raise NotRun("no engine was built")
    return path, load_manifest(path)


def load_engine(context: Context) -> tuple[str, dict[str, Any]]:
    path, manifest = _engine(context)
    started = time.perf_counter()
    executor = TensorRTExecutor(path, manifest, num_blocks=64)
    seconds = time.perf_counter() - started
    graphs = sum(each.graph is not None for each in executor.contexts())
    buckets = len(executor.contexts())
    executor.close()
    assert graphs == buckets, f"{buckets - graphs} of {buckets} buckets could not be captured"
    return f"{seconds:.1f} s, {graphs} graphs captured", {"seconds": seconds, "graphs": graphs}


def greedy_equality(context: Context) -> tuple[str, dict[str, Any]]:
    """Prompts of mixed length in one batch; where the tokens part, the CPU's two best must have been nearly level."""
    path, manifest = _engine(context)
    rng = np.random.default_rng(11)
    low = min(64, manifest.model.vocab_size // 2)
    prompts = [rng.integers(low, manifest.model.vocab_size, length).tolist() for length in (1, 7, 16, 33, 64, 65, 130, 200)]
    plain = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM.from_engine(Engine.load(context.work / "cpu", RuntimeConfig(num_blocks=256))) as llm:
        wanted = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2))
    with LLM.from_engine(Engine.load(path, RuntimeConfig(num_blocks=256))) as llm:
        found = llm.generate(prompts, plain)
    same, parted = 0, []
    for prompt, cpu, gpu in zip(prompts, wanted, found, strict=True):
        pairs = list(zip(cpu.token_ids, gpu.token_ids, strict=True))
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same += place
        if place < len(pairs):
            (_, best), (_, second) = cpu.logprobs[place].top[:2]
            parted.append({"prompt_tokens": len(prompt), "at": place, "margin": best - second})
            assert best - second < NEAR_TIE, (
                f"a prompt of {len(prompt)} tokens parts from the CPU at token {place}, where the CPU's best leads by "
                f"{best - second:.2f} nats; fp16 explains {NEAR_TIE}"
            )
    text = f"{same} of {len(prompts) * NEW_TOKENS} tokens before the first near tie, {len(parted)} sequences parted at one"
    return text, {"equal_tokens": same, "parted": parted}


def graph_replay(context: Context) -> tuple[str, dict[str, Any]]:
    path, manifest = _engine(context)
    blocks_each = -(-(CACHED_TOKENS + 1) // manifest.kv_cache.block_size)
    executor = TensorRTExecutor(path, manifest, num_blocks=blocks_each * manifest.max_num_seqs)
    rows = time_buckets(executor, manifest, context.figures.get("copy bandwidth", {}).get("gb_per_s", 0.0))
    executor.close()
    shown = [rows[0], rows[len(rows) // 2], rows[-1]]
    text = "; ".join(
        f"{row['bucket']}: {row['ms']:.3f} ms, {row['share']:.0%} of bandwidth, host {row['host_us']:.0f} µs" for row in shown
    )
    return text, {"rows": rows}


def time_buckets(executor: PipelinedExecutor, manifest: Manifest, ceiling: float) -> list[dict[str, Any]]:
    """ms per decode step of each bucket, two steps under way; the host's share is the time `submit` takes."""
    rows = []
    kv_bytes = CACHED_TOKENS * manifest.kv_cache.bytes_per_token
    for bucket in manifest.buckets:
        step = decode_step(bucket, executor.block_size)
        feedback = [(row, row) for row in range(bucket)]
        executor.execute(step)
        host_ns = 0
        executor.submit(step, feedback)
        started = time.perf_counter()
        for _ in range(STEPS):
            begin = time.perf_counter_ns()
            executor.submit(step, feedback)
            host_ns += time.perf_counter_ns() - begin
            executor.collect()
        ms = 1e3 * (time.perf_counter() - started) / STEPS
        executor.collect()
        gbps = (manifest.weight_bytes + bucket * kv_bytes) / ms / 1e6
        rows.append(
            {
                "bucket": bucket, "ms": ms, "gb_per_s": gbps, "share": gbps / ceiling if ceiling else 0.0,
                "host_us": host_ns / STEPS / 1e3, "tokens_per_s": 1e3 * bucket / ms,
            }
        )  # fmt: skip
    return rows


def decode_step(num_seqs: int, block_size: int) -> StepInputs:
    """Each sequence has CACHED_TOKENS tokens, in blocks of its own, whatever they hold, and computes one more."""
    blocks = -(-(CACHED_TOKENS + 1) // block_size)
    table = np.arange(num_seqs * blocks, dtype=np.int32).reshape(num_seqs, blocks)
    at = CACHED_TOKENS
    return StepInputs(
        input_ids=np.zeros(num_seqs, np.int64),
        positions=np.full(num_seqs, at, np.int64),
        slot_mapping=table[:, at // block_size] * np.int32(block_size) + np.int32(at % block_size),
        block_table=table,
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=np.full(num_seqs, at + 1, np.int32),
        logits_indices=np.arange(num_seqs, dtype=np.int64),
    )
