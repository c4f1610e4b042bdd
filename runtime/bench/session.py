"""One measured run: warm-up, the run, what its stages took, what share of the roofline it reached."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from runtime.bench import machine, roofline, stages
from runtime.bench.arrivals import Arrivals, closed_loop
from runtime.bench.clients import InProcessClient, chunk_cost_us
from runtime.bench.driver import Client, Progress, drive
from runtime.bench.knee import Point
from runtime.bench.records import Record
from runtime.bench.report import roofline_section
from runtime.bench.statistics import dispatch_lag_ms, latencies_ms, overview, stage_latencies, summarize
from runtime.bench.workload import Work
from runtime.engine import Engine
from runtime.errors import ForgelineError
from runtime.executors.base import Executor
from runtime.request import SamplingParams


@dataclass(frozen=True)
class Run:
    records: list[Record]
    sections: dict[str, Any]  # of the report: figures, request_stages, step_stages, roofline, …


def warm_up(client: Client, works: Sequence[Work]) -> None:
    """Raises  ForgelineError when a request fails, so that a broken set-up is noticed before the run."""
    if works:
        for record in drive(client, works, closed_loop(len(works))):
            if not record.ok:
                raise ForgelineError(f"a warm-up request failed: {record.error or 'it returned no token'}")


def run_client(
    client: Client,
    works: Sequence[Work],
    arrivals: Arrivals,
    *,
    slo: dict[str, float] | None = None,
    progress: Progress | None = None,
) -> Run:
    cpu = time.process_time()
    records = drive(client, works, arrivals, progress=progress)
    sections: dict[str, Any] = {"figures": overview(records, slo), "process_cpu_s": round(time.process_time() - cpu, 3)}
    if request_stages := stage_latencies(records):
        sections["request_stages"] = request_stages
    if arrivals.is_open_loop:
        sections["dispatch_lag_ms"] = dispatch_lag_ms(records)
    return Run(records, sections)


def run_engine(
    engine: Engine,
    works: Sequence[Work],
    arrivals: Arrivals,
    params: SamplingParams,
    *,
    slo: dict[str, float] | None = None,
    progress: Progress | None = None,
    directory: Path | None = None,
    peaks: machine.Peaks | None = None,
) -> Run:
    """In process. The engine must be idle. The roofline needs `peaks` and the engine's `directory`."""
    loop = engine.loop
    plain = loop.executor
    metered = roofline.MeteredExecutor(plain)
    if peaks is not None:
        loop.executor = cast(Executor, metered)
    before = stages.snapshot(loop.times)
    try:
        run = run_client(InProcessClient(engine, params), works, arrivals, slo=slo, progress=progress)
    finally:
        loop.executor = plain
    run.sections["step_stages"] = stages.stage_table(stages.difference(before, stages.snapshot(loop.times)))
    run.sections["client_us_per_chunk"] = round(chunk_cost_us(), 3)
    if peaks is not None and directory is not None:
        run.sections["roofline"] = _roofline(engine, directory, metered.steps, peaks)
    return run


def _roofline(engine: Engine, directory: Path, steps: Iterable[roofline.Step], peaks: machine.Peaks) -> dict[str, Any]:
    if engine.manifest.target != "cpu":
        return {"unavailable": f"no roofline for target {engine.manifest.target}: only a CPU's peaks are measured here"}
    try:
        model = roofline.Model.load(directory, engine.manifest)
    except (OSError, KeyError, ValueError) as error:
        return {"unavailable": f"no roofline: the engine's report does not give its weights ({type(error).__name__}: {error})"}
    assessed, seen = roofline.assess(list(steps), model, peaks)
    if seen.raised_by > peaks.raised_by:
        machine.store(seen)
    return roofline_section(assessed, seen)


def measure_point(engine: Engine, works: Sequence[Work], concurrency: int, params: SamplingParams, progress: Progress) -> Point:
    """One concurrency of a knee.  Raises  ForgelineError when a request fails: a curve with holes has no knee."""
    run = run_client(InProcessClient(engine, params), works, closed_loop(concurrency), progress=progress)
    for record in run.records:
        if not record.ok:
            raise ForgelineError(f"a request failed at concurrency {concurrency}: {record.error or 'it returned no token'}")
    latencies = {name: summarize(values) for name, values in latencies_ms(run.records).items()}
    return Point(concurrency, run.sections["figures"]["output_throughput"], latencies)
