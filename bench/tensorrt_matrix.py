"""What the TensorRT-RTX target makes of a model, in every precision and for several architectures: a table and one JSON line.

    python bench/tensorrt_matrix.py MODEL… [--precision fp16,fp8] [--arch sm89,sm120]

Each build runs in a process of its own, so that its peak memory is its own. Needs no GPU and measures none: seconds are those of
this machine, sizes and accuracy are the engines'. Engines are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PRECISIONS = "fp16,bf16,fp8,int8,int8-sq,int4"
COLUMNS = ("model", "precision", "arch", "plan MB", "layers B/w", "head B/w", "plugins", "build s", "KL", "ppl ratio")


def measure(model: str, precision: str, archs: str, eval_tokens: int, place: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "builder.cli", "build", model, "--output", str(place), "--target", "tensorrt-rtx",
        "--precision", precision, "--target-arch", archs, "--eval-tokens", str(eval_tokens), "--json",
        "--max-ppl-increase", "1e9",  # what is lost is in the table; no limit here
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)["report"]
    shutil.rmtree(place)
    return {"model": model, "seconds": round(time.perf_counter() - start, 1), **report}


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    accuracy = report["accuracy"] or {}
    found = []
    for arch, plan in report["plans"].items():
        head = plan["bytes_per_weight"].get("lm_head", plan["bytes_per_weight"].get("embedding", 0.0))
        found.append(
            (
                report["model"]["name"],
                report["precision"],
                arch,
                f"{plan['plan_bytes'] / 1e6:.1f}",
                f"{plan['layers_bytes_per_weight']:.3f}",
                f"{head:.3f}",
                str(plan["attention_plugins"]),
                f"{plan['build_seconds']:.1f}",
                f"{accuracy['mean_kl']:.5f}" if accuracy else "",
                f"{accuracy['perplexity_ratio']:.4f}" if accuracy else "",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="what `builder build` takes")
    parser.add_argument("--precision", default=PRECISIONS)
    parser.add_argument("--arch", default="sm89,sm120")
    parser.add_argument("--eval-tokens", type=int, default=0)
    arguments = parser.parse_args()
    reports = []
    print("| " + " | ".join((*COLUMNS, "peak MB", "all s")) + " |")
    print("|" + "---|" * (len(COLUMNS) + 2))
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.model:
            for precision in arguments.precision.split(","):
                report = measure(model, precision, arguments.arch, arguments.eval_tokens, Path(scratch) / precision)
                reports.append(report)
                for row in rows(report):
                    peak = f"{report['build']['peak_rss_bytes'] / 1e6:.0f}"
                    print("| " + " | ".join((*row, peak, str(report["seconds"]))) + " |", flush=True)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "reports": reports}))


if __name__ == "__main__":
    main()
