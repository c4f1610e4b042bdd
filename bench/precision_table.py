"""Perplexity of every precision and KV cache type relative to fp32, from the compiled CPU engine and from the reference executor.

    python bench/precision_table.py [--model smollm2-135m-instruct] [--tokens 4096] [--rows int8,int4-g64,kv:u8,…]

One fixed held-out text (builder/data/heldout.txt), windows of 512 tokens. The reference executor runs the quantized canonical
graph on ONNX Runtime. KV types the CPU cannot store are measured there only. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from common import OUT, TINY, finish

from builder.accuracy import evaluate
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


@dataclass(frozen=True)
class Row:
    limit: float  # of the ratio, as the project promises
    options: dict[str, Any] = field(default_factory=dict)
    kv: str = "f32"


ROWS = {
    "int8-wo": Row(1.01, {"precision": "int8-wo"}),
    "int8": Row(1.02, {"precision": "int8"}),
    "fp8": Row(1.03, {"precision": "fp8"}),
    "int8-sq": Row(1.05, {"precision": "int8-sq"}),
    "int8-sq static": Row(1.05, {"precision": "int8-sq", "activation_scales": "static"}),
    "int4-g64": Row(1.12, {"precision": "int4", "group_size": 64}),
    "int4-g32": Row(1.08, {"precision": "int4", "group_size": 32}),
    "kv:f16": Row(1.001, {}, "f16"),
    "kv:u8": Row(1.01, {}, "u8"),
    "kv:u8:u4": Row(1.01, {}, "u8:u4"),
    "kv:f8": Row(1.01, {}, "f8"),
    "kv:bf16:f8": Row(1.005, {}, "bf16:f8"),
}
REFERENCE_ONLY = ("kv:f8", "kv:bf16:f8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", default=",".join(ROWS))
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    source = str(TINY) if arguments.model == "tiny-llama" else arguments.model

    def engine(name: str, **options: Any) -> Path:
        output = OUT / f"{arguments.model}-{name.replace(':', '-').replace(' ', '-')}"
        build(
            BuildConfig(source, output, **{"precision": "fp32", "kv_cache_dtype": "f32", "eval_tokens": 0, **options}), quiet=True
        )
        return output

    plain = engine("fp32")
    tokenizer = Tokenizer.load(plain / "tokenizer")
    tokens = tokenizer.encode(heldout_text(), add_special_tokens=False)[: arguments.tokens]
    bos = added_bos(tokenizer)

    def on_reference(graph: Path) -> float:
        executor = ReferenceExecutor(graph, num_blocks=CONTEXT // 32, block_size=32, num_threads=threads)
        return measure(executor)

    def on_engine(directory: Path) -> float:
        manifest = load_manifest(directory, verify_checksums=False)
        return measure(OpenVINOExecutor(directory, manifest, -(-CONTEXT // manifest.kv_cache.block_size), threads))

    def measure(executor: Any) -> float:
        try:
            return evaluate(executor, tokens, context=CONTEXT, batch=1, bos_token_id=bos).perplexity
        finally:
            executor.close()

    base = on_reference(plain / "plan" / "canonical.onnx")
    print(f"{'':16}{'engine':>9}{'reference':>11}{'apart':>8}{'limit':>8}   fp32 perplexity {base:.3f}, {len(tokens)} tokens")
    table = {}
    for name in arguments.rows.split(","):
        row = ROWS[name]
        start = time.perf_counter()
        found: dict[str, Any] = {"limit": row.limit}
        if name in REFERENCE_ONLY:
            found["reference"] = on_reference_with_kv(plain, row.kv, tokenizer, on_reference) / base
        else:
            directory = engine(name, kv_cache_dtype=row.kv, **row.options)
            found["engine"] = on_engine(directory) / base
            found["reference"] = on_reference(directory / "plan" / "canonical.onnx") / base
            found["apart"] = found["engine"] / found["reference"] - 1
        found["holds"] = max(found.get("engine", 0.0), found["reference"]) <= row.limit
        cells = (
            f"{found.get('engine', float('nan')):9.4f}{found['reference']:11.4f}{100 * found.get('apart', float('nan')):7.2f}%"
        )
        seconds = time.perf_counter() - start
        print(f"{name:16}{cells}{row.limit:8.3f}   {'holds' if found['holds'] else 'MISSED'}  {seconds:.0f} s", flush=True)
        table[name] = {key: round(value, 5) if isinstance(value, float) else value for key, value in found.items()}
    finish(
        "precision_table", model=arguments.model, tokens=len(tokens), context=CONTEXT, fp32_perplexity=round(base, 4), rows=table
    )


def on_reference_with_kv(plain: Path, kv: str, tokenizer: Tokenizer, measure: Any) -> float:
    """fp32 weights, keys and values rounded in the canonical graph by scales per head from calibration."""
    graph = plain / "plan" / "canonical.onnx"
    pair = kv_cache.parse_pair(kv)
    model = ir.load(graph)
    data = load(None, tokenizer, samples=8)
    tokens = [token for window in data.windows for token in window]
    amax = calibrate(graph, tokens, kv_cache.cached_tensors(model, *pair), num_threads=len(os.sched_getaffinity(0)))
    kv_cache.insert(model, *pair, amax)
    with tempfile.NamedTemporaryFile(dir=graph.parent, suffix=".onnx") as file:
        ir.save(model, file.name)
        return float(measure(Path(file.name)))


if __name__ == "__main__":
    main()
