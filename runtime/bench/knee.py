"""Throughput and latency over concurrency: where more requests in flight stop paying, and the largest batch that holds an SLO.

    knee        the smallest concurrency that reaches KNEE_SHARE of the best throughput measured; beyond it latency grows and
                throughput hardly does. `saturated` is false when the curve still rises at its end: the true knee may lie beyond
    slo_batch   the largest concurrency up to which every measured point has its p99 within each limit; None when the first fails
    default     slo_batch when an SLO was given and held, else the knee: what runtime.config.resolve takes for max_num_seqs

Both are written into the engine's manifest, by a rename, with the machine they hold for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.files import replace_text
from runtime.contract import MANIFEST_FILE
from runtime.errors import EngineError

KNEE_SHARE = 0.95
SLO_PERCENTILE = "p99"


@dataclass(frozen=True)
class Point:
    """One measured concurrency. `latencies_ms` maps metric → {mean, p50, …}."""

    concurrency: int
    tokens_per_second: float
    latencies_ms: Mapping[str, Mapping[str, float]]

    def holds(self, slo: Mapping[str, float]) -> bool:
        return all(self.latencies_ms[name].get(SLO_PERCENTILE, 0.0) <= limit for name, limit in slo.items())


@dataclass(frozen=True)
class Knee:
    concurrency: int
    saturated: bool
    slo_batch: int | None
    max_num_seqs: int


def concurrencies(limit: int) -> list[int]:
    """1, 2, 4, … and the limit."""
    steps = [1 << power for power in range(limit.bit_length()) if 1 << power < limit]
    return [*steps, limit]


def find(points: Sequence[Point], slo: Mapping[str, float] | None = None) -> Knee:
    """`points` by ascending concurrency."""
    assert points and list(points) == sorted(points, key=lambda point: point.concurrency)
    enough = KNEE_SHARE * max(point.tokens_per_second for point in points)
    knee = next(point.concurrency for point in points if point.tokens_per_second >= enough)
    slo_batch: int | None = None
    for point in points if slo else ():
        if not point.holds(slo or {}):
            break
        slo_batch = point.concurrency
    return Knee(knee, len(points) == 1 or knee < points[-1].concurrency, slo_batch, slo_batch or knee)


def write(
    engine: Path, knee: Knee, points: Sequence[Point], *, slo: Mapping[str, float] | None, about: Mapping[str, Any]
) -> None:
    """Put the result into ENGINE/manifest.json, all of it or nothing. `about` has the key machine, and how it was measured."""
    curve = [
        {
            "concurrency": point.concurrency,
            "tokens_per_second": round(point.tokens_per_second, 2),
            **{f"p99_{name}_ms": round(values["p99"], 3) for name, values in point.latencies_ms.items() if values},
        }
        for point in points
    ]
    path = engine / MANIFEST_FILE
    data = json.loads(path.read_text(encoding="utf-8"))
    data["knee"] = {**dataclasses.asdict(knee), "slo_ms": dict(slo or {}), "curve": curve, **about}
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    try:
        replace_text(path, text)
    except OSError as error:
        raise EngineError(
            f"the knee cannot be written into {path} ({error.strerror}); run with --no-write to only print it"
        ) from error
