"""From records to figures: latencies with percentiles, throughput, goodput under an SLO. Nothing is measured here.

Units   milliseconds where the name says so, seconds else; percentiles interpolate linearly between closest ranks
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from runtime.bench.records import Record
from runtime.errors import InvalidRequest

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
SLO_METRICS = ("ttft", "tpot", "itl", "e2el")


def summarize(values: Iterable[float]) -> dict[str, float]:
    """mean, std, min, max and p50 … p99.9; empty when there are no values."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return {}
    summary = {"mean": array.mean(), "std": array.std(), "min": array.min(), "max": array.max()}
    summary |= {f"p{percent:g}": value for percent, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)}
    return {name: float(value) for name, value in summary.items()}


def latencies_ms(records: Sequence[Record]) -> dict[str, list[float]]:
    """Every TTFT, TPOT, ITL and E2E latency of the requests that succeeded, by the names vLLM's benchmark has for them."""
    good = [record for record in records if record.ok]
    return {
        "ttft": [1e3 * record.ttft for record in good],
        "tpot": [1e3 * record.tpot for record in good if record.tpot is not None],
        "itl": [1e3 * gap for record in good for gap in record.gaps],
        "e2el": [1e3 * record.e2e for record in good],
    }


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=200ms,tpot=0.05s` → milliseconds; a bare number is milliseconds. itl limits a request's largest gap."""
    slo: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*[=:]\s*(\d+(?:\.\d+)?)\s*(ms|s)?\s*", part)
        name = {"e2e": "e2el"}.get(match[1], match[1]) if match else ""
        if match is None or name not in SLO_METRICS or not float(match[2]) > 0:
            raise InvalidRequest(f"--slo {text!r} must look like ttft=200ms,tpot=20ms with names among {', '.join(SLO_METRICS)}")
        slo[name] = float(match[2]) * (1e3 if match[3] == "s" else 1.0)
    return slo


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """A request that failed meets nothing; one token has no TPOT and no gap, so no limit on those can fail it."""
    if not record.ok:
        return False
    tpot = record.tpot
    seen = {
        "ttft": record.ttft,
        "tpot": 0.0 if tpot is None else tpot,
        "itl": max(record.gaps, default=0.0),
        "e2el": record.e2e,
    }
    return all(1e3 * seen[name] <= limit for name, limit in slo.items())


def overview(records: Sequence[Record], slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A run's flat figures, under the keys that vLLM's benchmark saves. It lasts from the first request to the last token."""
    good = [record for record in records if record.ok]
    figures: dict[str, Any] = {"completed": len(good), "failed": len(records) - len(good)}
    if not good:
        return figures
    begin, end = min(record.arrival for record in records), max(record.moments[-1] for record in good)
    duration = end - begin
    inputs, outputs = sum(record.num_prompt_tokens for record in good), sum(record.num_output_tokens for record in good)
    figures |= {
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good, begin),
        "max_concurrent_requests": peak_concurrency(good),
    }
    cached = [record.num_cached_tokens for record in good if record.num_cached_tokens is not None]
    if cached:
        figures["cached_input_tokens"] = sum(cached)
    if slo:
        figures["request_goodput"] = sum(meets(record, slo) for record in records) / duration
        figures["slo_attainment"] = sum(meets(record, slo) for record in records) / len(records)
    for metric, values in latencies_ms(records).items():
        summary = summarize(values)
        for name, key in (("mean", "mean"), ("p50", "median"), ("std", "std")):
            if summary:
                figures[f"{key}_{metric}_ms"] = summary[name]
        figures |= {f"{name}_{metric}_ms": value for name, value in summary.items() if name[0] == "p" and name != "p50"}
    return figures


def stage_latencies(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """queue, prefill and decode as the engine timed them, milliseconds."""
    stages = [record.stages_ms for record in records if record.ok and record.stages_ms]
    return {name: summarize(stage[name] for stage in stages) for name in ("queue", "prefill", "decode")} if stages else {}


def dispatch_lag_ms(records: Sequence[Record]) -> dict[str, float]:
    """How late requests of an open loop were sent: the load generator's own error, or a wait for a free slot."""
    return summarize(1e3 * (record.sent - record.arrival) for record in records)


def peak_tokens_per_second(records: Sequence[Record], begin: float) -> float:
    """Most tokens in any whole second since `begin`."""
    moments = np.array([moment for record in records for moment in record.moments])
    counts = np.array([count for record in records for count in record.counts], np.float64)
    return float(np.bincount((moments - begin).astype(np.int64), weights=counts).max())


def peak_concurrency(records: Sequence[Record]) -> int:
    events = [(record.sent, 1) for record in records] + [(record.moments[-1], -1) for record in records]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak
