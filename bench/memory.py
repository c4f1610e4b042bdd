"""The memory that the plan predicts beside what a serving process has resident.

    python bench/memory.py [--models tiny-llama,smollm2-135m-instruct,llama-170m,qwen3-130m] [--precisions int8,int4]

A fresh process per engine loads it with `from runtime import LLM` and serves requests of mixed lengths, greedy and sampled, in
two rounds that use up its KV cache. VmRSS afterwards is compared with runtime/memory.py, whose arithmetic `builder plan` prints
and loading enforces. llama-170m and qwen3-130m have random weights; no constant was taken from either. Ends in one JSON line.

`limit` is 1.25 × (weights + pool) + 300 MB, which the resident set should not exceed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
TINY = ROOT / "tests" / "models" / "tiny-llama"
SHAPES: dict[str, dict[str, Any]] = {
    "llama-170m": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    },
    "qwen3-130m": {
        "model_type": "qwen3", "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 14, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 40960,
    },
}  # fmt: skip
MODELS = ("tiny-llama", "smollm2-135m-instruct", *SHAPES)
MAX_MODEL_LEN, NUM_BLOCKS, ROUNDS = 1024, 256, 2


def source(model: str) -> str:
    """What `builder build` takes: a name, or a directory of random weights that is written once."""
    if model not in SHAPES:
        return str(TINY) if model == "tiny-llama" else model
    target = OUT / f"{model}-hf"
    if not target.is_dir():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        fixed = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": True}
        config = AutoConfig.for_model(**SHAPES[model], **fixed, max_position_embeddings=8192)
        staging = target.with_name(f".{target.name}")
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(staging)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, staging / name)
        staging.rename(target)
    return str(target)


def engine(model: str, precision: str) -> Path:
    from builder.build import build
    from builder.config import BuildConfig

    output = OUT / f"memory-{model}-{precision}"
    build(BuildConfig(source(model), output, precision=precision, eval_tokens=0, calibration_samples=0), quiet=True)
    return output


def status() -> dict[str, int]:
    """Bytes of this process's resident set, of its parts, and at its largest."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "VmHWM"):
            found[name] = 1024 * int(value.split()[0])
    return found


def child(directory: Path, requests: int) -> dict[str, Any]:
    """Runs in the fresh process."""
    from runtime import LLM, SamplingParams
    from runtime.memory import of_engine

    stages = {"imported": status()}
    rng = random.Random(0)
    with LLM(directory, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS) as llm:
        stages["loaded"] = status()
        manifest, config = llm.engine.manifest, llm.engine.config
        for number in range(ROUNDS):
            lengths = [(rng.randrange(16, 400), rng.randrange(8, 100)) for _ in range(requests // ROUNDS)]
            prompts = [[rng.randrange(3, manifest.model.vocab_size) for _ in range(length)] for length, _ in lengths]
            sampled = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
            params = [
                SamplingParams(max_tokens=count, ignore_eos=True, seed=index, **(sampled if index % 2 else {}))
                for index, (_, count) in enumerate(lengths)
            ]
            llm.generate(prompts, params)
            stages[f"round {number}"] = status()
        need = of_engine(manifest, config.max_num_seqs, config.max_num_batched_tokens)
        pool = llm.engine.stats().kv_cache_bytes
    measured = stages[f"round {ROUNDS - 1}"]
    return {
        "model": manifest.model.name,
        "precision": manifest.precision.name,
        "predicted": {**vars(need), "pool": pool},
        "predicted_bytes": need.total + pool,
        "measured": measured,
        "ratio": round((need.total + pool) / measured["VmRSS"], 4),
        "limit_bytes": int(1.25 * (manifest.weight_bytes + pool) + 300e6),
        "weight_bytes": manifest.weight_bytes,
        "stages": stages,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default="int8,int4")
    parser.add_argument("--engine", type=Path, action="append", help="an engine directory instead; repeat for several")
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument("--stages", action="store_true", help="print the resident set of every stage")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(child(options.child, options.requests)))
        return
    from common import finish

    names = [(model, precision) for model in options.models.split(",") for precision in options.precisions.split(",")]
    rows = []
    print(f"{'MB':32}{'predicted':>10}{'VmRSS':>9}{'ratio':>7}{'RssAnon':>9}{'RssFile':>9}{'VmHWM':>9}{'limit':>9}", flush=True)
    for directory in options.engine or (engine(*name) for name in names):
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(directory), "--requests", str(options.requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: the process ended with {done.returncode}: {done.stderr.strip()}")
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        parts = [row["measured"][name] for name in ("RssAnon", "RssFile", "VmHWM")]
        figures = "".join(f"{value / 1e6:9.1f}" for value in (*parts, row["limit_bytes"]))
        name = f"{row['model']} {row['precision']}"
        print(f"{name:32}{row['predicted_bytes'] / 1e6:10.1f}{row['measured']['VmRSS'] / 1e6:9.1f}{row['ratio']:7.3f}{figures}")
        if options.stages:
            for stage, values in row["stages"].items():
                print(f"  {stage:30}" + " ".join(f"{key} {value / 1e6:.1f}" for key, value in values.items()))
        sys.stdout.flush()
    finish(
        "memory",
        max_model_len=MAX_MODEL_LEN,
        num_blocks=NUM_BLOCKS,
        requests=options.requests,
        eos_ignored=True,
        engines=[{name: value for name, value in row.items() if name != "stages"} for row in rows],
        largest_error=round(max(abs(row["ratio"] - 1) for row in rows), 4),
        largest_share_of_limit=round(max(row["measured"]["VmRSS"] / row["limit_bytes"] for row in rows), 4),
    )


if __name__ == "__main__":
    main()
