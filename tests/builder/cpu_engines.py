"""Engines for the CPU built from tiny models, and a driver of ragged steps. Shared by the tests of target and executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from builder.fuse import fuse
from builder.quantize import QuantizationReport, quantize
from builder.targets.openvino import PlanResult, build_plan, resolve_kv_dtype
from runtime.batch import StepInputs
from runtime.contract import SCHEMA_VERSION, Manifest, ModelSpec, PrecisionSpec
from runtime.executors.base import Executor
from runtime.executors.openvino import OpenVINOExecutor


@dataclass(frozen=True)
class Built:
    directory: Path
    manifest: Manifest
    quantization: QuantizationReport
    plan: PlanResult

    def executor(self, num_blocks: int = 16) -> OpenVINOExecutor:
        return OpenVINOExecutor(self.directory, self.manifest, num_blocks, num_threads=1)


def fused(exported: Any) -> ir.Model:
    """A fresh copy of the model's graph, fused."""
    model = ir.load(exported.canonical)
    fuse(model, exported.spec)
    return model


def build(
    exported: Any,
    directory: Path,
    precision: str = "fp32",
    kv_cache_dtype: str = "auto",
    group_size: int | None = None,
    compute_dtype: str = "f32",
    kernels: Path | None = None,
) -> Built:
    model = fused(exported)
    key, value = resolve_kv_dtype(kv_cache_dtype, precision, model, compute_dtype)
    report = quantize(model, precision, group_size=group_size)
    types: dict[str, Any] = {
        "key_dtype": key,
        "value_dtype": value,
        "precision": precision,
        "compute_dtype": compute_dtype,
        "kernels": kernels,
    }
    plan = build_plan(model, directory / "plan", exported.spec, **types)
    return Built(directory, manifest(exported.spec, precision, report, plan), report, plan)


def manifest(spec: ModelSpec, precision: str, report: QuantizationReport, plan: PlanResult) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        forgeline_version="0",
        created="",
        target="cpu",
        model=spec,
        precision=PrecisionSpec(
            name=precision,
            weights=report.dtype_of("mlp"),
            activations=plan.activations,
            embedding=report.dtype_of("embedding"),
            lm_head=report.dtype_of("lm_head"),
            group_size=report.group_size,
            details=plan.details,
        ),
        kv_cache=plan.kv_cache,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        libraries=plan.libraries,
        plan=plan.plan,
        checksums={},
        weight_bytes=plan.weight_bytes,
    )


class Sequences:
    """Runs steps over named sequences; blocks are given out from the highest number down, so tables are never 0, 1, 2, …"""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.free = list(range(executor.num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]], *, rows: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute the given new tokens of each sequence; (logits, next_token) of all tokens, or of `rows`, as copies."""
        size = self.executor.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        for name, tokens in work.items():
            table, begin = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            end = begin + len(tokens)
            while len(table) * size < end:
                table.append(self.free.pop())
            ids += tokens
            positions += range(begin, end)
            slots += [table[at // size] * size + at % size for at in range(begin, end)]
            starts.append(len(ids))
            lengths.append(end)
            self.lengths[name] = end
        block_table = np.zeros((len(work), max(len(self.tables[name]) for name in work)), np.int32)
        for row, name in enumerate(work):
            block_table[row, : len(self.tables[name])] = self.tables[name]
        out = self.executor.execute(
            StepInputs(
                input_ids=np.array(ids, np.int64),
                positions=np.array(positions, np.int64),
                slot_mapping=np.array(slots, np.int32),
                block_table=block_table,
                query_start_loc=np.array(starts, np.int32),
                seq_lens=np.array(lengths, np.int32),
                logits_indices=np.array(range(len(ids)) if rows is None else rows, np.int64),
            )
        )
        return out.logits.copy(), out.next_token.copy()

    def run(self, steps: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, np.ndarray]:
        """Logits of every token of every sequence, after several steps."""
        parts: dict[str, list[np.ndarray]] = {}
        for work in steps:
            logits, _ = self.step(work)
            end = 0
            for name, tokens in work.items():
                parts.setdefault(name, []).append(logits[end : end + len(tokens)])
                end += len(tokens)
        return {name: np.concatenate(found) for name, found in parts.items()}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 128, length)]


# One ragged batch in four steps: whole prompts, chunks and single tokens mixed; "long" exceeds every sliding window and a block.
PROMPTS = {"long": prompt(50, 1), "short": prompt(7, 2), "middle": prompt(33, 3), "one": prompt(1, 4)}
STEPS = [
    {"long": PROMPTS["long"][:20], "short": PROMPTS["short"]},
    {"middle": PROMPTS["middle"][:31], "long": PROMPTS["long"][20:21], "one": PROMPTS["one"]},
    {"long": PROMPTS["long"][21:]},
    {"middle": PROMPTS["middle"][31:]},
]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
