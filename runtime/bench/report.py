"""A run as text, JSON, CSV. Labels are those users know: the overview of trtllm-bench, the latency table of vLLM's benchmark.

JSON   one object: the flat figures of statistics.overview, plus configuration, environment, stages, roofline
CSV    one line per request, seconds since the start of the run
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from runtime.bench.knee import Knee, Point
from runtime.bench.machine import Peaks
from runtime.bench.records import Record
from runtime.bench.statistics import latencies_ms, summarize

WIDTH = 59
CSV_COLUMNS = (
    "index", "arrival_s", "sent_s", "ttft_ms", "tpot_ms", "max_itl_ms", "e2el_ms", "input_tokens", "output_tokens",
    "cached_tokens", "queue_ms", "prefill_ms", "decode_ms", "finish_reason", "error",
)  # fmt: skip
_TITLES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)", "itl": "Inter-token Latency"}
_PERCENTILES = (("Mean", "mean"), ("Median", "p50"), ("P90", "p90"), ("P95", "p95"), ("P99", "p99"), ("P99.9", "p99.9"))


def text(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """What `runtime bench` prints."""
    lines: list[str] = []
    figures = report["figures"]
    if figures["completed"]:
        _overview(lines, report, records)
    _serving(lines, report, records)
    _stages(lines, report)
    if "roofline" in report:
        _roofline(lines, report["roofline"])
    _title(lines, "How it was measured", "-")
    who = "engine and client" if "step_stages" in report else "the client alone"
    lines += [f"{name + ':':<22}{_plain(value)}" for name, value in report["configuration"].items()]
    lines.append(f"{'machine:':<22}{report['machine']['name']}, load average {_plain(report['machine']['load_average'])}")
    lines.append(f"{'CPU of this process:':<22}{report['process_cpu_s']} s, {who}")
    lines.append(f"{'versions:':<22}" + ", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    return "\n".join(lines)


def _overview(lines: list[str], report: Mapping[str, Any], records: Sequence[Record]) -> None:
    figures = report["figures"]
    latency = summarize(latencies_ms(records)["e2el"])
    good = [record for record in records if record.ok]
    per_user = sum(record.num_output_tokens / record.e2e for record in good) / len(good)
    rule = "=" * WIDTH
    lines += [rule, "= PERFORMANCE OVERVIEW", rule]
    _row(lines, "Request Throughput (req/sec):", figures["request_throughput"])
    _row(lines, "Total Output Throughput (tokens/sec):", figures["output_throughput"])
    _row(lines, "Total Token Throughput (tokens/sec):", figures["total_token_throughput"])
    _row(lines, "Total Latency (ms):", 1e3 * figures["duration"])
    _row(lines, "Average request latency (ms):", latency["mean"])
    _row(lines, "Per User Output Throughput [w/ ctx] (tps/user):", per_user)
    _row(lines, "Average time-to-first-token [TTFT] (ms):", figures["mean_ttft_ms"])
    if "mean_tpot_ms" in figures:
        _row(lines, "Average time-per-output-token [TPOT] (ms):", figures["mean_tpot_ms"])
    lines += ["", "-- Request Latency Breakdown (ms) " + "-" * (WIDTH - 34), ""]
    for label, name in (
        ("P50    ", "p50"), ("P90    ", "p90"), ("P95    ", "p95"), ("P99    ", "p99"), ("MINIMUM", "min"), ("MAXIMUM", "max"),
        ("AVERAGE", "mean"),
    ):  # fmt: skip
        lines.append(f"[Latency] {label}: {latency[name]:.2f}")
    lines.append("")


def _serving(lines: list[str], report: Mapping[str, Any], records: Sequence[Record]) -> None:
    figures, configuration = report["figures"], report["configuration"]
    _title(lines, "Serving Benchmark Result", "=")
    _row(lines, "Successful requests:", figures["completed"])
    _row(lines, "Failed requests:", figures["failed"])
    for reason in sorted({record.error for record in records if record.error})[:3]:
        lines.append(f"    {reason}")
    if configuration.get("concurrency"):
        _row(lines, "Maximum request concurrency:", configuration["concurrency"])
    if configuration.get("request_rate"):
        _row(lines, "Request rate configured (RPS):", configuration["request_rate"])
    for label, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Input tokens from the prefix cache:", "cached_input_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        if key in figures:
            _row(lines, label, figures[key])
    latencies = latencies_ms(records)
    for metric, title in _TITLES.items():
        if figures["completed"]:
            summary = summarize(latencies[metric])  # no gap, no ITL: every answer came in one response
            _title(lines, title, "-")
            for label, name in _PERCENTILES:
                _row(lines, f"{label} {metric.upper()} (ms):", summary.get(name, "n/a"))


def _stages(lines: list[str], report: Mapping[str, Any]) -> None:
    if report.get("request_stages"):
        _title(lines, "Stages of a request (ms)", "-")
        lines.append(f"{'':<12}" + "".join(f"{label:>10}" for label, _ in _PERCENTILES))
        for name, summary in report["request_stages"].items():
            lines.append(f"{name:<12}" + "".join(f"{summary[key]:>10.2f}" for _, key in _PERCENTILES))
    steps = report.get("step_stages")
    if steps:
        _title(lines, f"Stages of a step ({steps['steps']} steps)", "-")
        lines.append(f"{'':<22}{'total ms':>12}{'µs/step':>12}{'share':>9}")
        for name, row in steps["stages"].items():
            lines.append(f"{name:<22}{row['total_ms']:>12.1f}{row['us_per_step']:>12.1f}{row['share']:>9.2%}")
        _row(lines, "schedule + prepare + sample, share of a step:", f"{steps['host_share']:.2%}")


def _roofline(lines: list[str], roofline: Mapping[str, Any]) -> None:
    _title(lines, "Roofline", "-")
    if "unavailable" in roofline:
        lines.append(roofline["unavailable"])
        return
    peaks = roofline["peaks"]
    lines.append(
        f"read {peaks['memory_bandwidth'] / 1e9:.1f} GB/s, fp32 {peaks['fp32_ops'] / 1e9:.0f} GFLOP/s, "
        f"int8 {peaks['int8_ops'] / 1e9:.0f} GOP/s"
        + (f"; raised by {peaks['raised_by']:.3f} to what this engine reached" if peaks["raised_by"] > 1 else "")
    )
    lines.append(f"{'':<9}{'steps':>7}{'ms/step':>9}{'floor':>9}{'share':>8}{'bound':>9}{'MB/step':>9}{'GOP/step':>10}")
    for name, row in roofline["stages"].items():
        lines.append(
            f"{name:<9}{row['steps']:>7}{1e3 * row['seconds'] / row['steps']:>9.2f}"
            f"{1e3 * row['floor_seconds'] / row['steps']:>9.2f}{row['share']:>8.1%}{row['bound']:>9}"
            f"{row['bytes_per_step'] / 1e6:>9.1f}{row['operations_per_step'] / 1e9:>10.2f}"
        )


def roofline_section(stages: Mapping[str, Any], peaks: Peaks) -> dict[str, Any]:
    return {
        "peaks": {
            "memory_bandwidth": peaks.memory_bandwidth,
            "read_bandwidth": [list(pair) for pair in peaks.read_bandwidth],
            "fp32_ops": peaks.fp32_ops,
            "int8_ops": peaks.int8_ops,
            "kernels": list(peaks.kernels),
            "raised_by": peaks.raised_by,
        },
        "stages": dict(stages),
    }


def knee_text(points: Sequence[Point], knee: Knee, slo: Mapping[str, float]) -> str:
    lines = [f"{'concurrency':>11}{'tok/s':>10}{'p50 TPOT':>10}{'p99 TPOT':>10}{'p50 TTFT':>10}{'p99 TTFT':>10}{'SLO':>6}"]
    for point in points:
        tpot, ttft = point.latencies_ms["tpot"], point.latencies_ms["ttft"]
        mark = "" if not slo else "held" if point.holds(slo) else "no"
        cells = [values.get(name, float("nan")) for values in (tpot, ttft) for name in ("p50", "p99")]
        lines.append(
            f"{point.concurrency:>11}{point.tokens_per_second:>10.1f}"
            + "".join(f"{cell:>10.2f}" for cell in cells)
            + f"{mark:>6}"
        )
    lines.append(
        f"knee: {knee.concurrency}" + ("" if knee.saturated else " (throughput still rises there; the true knee may lie beyond)")
    )
    if slo:
        limits = ", ".join(f"p99 {name} ≤ {limit:g} ms" for name, limit in slo.items())
        lines.append(f"largest batch with {limits}: {knee.slo_batch if knee.slo_batch is not None else 'none'}")
    lines.append(f"max_num_seqs from now on: {knee.max_num_seqs}")
    return "\n".join(lines)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_csv(file: TextIO, records: Sequence[Record]) -> None:
    writer = csv.writer(file)
    writer.writerow(CSV_COLUMNS)
    begin = min((record.arrival for record in records), default=0.0)

    def ms(value: float | None) -> str:
        return "" if value is None else f"{1e3 * value:.3f}"

    for record in records:
        seen = (ms(record.ttft), ms(record.tpot), ms(max(record.gaps, default=None)), ms(record.e2e)) if record.ok else ("",) * 4
        stages = (f"{record.stages_ms[name]:.3f}" if name in record.stages_ms else "" for name in ("queue", "prefill", "decode"))
        cached = "" if record.num_cached_tokens is None else record.num_cached_tokens
        writer.writerow(
            [record.index, f"{record.arrival - begin:.6f}", f"{record.sent - begin:.6f}", *seen, record.num_prompt_tokens,
             record.num_output_tokens, cached, *stages, record.finish_reason, record.error]
        )  # fmt: skip


def _title(lines: list[str], title: str, rule: str) -> None:
    lines.append(f" {title} ".center(WIDTH, rule))


def _row(lines: list[str], label: str, value: Any) -> None:
    lines.append(f"{label:<48}{value:<11.2f}" if isinstance(value, float) else f"{label:<48}{value:<11}")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
