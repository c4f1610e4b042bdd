"""llama.cpp: its own llama-batched-bench, whose table becomes the JSON line. MODEL holds model.gguf and the tool.

Every sequence has a prompt of its own, flash attention is on, the KV cache is f16 (q8_0 was slower). The tool warms itself up
with 16 tokens, and takes random tokens where others sample.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

from protocol import Generate, Timing, main


def load(options: argparse.Namespace) -> tuple[Generate, dict[str, str]]:
    place = Path(options.model)
    tool = str(place / "llama-batched-bench")

    def generate(prompts: list[list[int]], new_tokens: int) -> Timing:
        batch, length = len(prompts), len(prompts[0])
        command = [
            tool, "-m", str(place / "model.gguf"), "-t", str(options.threads), "-tb", str(options.threads),
            "-c", str(max(64, batch * (length + new_tokens))), "-b", "512", "-ub", "512",
            "-npp", str(length), "-ntg", str(new_tokens), "-npl", str(batch), "-fa", "on",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = _last_row(done.stdout)
        return Timing(row["T_PP s"], row["T_TG s"], batch * new_tokens)

    about = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    lines = (about.stdout + about.stderr).strip().splitlines()
    return generate, {"llama.cpp": next((line for line in lines if "version" in line), "unknown")}


def _last_row(table: str) -> dict[str, Any]:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return dict(zip(rows[0], map(float, rows[-1]), strict=True))


if __name__ == "__main__":
    main(load, warm_up=False)
