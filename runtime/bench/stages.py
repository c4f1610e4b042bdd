"""Where an engine's time goes during a run: the loop's stages, and detokenizing and sending on the output thread.

The engine counts for itself (`loop.times`); this takes the difference over a run. A slow sampler shows up as `sample`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from runtime.loop import StageTimes

# stage of the report → counter of the loop
STAGES = {
    "schedule": "schedule_ns",
    "prepare": "prepare_ns",
    "execute": "execute_ns",
    "sample": "sample_ns",
    "update": "update_ns",
    "hand over": "sink_ns",
}
OUTPUT = "detokenize and send"
HOST = ("schedule", "prepare", "sample")  # what has to be small beside a step


def difference(before: StageTimes, after: StageTimes) -> StageTimes:
    return StageTimes(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in dataclasses.fields(StageTimes)})


def snapshot(times: StageTimes) -> StageTimes:
    return dataclasses.replace(times)


def stage_table(times: StageTimes) -> dict[str, Any]:
    """Milliseconds in all, microseconds per step and share of the loop's time. The output thread works beside the loop."""
    if not times.steps:
        return {}
    total = sum(getattr(times, counter) for counter in STAGES.values())

    def row(ns: int) -> dict[str, float]:
        return {"total_ms": ns / 1e6, "us_per_step": ns / 1e3 / times.steps, "share": ns / total}

    table: dict[str, Any] = {name: row(getattr(times, counter)) for name, counter in STAGES.items()}
    table[OUTPUT] = row(times.output_ns)
    return {
        "steps": times.steps,
        "failed_steps": times.failed_steps,
        "stages": table,
        "host_share": sum(table[name]["share"] for name in HOST),
    }
