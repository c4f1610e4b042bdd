"""Ten thousand short requests: does memory grow, do latencies drift?

    python bench/soak.py [--engine DIR] [--requests 10000] [--concurrency 16]

Memory: a line through the resident set over the second half of the requests, with the 95 % confidence interval of its slope, from
means of ten parts, since neighbouring samples of a set that grows by pages are not independent. Fewer than 16 pages in all are
within noise too: the smallest leak, one Python object per request, takes some 40 in 5,000 requests. What an engine takes once is
not growth: a step of every length is run first, since each has kernels of its own, and the metrics are read with each sample, as
a monitor does, since between two readings they keep up to 2,000 steps. Latency: medians of the first and the last thousand. The
client keeps two numbers per request, in arrays that are resident from the start.
"""

from __future__ import annotations

import argparse
import os
import queue
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from common import add_engine_options, chosen_engine, facts, finish, random_prompts, run_closed_loop

from runtime.config import RuntimeConfig
from runtime.engine import Engine, Output
from runtime.padding import padded_length
from runtime.request import FinishReason, SamplingParams

Floats = npt.NDArray[np.float64]
SAMPLES = 200  # of the resident set
PAGE = os.sysconf("SC_PAGE_SIZE")
FEW_PAGES = 16
PARTS, STUDENT_95 = 10, 2.306  # the quantile for PARTS - 2 degrees of freedom


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def slope(x: Floats, y: Floats) -> tuple[float, float]:
    """Of the least-squares line through the means of PARTS parts, and half the width of its 95 % confidence interval."""
    x, y = (np.array([part.mean() for part in np.array_split(values, PARTS)]) for values in (x, y))
    centred = x - x.mean()
    value = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - value * centred
    error = float(np.sqrt(residuals @ residuals / (PARTS - 2) / (centred @ centred)))
    return value, STUDENT_95 * error


def meet_every_length(engine: Engine, most: int) -> int:
    """Run a step of each length that up to `most` tokens are padded to. How many there are."""
    lengths = sorted({padded_length(count) for count in range(1, most + 1)})
    prompts = [random_prompts(1, length, engine.manifest.model.vocab_size, seed=length)[0] for length in lengths]
    run_closed_loop(engine, prompts, SamplingParams(max_tokens=1), concurrency=1)
    return len(lengths)


def run(engine: Engine, options: argparse.Namespace) -> tuple[Floats, Floats, Floats]:
    """Latency of each request in order of their start, and (requests done, resident bytes)."""
    total = options.requests
    pool = random_prompts(64, options.prompt_tokens, engine.manifest.model.vocab_size, seed=1)
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True)
    started, latency = np.full(total, np.nan), np.full(total, np.nan)
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    failures: list[str] = []

    def submit(index: int) -> None:
        def receive(output: Output) -> None:
            if output.finish_reason is not None:
                latency[index] = time.perf_counter() - started[index]
                if output.finish_reason is not FinishReason.LENGTH:
                    failures.append(f"request {index} ended with {output.finish_reason.value}: {output.error}")
                done.put(index)

        started[index] = time.perf_counter()
        engine.submit(pool[index % len(pool)], params, on_output=receive)

    every = max(1, total // SAMPLES)
    counts, resident = [], []
    for index in range(min(options.concurrency, total)):
        submit(index)
    submitted = min(options.concurrency, total)
    for finished in range(1, total + 1):
        done.get(timeout=300)
        if failures:
            raise SystemExit(f"error: {failures[0]}")
        if submitted < total:
            submit(submitted)
            submitted += 1
        if finished % every == 0:
            engine.stats()
            counts.append(float(finished))
            resident.append(float(resident_bytes()))
    return latency, np.array(counts), np.array(resident)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--num-blocks", type=int, default=512, help="of the KV cache")
    options = parser.parse_args(argv)

    directory = chosen_engine(options)
    with Engine.load(directory, RuntimeConfig(num_blocks=options.num_blocks, max_model_len=1024)) as engine:
        num_lengths = meet_every_length(engine, options.concurrency * options.prompt_tokens)
        latency, counts, resident = run(engine, options)
        left = engine.stats()
    late = counts > counts[-1] / 2
    growth, interval = slope(counts[late], resident[late])
    pages = growth * np.ptp(counts[late]) / PAGE
    part = max(1, min(1000, options.requests // 3))
    first, last = np.median(latency[:part]), np.median(latency[-part:])
    finish(
        "soak",
        **facts(directory),
        requests=options.requests,
        concurrency=options.concurrency,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        num_blocks=options.num_blocks,
        step_lengths=num_lengths,
        resident_mb={
            "first": round(resident[0] / 1e6, 1),
            "last": round(resident[-1] / 1e6, 1),
            "max": round(resident.max() / 1e6, 1),
        },
        growth_bytes_per_request=round(growth, 1),
        growth_interval_95=round(interval, 1),
        growth_pages=round(float(pages), 1),
        growth_within_noise=bool(growth - interval <= 0 or pages < FEW_PAGES),
        latency_ms={
            "first": round(1e3 * float(first), 3),
            "last": round(1e3 * float(last), 3),
            "compared": part,
            "tenths": [round(1e3 * float(np.median(tenth)), 1) for tenth in np.array_split(latency, 10)],
        },
        latency_ratio=round(float(last / first), 4),
        blocks_in_use_at_the_end=left.num_used_blocks,
        requests_left=left.num_running + left.num_waiting,
    )


if __name__ == "__main__":
    main()
