"""Figures of traces worked out by hand."""

from __future__ import annotations

import csv
import io

import pytest

from runtime.bench.records import Record
from runtime.bench.report import CSV_COLUMNS, write_csv
from runtime.bench.report import text as report_text
from runtime.bench.statistics import dispatch_lag_ms, latencies_ms, meets, overview, parse_slo, stage_latencies, summarize
from runtime.errors import InvalidRequest


def record(index: int, arrival: float, chunks: list[tuple[float, int]], *, prompt: int = 10, **options: object) -> Record:
    moments, counts = [moment for moment, _ in chunks], [count for _, count in chunks]
    return Record(index, arrival, 8, arrival, moments, counts, num_prompt_tokens=prompt, finish_reason="length", **options)  # type: ignore[arg-type]


# A   arrives 0.0   tokens at 0.5, 0.7, 0.9 | TTFT 500, TPOT 200, gaps 200 200, E2E 900
# B   arrives 1.0   2 at 1.25, 3 at 2.05    | TTFT 250, TPOT 800 / 4 = 200, gap 800, E2E 1050
# C   arrives 1.5   one token at 1.6        | TTFT 100, no TPOT, no gap, E2E 100
A = record(0, 0.0, [(0.5, 1), (0.7, 1), (0.9, 1)], stages_ms={"queue": 100.0, "prefill": 400.0, "decode": 400.0})
B = record(
    1, 1.0, [(1.25, 2), (2.05, 3)], prompt=20, num_cached_tokens=16, stages_ms={"queue": 50.0, "prefill": 200.0, "decode": 800.0}
)
C = record(2, 1.5, [(1.6, 1)], num_cached_tokens=4)
FAILED = Record(3, 1.7, 8, 1.7, error="the step failed")
RECORDS = [A, B, C, FAILED]


def near(expected: object) -> object:
    return pytest.approx(expected, rel=1e-9)


def test_latencies() -> None:
    assert latencies_ms(RECORDS) == {
        "ttft": near([500, 250, 100]),
        "tpot": near([200, 200]),
        "itl": near([200, 200, 800]),
        "e2el": near([900, 1050, 100]),
    }


def test_overview() -> None:
    figures = overview(RECORDS)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["duration"] == near(2.05)  # from the first arrival to B's last token
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 9)
    assert figures["request_throughput"] == near(3 / 2.05)
    assert figures["output_throughput"] == near(9 / 2.05)
    assert figures["total_token_throughput"] == near(49 / 2.05)
    assert figures["max_output_tokens_per_s"] == 3  # A in the first second, B's first chunk and C in the second, B's in the third
    assert figures["max_concurrent_requests"] == 2
    assert figures["cached_input_tokens"] == 20
    assert figures["mean_ttft_ms"] == near(850 / 3) and figures["median_ttft_ms"] == near(250)
    assert figures["p99_itl_ms"] == near(200 + 600 * 0.98)  # rank 1.98 of 200, 200, 800
    assert "request_goodput" not in figures


def test_percentiles_interpolate_between_closest_ranks() -> None:
    summary = summarize(range(1, 1002))
    assert summary == near(
        {
            "mean": 501, "std": (1001**2 / 12 - 1 / 12) ** 0.5, "min": 1, "max": 1001,
            "p50": 501, "p90": 901, "p95": 951, "p99": 991, "p99.9": 1000,
        }
    )  # fmt: skip
    assert summarize([]) == {}


def test_goodput_counts_requests_within_every_limit() -> None:
    slo = parse_slo("ttft=300ms,tpot=0.2s")
    assert slo == {"ttft": 300.0, "tpot": 200.0}
    tolerant = {"ttft": 300.0, "tpot": 200.0001}  # 200 ms is 0.2 s plus rounding here
    assert [meets(each, tolerant) for each in RECORDS] == [False, True, True, False]
    figures = overview(RECORDS, tolerant)
    assert figures["request_goodput"] == near(2 / 2.05)
    assert figures["slo_attainment"] == 0.5
    assert [meets(each, {"itl": 500.0}) for each in RECORDS] == [True, False, True, False]
    uneven = record(4, 0.0, [(0.1, 1), (0.2, 1), (0.9, 1)])
    assert not meets(uneven, {"itl": 500.0}), "the largest gap counts"
    assert [meets(each, {"e2el": 950.0}) for each in RECORDS] == [True, False, True, False]


def test_slo_forms() -> None:
    assert parse_slo("ttft:200, e2e=2s") == {"ttft": 200.0, "e2el": 2000.0}
    for text in ("", "ttft", "ttft=0", "ttft=-1", "speed=3", "ttft=1m"):
        with pytest.raises(InvalidRequest, match="must look like"):
            parse_slo(text)


def test_stages_and_lag() -> None:
    assert stage_latencies(RECORDS)["queue"]["mean"] == near(75)
    assert stage_latencies([C]) == {}
    late = [Record(0, 1.0, 1, sent=1.5), Record(1, 2.0, 1, sent=2.0)]
    assert dispatch_lag_ms(late)["mean"] == near(250)


def test_a_run_without_success_has_counts_only() -> None:
    assert overview([FAILED], {"ttft": 1.0}) == {"completed": 0, "failed": 1}


def test_csv_has_a_line_per_request() -> None:
    file = io.StringIO()
    write_csv(file, RECORDS)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["ttft_ms"] for row in rows] == ["500.000", "250.000", "100.000", ""]
    assert [row["max_itl_ms"] for row in rows] == ["200.000", "800.000", "", ""]
    assert [row["tpot_ms"] for row in rows] == ["200.000", "200.000", "", ""]
    assert [row["arrival_s"] for row in rows] == ["0.000000", "1.000000", "1.500000", "1.700000"]
    assert [row["cached_tokens"] for row in rows] == ["", "16", "4", ""]
    assert rows[3]["error"] == "the step failed"


def test_an_answer_in_one_response_has_no_gap_and_the_report_says_so() -> None:
    def lines(records: list[Record]) -> list[list[str]]:
        machine = {"name": "none", "load_average": [0.0]}
        report = {"figures": overview(records), "configuration": {}, "machine": machine, "process_cpu_s": 0.0, "versions": {}}
        return [line.split() for line in report_text(report, records).splitlines()]

    assert ["P99.9", "ITL", "(ms):", "n/a"] in lines([C]) and ["P99.9", "TTFT", "(ms):", "100.00"] in lines([C])
    assert ["Mean", "ITL", "(ms):", "400.00"] in lines(RECORDS)
    assert not any("TTFT" in line for line in lines([FAILED]))
