"""From the start of a process to its first token, by stage; and its memory against weights and KV pool.

    python bench/cold_start.py [--engine DIR]

A fresh Python process per repetition loads an engine that is already built (its files are in the page cache after the first one)
and answers one short prompt. Memory is the largest resident set of that process, beside 1.25 × (weights + pool) + 300 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STAGES = (
    "interpreter",
    "imports",
    "manifest and checksums",
    "compile and pools",
    "tokenizer beside it",
    "threads",
    "first token",
)
PROMPT = "The capital of France is"


def child(engine_dir: Path, spawned: float) -> dict[str, Any]:
    """Runs in the fresh process. `spawned` is time.time() just before it was started."""
    seconds = {"interpreter": time.time() - spawned}
    begin = time.perf_counter()
    import queue
    import resource

    from runtime import engine as module
    from runtime.config import RuntimeConfig
    from runtime.request import SamplingParams

    seconds["imports"] = time.perf_counter() - begin

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            seconds[name] = time.perf_counter() - start
            return result

        return call

    module.load_manifest = timed("manifest and checksums", module.load_manifest)
    module.load_executor = timed("compile and pools", module.load_executor)
    tokenizer_load = timed("tokenizer beside it", module.Tokenizer.load)
    module.Tokenizer.load = tokenizer_load  # type: ignore[method-assign]
    begin = time.perf_counter()
    with module.Engine.load(engine_dir, RuntimeConfig()) as engine:
        inner = seconds["manifest and checksums"] + seconds["compile and pools"]  # the tokenizer is read beside the compiling
        seconds["threads"] = time.perf_counter() - begin - inner
        begin = time.perf_counter()
        outputs: queue.SimpleQueue[module.Output] = queue.SimpleQueue()
        engine.submit(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True), on_output=outputs.put)
        output = outputs.get(timeout=120)
        seconds["first token"] = time.perf_counter() - begin
        total = time.time() - spawned
        if not output.token_ids:
            raise SystemExit(f"error: no token came ({output.error})")
        return {
            "seconds": seconds,
            "total": total,
            "max_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "weight_bytes": engine.manifest.weight_bytes,
            "pool_bytes": engine.stats().kv_cache_bytes,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    if "--child" in (argv or sys.argv):  # without importing what the fresh process is timed for
        engine_dir, spawned = parser.parse_args(argv).child
        print(json.dumps(child(Path(engine_dir), float(spawned))))
        return

    from common import add_engine_options, chosen_engine, facts, finish, median, spread

    add_engine_options(parser)
    options = parser.parse_args(argv)
    directory = chosen_engine(options)
    runs = []
    for _ in range(options.repetitions):
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(directory), repr(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: the process ended with {done.returncode}: {done.stderr.strip()}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    resident = median([run["max_resident_bytes"] for run in runs])
    needed = runs[0]["weight_bytes"] + runs[0]["pool_bytes"]
    limit = 1.25 * needed + 300e6
    finish(
        "cold_start",
        **facts(directory),
        repetitions=options.repetitions,
        seconds_to_first_token=spread([run["total"] for run in runs], 3),
        stages_s={name: round(median([run["seconds"][name] for run in runs]), 3) for name in STAGES},
        resident_mb=round(resident / 1e6, 1),
        weights_mb=round(runs[0]["weight_bytes"] / 1e6, 1),
        pool_mb=round(runs[0]["pool_bytes"] / 1e6, 1),
        limit_mb=round(limit / 1e6, 1),
        resident_over_limit=round(resident / limit, 4),
    )


if __name__ == "__main__":
    main()
