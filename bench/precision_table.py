"""Perplexity of every precision and KV cache type relative to fp32, from the compiled CPU engine and from the reference executor.

    python bench/precision_table.py [--model smollm2-135m-instruct] [--tokens 8192] [--rows int8,int4-g64,kv:u8,…] [--write FILE]

One fixed held-out text (builder/data/heldout.txt), windows of 512 tokens. The reference executor runs the quantized canonical
graph on ONNX Runtime. KV types the CPU cannot store are measured there only. Rows measured before are kept beside the engines, so
that the table can be made in parts; --write puts it between the markers of FILE. Ends in one JSON line.

Status 1 when a row exceeds its limit, or when engine and reference are more than 0.5 % apart. Rounded activations amplify the
last bit of a sum, so two correct executors differ by chance: `apart` comes with its standard error, which falls with --tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from common import OUT, TINY, finish

from builder.accuracy import token_losses
from builder.build import build
from builder.calibrate import calibrate
from builder.calibration_data import added_bos, load
from builder.config import BuildConfig
from builder.data import heldout_text
from builder.quantize import kv_cache
from runtime.contract import load_manifest
from runtime.executors.openvino import OpenVINOExecutor
from runtime.executors.reference import ReferenceExecutor
from runtime.tokenizer import Tokenizer

CONTEXT = 512
MAX_APART = 0.005
MARKERS = ("<!-- bench/precision_table.py -->", "<!-- end -->")
Losses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    limit: float | None  # of the ratio, as the project promises; None: shown for comparison
    options: dict[str, Any] = field(default_factory=dict)
    kv: str = "f32"
    reference_only: bool = False  # a KV type the CPU has no kernel for
    calibrated: bool = True  # its scales; else they are 1


ROWS = {
    "int8-wo": Row(1.01, {"precision": "int8-wo"}),
    "int8": Row(1.02, {"precision": "int8"}),
    "fp8": Row(1.03, {"precision": "fp8"}),
    "int8-sq": Row(1.05, {"precision": "int8-sq"}),
    "int4-g64": Row(1.12, {"precision": "int4", "group_size": 64}),
    "int4-g32": Row(1.08, {"precision": "int4", "group_size": 32}),
    "int8 bf16": Row(1.02, {"precision": "int8", "compute_dtype": "bf16"}, "u8"),
    "int4-g64 bf16": Row(1.12, {"precision": "int4", "group_size": 64, "compute_dtype": "bf16"}, "u8"),
    "kv:f16": Row(1.001, {}, "f16"),
    "kv:u8": Row(1.01, {}, "u8"),
    "kv:u8:u4": Row(1.01, {}, "u8:u4"),
    "kv:f8": Row(1.01, {}, "f8", reference_only=True),
    "kv:bf16:f8": Row(1.005, {}, "bf16:f8", reference_only=True),
    "kv:f8 scale 1": Row(None, {}, "f8", reference_only=True, calibrated=False),
    "int8-sq static": Row(None, {"precision": "int8-sq", "activation_scales": "static"}),
}


class Bench:
    def __init__(self, model: str, num_tokens: int, threads: int) -> None:
        self.model, self.threads = model, threads
        self.source = str(TINY) if model == "tiny-llama" else model
        self.plain = self.engine("fp32")
        self.tokenizer = Tokenizer.load(self.plain / "tokenizer")
        self.tokens = self.tokenizer.encode(heldout_text(), add_special_tokens=False)[:num_tokens]

    def engine(self, name: str, **options: Any) -> Path:
        output = OUT / f"{self.model}-{name.replace(':', '-').replace(' ', '-')}"
        plain = {"precision": "fp32", "kv_cache_dtype": "f32", "eval_tokens": 0}
        build(BuildConfig(self.source, output, **{**plain, **options}), quiet=True)
        return output

    def losses(self, executor: Any) -> Losses:
        try:
            bos = added_bos(self.tokenizer)
            return token_losses(executor, self.tokens, context=CONTEXT, batch=1, rows_per_step=CONTEXT, bos_token_id=bos)
        finally:
            executor.close()

    def on_reference(self, graph: Path) -> Losses:
        return self.losses(ReferenceExecutor(graph, num_blocks=CONTEXT // 32, block_size=32, num_threads=self.threads))

    def on_engine(self, directory: Path) -> Losses:
        manifest = load_manifest(directory, verify_checksums=False)
        return self.losses(OpenVINOExecutor(directory, manifest, -(-CONTEXT // manifest.kv_cache.block_size), self.threads))

    def on_reference_with_kv(self, row: Row) -> Losses:
        """fp32 weights; keys and values rounded in the canonical graph."""
        graph = self.plain / "plan" / "canonical.onnx"
        pair = kv_cache.parse_pair(row.kv)
        model = ir.load(graph)
        amax = (
            self.kv_amax(graph, kv_cache.cached_tensors(model, *pair)) if row.calibrated else kv_cache.unit_scales(model, *pair)
        )
        kv_cache.insert(model, *pair, amax)
        with tempfile.NamedTemporaryFile(dir=graph.parent, suffix=".onnx") as file:
            ir.save(model, file.name)
            return self.on_reference(Path(file.name))

    def kv_amax(self, graph: Path, tensors: dict[str, int]) -> Any:
        data = load(None, self.tokenizer, samples=8)
        tokens = [token for window in data.windows for token in window]
        return calibrate(graph, tokens, tensors, num_threads=self.threads)

    def measure(self, name: str, row: Row, base: Losses) -> dict[str, float]:
        if row.reference_only:
            reference = self.on_reference_with_kv(row)
            return {"reference": _ratio(reference, base), "reference_error": _error(reference, base)}
        directory = self.engine(name, kv_cache_dtype=row.kv, **row.options)
        engine = self.on_engine(directory)
        reference = self.on_reference(directory / "plan" / "canonical.onnx")
        return {
            "engine": _ratio(engine, base),
            "reference": _ratio(reference, base),
            "reference_error": _error(reference, base),
            "apart": _ratio(engine, reference) - 1,
            "apart_error": _error(engine, reference),
        }


def _ratio(losses: Losses, base: Losses) -> float:
    """Of perplexities."""
    return math.exp(float((losses - base).mean()))


def _error(losses: Losses, base: Losses) -> float:
    """Standard error of `_ratio`, as a part of it: token by token, so what both find difficult cancels."""
    return float((losses - base).std() / math.sqrt(len(base)))


def verdict(row: Row, found: dict[str, float]) -> str:
    """pass, or what is wrong."""
    wrong = []
    if row.limit is not None and max(found.get("engine", 0.0), found["reference"]) > row.limit:
        wrong.append("MISS")
    if abs(found.get("apart", 0.0)) > MAX_APART:
        wrong.append("APART")
    return " ".join(wrong) or ("pass" if row.limit is not None else "")


def markdown(measured: dict[str, dict[str, float]], perplexity: float, num_tokens: int, command: str) -> str:
    lines = [
        f"`{command}` ({num_tokens} tokens scored, fp32 perplexity {perplexity:.3f}; ± is one standard error over tokens):",
        "",
        "| | limit | CPU engine | reference executor | engine / reference | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in ROWS.items():
        if name in measured:
            found = measured[name]
            engine = f"{found['engine']:.4f}" if "engine" in found else "no kernel"
            apart = f"{100 * found['apart']:+.2f} % ± {100 * found['apart_error']:.2f}" if "apart" in found else ""
            limit = "" if row.limit is None else f"{row.limit:g}"
            reference = f"{found['reference']:.4f} ± {found['reference_error']:.4f}"
            lines.append(f"| {name} | {limit} | {engine} | {reference} | {apart} | {verdict(row, found)} |")
    return "\n".join(lines)


def write(file: Path, table: str) -> None:
    """Between the markers."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (begin and end):
        sys.exit(f"{file} lacks the lines {MARKERS[0]} and {MARKERS[1]}; add them where the table belongs")
    file.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"empty: none, only --write; of {', '.join(ROWS)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the markers of a Markdown file")
    arguments = parser.parse_args()
    if unknown := set(filter(None, arguments.rows.split(","))) - ROWS.keys():
        parser.error(f"no row is called {', '.join(sorted(unknown))}; rows are {', '.join(ROWS)}")
    bench = Bench(arguments.model, arguments.tokens, arguments.threads)
    kept = OUT / f"precision-{arguments.model}-{len(bench.tokens)}"
    kept.mkdir(parents=True, exist_ok=True)
    base = bench.on_reference(bench.plain / "plan" / "canonical.onnx")
    perplexity = math.exp(float(base.mean()))
    print(f"{'':16}{'engine':>9}{'reference':>11}{'apart':>16}   fp32 perplexity {perplexity:.3f}, {len(base)} tokens")
    for name in filter(None, arguments.rows.split(",")):
        start = time.perf_counter()
        found = bench.measure(name, ROWS[name], base)
        (kept / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        apart = f"{100 * found['apart']:+.2f} ± {100 * found['apart_error']:.2f} %" if "apart" in found else ""
        cells = f"{found.get('engine', math.nan):9.4f}{found['reference']:11.4f}{apart:>16}"
        print(f"{name:16}{cells}   {verdict(ROWS[name], found)}  {time.perf_counter() - start:.0f} s", flush=True)
    places = {name: kept / f"{name}.json" for name in ROWS}
    measured = {name: json.loads(place.read_text()) for name, place in places.items() if place.is_file()}
    if arguments.write is not None:
        command = f"python bench/precision_table.py --model {arguments.model} --tokens {arguments.tokens}"
        write(arguments.write, markdown(measured, perplexity, len(base), command))
    marks = {name: verdict(ROWS[name], found) for name, found in measured.items()}
    rows = {
        name: {**{key: round(value, 5) for key, value in found.items()}, "verdict": marks[name]}
        for name, found in measured.items()
    }
    finish(
        "precision_table",
        model=arguments.model,
        tokens=len(base),
        context=CONTEXT,
        fp32_perplexity=round(perplexity, 4),
        rows=rows,
    )
    return int(any(mark not in ("pass", "") for mark in marks.values()))


if __name__ == "__main__":
    sys.exit(main())
