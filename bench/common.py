"""Shared by the scripts here: engines to measure, prompts with a fixed seed, closed-loop runs in this process, a JSON line."""

from __future__ import annotations

import argparse
import json
import platform
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openvino

from builder.build import build
from builder.config import COMPUTE_DTYPES, BuildConfig
from runtime.contract import load_manifest
from runtime.engine import Engine, Output
from runtime.request import FinishReason, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
TINY = ROOT / "tests" / "models" / "tiny-llama"


def engine_directory(model: str, precision: str, compute_dtype: str = "f32", **options: object) -> Path:
    """Build (or find, when unchanged) `bench/out/<model>-<precision>`; model is `tiny-llama` or a name `builder build` takes."""
    source = str(TINY) if model == "tiny-llama" else model
    output = OUT / f"{Path(model).name}-{precision}"
    if compute_dtype != "f32":
        output, options["compute_dtype"] = output.with_name(f"{output.name}-{compute_dtype}"), compute_dtype
    build(BuildConfig(source, output, precision=precision, eval_tokens=0, **options), quiet=True)  # type: ignore[arg-type]
    return output


def add_engine_options(parser: argparse.ArgumentParser, *, model: str = "smollm2-135m-instruct", precision: str = "int8") -> None:
    parser.add_argument("--engine", type=Path, help="an engine directory; otherwise --model is built")
    parser.add_argument("--model", default=model, help="tiny-llama, or what `builder build` takes")
    parser.add_argument("--precision", default=precision)
    parser.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, default="f32")
    parser.add_argument("--repetitions", type=int, default=3)


def chosen_engine(options: argparse.Namespace) -> Path:
    return options.engine or engine_directory(options.model, options.precision, options.compute_dtype)


def facts(directory: Path) -> dict[str, object]:
    """Of the engine, for the JSON line."""
    manifest = load_manifest(directory, verify_checksums=False)
    cache = manifest.kv_cache
    return {
        "model": manifest.model.name,
        "precision": manifest.precision.name,
        "arithmetic": manifest.precision.details.get("arithmetic", "f32"),
        "kv_cache": f"{cache.key_dtype}:{cache.value_dtype}",
        "eos_ignored": True,
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, object]:
    """Median of the repetitions, and each of them."""
    return {"median": round(median(values), digits), "all": [round(value, digits) for value in values]}


def random_prompts(count: int, length: int, vocab_size: int, *, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Token-id prompts; the first `shared` ids are the same in all."""
    rng = random.Random(seed)
    low = min(64, vocab_size // 2)  # skip special tokens
    prefix = [rng.randrange(low, vocab_size) for _ in range(shared)]
    return [prefix + [rng.randrange(low, vocab_size) for _ in range(length - shared)] for _ in range(count)]


@dataclass
class Trace:
    """One request's tokens and the moments they arrived, seconds of perf_counter."""

    start: float
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Stream:
    """One running request and when its tokens arrived."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.arrivals: list[float] = []
        self._changed = threading.Condition()
        engine.submit(prompt, params, on_output=self._receive)

    def _receive(self, output: Output) -> None:
        with self._changed:
            self.arrivals += [time.perf_counter()] * len(output.token_ids)
            self._changed.notify_all()

    def wait_for(self, num_tokens: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.arrivals) >= num_tokens, timeout=300):
                raise RuntimeError(f"{len(self.arrivals)} of {num_tokens} tokens after 300 s")

    def longest_gap(self, begin: float, end: float) -> float:
        """Longest time without a token that overlaps [begin, end]; 0 when nothing was running then."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((b - a for a, b in pairs if b > begin and a < end), default=0.0)


def run_closed_loop(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int | None = None,
) -> tuple[list[Trace], float]:
    """Keep `concurrency` requests in flight until all prompts are done. Returns traces in order and the wall seconds."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    outputs: queue.SimpleQueue[tuple[Output, float]] = queue.SimpleQueue()
    traces: dict[str, Trace] = {}
    order: list[str] = []
    begin = time.perf_counter()

    def submit(index: int) -> None:
        start = time.perf_counter()
        name = engine.submit(
            prompts[index],
            each[index],
            request_id=f"bench-{index}",
            on_output=lambda output: outputs.put((output, time.perf_counter())),
        )
        traces[name] = Trace(start)
        order.append(name)

    limit = min(concurrency or len(prompts), len(prompts))
    for index in range(limit):
        submit(index)
    submitted, finished = limit, 0
    while finished < len(prompts):
        output, moment = outputs.get()
        trace = traces[output.request_id]
        if output.token_ids:
            trace.arrivals.append(moment)
            trace.counts.append(len(output.token_ids))
            trace.token_ids.extend(output.token_ids)
        if output.finish_reason is not None:
            if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                raise RuntimeError(f"{output.request_id} ended with {output.finish_reason.value}: {output.error}")
            trace.num_cached_tokens = output.num_cached_tokens
            finished += 1
            if submitted < len(prompts):
                submit(submitted)
                submitted += 1
    return [traces[name] for name in order], time.perf_counter() - begin


def interleave(variants: dict[str, object], repetitions: int, run: object) -> dict[str, list[float]]:
    """Run every variant in turn, `repetitions` times, so that drift of the machine falls on all alike."""
    results: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, variant in variants.items():
            results[name].append(run(name, variant))  # type: ignore[operator]
    return results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": openvino_threads(), "openvino": openvino.__version__, "python": platform.python_version()}


def openvino_threads() -> int:
    import os

    return len(os.sched_getaffinity(0))


def finish(name: str, **figures: object) -> None:
    """Print the one JSON line every script ends with."""
    print(json.dumps({"benchmark": name, "machine": machine(), **figures}))
