"""The measuring scripts end in one JSON line whose counts are right; their arithmetic on inputs worked out by hand."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import batching
import chunked_prefill
import soak
from common import Trace


@pytest.fixture
def script(tiny_engine: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(name: str, *arguments: object) -> dict[str, Any]:
        options = ["--engine", str(tiny_engine("fp32")), *map(str, arguments)]
        importlib.import_module(name).main(options)
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["benchmark"] == name and line["eos_ignored"] is True and line["model"] == "tiny-llama"
        return line

    return run


def test_chunked_prefill(script: Callable[..., dict[str, Any]]) -> None:
    sizes = ["--repetitions", 1, "--streams", 2, "--tokens-before", 8, "--max-num-batched-tokens", 34]
    line = script("chunked_prefill", *sizes, "--prompt-tokens", 200, "--output-tokens", 80)
    for variant in ("chunked", "whole"):
        gaps = line[variant]
        assert gaps["ratio"]["median"] == pytest.approx(gaps["p99_itl_during_ms"] / gaps["p99_itl_before_ms"], rel=1e-2)
    with pytest.raises(SystemExit, match="the streams ended before the prompt was read"):
        script("chunked_prefill", *sizes, "--prompt-tokens", 1500, "--output-tokens", 26)


def test_gaps_that_overlap_the_window() -> None:
    stream = chunked_prefill.Stream.__new__(chunked_prefill.Stream)
    stream.arrivals = [0.0, 1.0, 2.0, 4.0, 5.0]
    assert chunked_prefill.gaps_ms([stream], 2.5, 3.0) == [2000.0]
    assert chunked_prefill.gaps_ms([stream], 1.5, 4.5) == [1000.0, 2000.0, 1000.0]
    assert chunked_prefill.gaps_ms([stream], 0.0, 9.0, first=3) == [1000.0]


def test_prefix_cache(script: Callable[..., dict[str, Any]]) -> None:
    sizes = ["--repetitions", 1, "--requests", 6, "--shared-tokens", 64, "--concurrency", 2, "--output-tokens", 4]
    line = script("prefix_cache", *sizes, "--prime")
    assert line["cached_share"] == pytest.approx(64 / 80)  # every request finds the whole prefix
    assert line["requests_with_other_tokens"] == 0
    assert script("prefix_cache", *sizes)["cached_share"] == pytest.approx(5 / 6 * 64 / 80, abs=1e-4)  # the first pays


def test_batching(script: Callable[..., dict[str, Any]]) -> None:
    line = script("batching", "--repetitions", 1, "--requests", 6, "--max-num-seqs", 2, "--output-len", "uniform:min=2,max=20")
    rates = {name: figures["median"] for name, figures in line["tokens_per_second"].items()}
    for name in ("static", "draining"):
        assert line["throughput_ratio"][f"continuous/{name}"]["median"] == pytest.approx(
            rates["continuous"] / rates[name], rel=1e-2
        )
    assert 12 <= line["output_tokens"] < line["padded_tokens"] <= 120


def test_a_static_batch_is_as_long_as_its_longest_sequence() -> None:
    assert batching.padded([3, 9, 1, 2, 5], 2) == [9, 9, 2, 2, 5]
    trace = Trace(0.0, arrivals=[1.0, 2.0, 3.0], counts=[1, 2, 1])
    assert [batching.moment_of(trace, count) for count in (1, 2, 3, 4)] == [1.0, 2.0, 2.0, 3.0]


def test_soak(script: Callable[..., dict[str, Any]]) -> None:
    line = script("soak", "--requests", 30, "--concurrency", 4, "--output-tokens", 2, "--num-blocks", 64)
    assert (line["blocks_in_use_at_the_end"], line["requests_left"], line["latency_ms"]["compared"]) == (0, 0, 10)
    assert line["step_lengths"] == 31 + 4  # 2 to 32, then 40, 48, 56, 64: 4 prompts of 16 tokens at once


def test_slope_and_its_interval() -> None:
    x = np.arange(100.0)
    exact, interval = soak.slope(x, 3 * x + 7)
    assert exact == pytest.approx(3) and interval == pytest.approx(0, abs=1e-9)
    noise = np.random.default_rng(0).normal(0, 5, 100)
    assert abs(soak.slope(x, noise)[0]) < soak.slope(x, noise)[1]  # noise alone is within its interval
    grown, interval = soak.slope(x, noise + 0.5 * x)
    assert grown - interval > 0


def test_cold_start(script: Callable[..., dict[str, Any]]) -> None:
    line = script("cold_start", "--repetitions", 1)
    assert sum(line["stages_s"].values()) == pytest.approx(line["seconds_to_first_token"]["median"], rel=0.15, abs=0.1)
    assert line["limit_mb"] == pytest.approx(1.25 * (line["weights_mb"] + line["pool_mb"]) + 300, abs=0.2)


def test_memory(tiny_engine: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("memory").main(["--engine", str(tiny_engine("fp32")), "--requests", "8"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = line["engines"]
    assert row["predicted_bytes"] == sum(row["predicted"].values())
    assert row["predicted"]["pool"] == 256 * 32 * 4 * 2 * 2 * 64 * 4  # blocks × tokens × layers × sides × heads × channels × f32
    assert row["predicted"]["weights"] == row["weight_bytes"]
    assert row["measured"]["VmRSS"] <= row["measured"]["VmHWM"]
    assert row["ratio"] == pytest.approx(row["predicted_bytes"] / row["measured"]["VmRSS"], abs=1e-4)
    assert line["largest_error"] == pytest.approx(abs(row["ratio"] - 1), abs=1e-4)
