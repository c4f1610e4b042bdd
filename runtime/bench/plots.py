"""Plots of a run and of a knee; needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.knee import Knee, Point
from runtime.bench.records import Record
from runtime.bench.statistics import latencies_ms
from runtime.errors import InvalidRequest


def require() -> None:
    """Fail before the run rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(f"--plot needs matplotlib ({error}); pip install 'forgeline[bench]' or leave it out") from error


def plot_run(records: Sequence[Record], title: str, path: Path) -> None:
    """Latency distributions, and output tokens per second over the run."""
    figure, (left, right) = _figure()
    for name, values in latencies_ms(records).items():
        if values:
            left.plot(np.sort(values), np.linspace(0, 1, len(values)), label=name.upper())
    left.set(title=f"{title}: latencies", xlabel="ms", ylabel="share of values below", xscale="log")
    good = [record for record in records if record.ok]
    if good:
        begin = min(record.arrival for record in good)
        moments = np.concatenate([record.moments for record in good]) - begin
        counts = np.concatenate([record.counts for record in good])
        edges = np.linspace(0, moments.max(), 51)
        rates = np.histogram(moments, edges, weights=counts)[0] / np.diff(edges)
        right.step(edges[:-1], rates, where="post")
    right.set(title="output tokens per second", xlabel="s")
    _save(figure, (left,), path)


def plot_knee(points: Sequence[Point], knee: Knee, title: str, path: Path) -> None:
    figure, (left, right) = _figure()
    x = [point.concurrency for point in points]
    left.plot(x, [point.tokens_per_second for point in points], "o-", label="tokens per second")
    left.axvline(knee.concurrency, color="grey", linestyle="--", label=f"knee: {knee.concurrency}")
    left.set(title=f"{title}: throughput", xlabel="requests in flight")
    for metric in ("ttft", "tpot"):
        right.plot(x, [point.latencies_ms[metric].get("p99", np.nan) for point in points], "o-", label=f"p99 {metric.upper()}")
    right.set(title="latency", xlabel="requests in flight", ylabel="ms", yscale="log")
    _save(figure, (left, right), path)


def _figure() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")


def _save(figure: Any, with_legend: Sequence[Any], path: Path) -> None:
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.grid(alpha=0.3)
    for axes in with_legend:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
