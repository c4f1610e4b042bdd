"""The knee of synthetic curves, how it gets into the manifest, and what the runtime makes of it there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.bench import knee
from runtime.bench.knee import Knee, Point
from runtime.config import RuntimeConfig, machine_name, resolve
from runtime.contract import MANIFEST_FILE, load_manifest
from runtime.errors import EngineError


def points(curve: dict[int, tuple[float, float]]) -> list[Point]:
    """concurrency → (tokens per second, p99 TPOT)"""
    return [
        Point(concurrency, rate, {"ttft": {"p50": 1.0, "p99": 2.0}, "tpot": {"p50": tpot / 2, "p99": tpot}, "itl": {}})
        for concurrency, (rate, tpot) in curve.items()
    ]


SATURATING = points({1: (30, 30), 2: (58, 34), 4: (105, 38), 8: (150, 53), 16: (157, 100), 32: (155, 210)})


def test_the_knee_is_where_more_requests_stop_paying() -> None:
    assert knee.find(SATURATING) == Knee(concurrency=8, saturated=True, slo_batch=None, max_num_seqs=8)


def test_a_curve_that_still_rises_has_its_knee_at_the_end_and_says_so() -> None:
    rising = points({1: (10, 1), 2: (20, 1), 4: (40, 1)})
    assert knee.find(rising) == Knee(concurrency=4, saturated=False, slo_batch=None, max_num_seqs=4)


def test_throughput_that_falls_with_load_has_its_knee_at_the_start() -> None:
    assert knee.find(points({1: (50, 1), 2: (40, 1), 4: (30, 1)})).concurrency == 1


@pytest.mark.parametrize(("limit", "batch", "default"), [(60.0, 8, 8), (37.0, 2, 2), (150.0, 16, 16), (10.0, None, 8)])
def test_the_largest_batch_within_the_slo(limit: float, batch: int | None, default: int) -> None:
    found = knee.find(SATURATING, {"tpot": limit})
    assert (found.slo_batch, found.max_num_seqs) == (batch, default)


def test_a_batch_beyond_one_that_fails_does_not_count() -> None:
    bumpy = points({1: (10, 5), 2: (20, 50), 4: (40, 5)})
    assert knee.find(bumpy, {"tpot": 10.0}).slo_batch == 1


def test_concurrencies_double_up_to_the_limit() -> None:
    assert knee.concurrencies(1) == [1]
    assert knee.concurrencies(8) == [1, 2, 4, 8]
    assert knee.concurrencies(24) == [1, 2, 4, 8, 16, 24]


@pytest.fixture
def engine(tiny_engine: Callable[[str], Path], tmp_path: Path) -> Path:
    """The manifest alone can be rewritten; the files it names are links."""
    return Path(shutil.copytree(tiny_engine("fp32"), tmp_path / "engine", copy_function=os.link))


def test_the_manifest_gets_the_knee_and_nothing_else_changes(engine: Path, tiny_engine: Callable[[str], Path]) -> None:
    before = load_manifest(engine)
    mode = (engine / MANIFEST_FILE).stat().st_mode
    found = knee.find(SATURATING, {"tpot": 37.0})
    knee.write(engine, found, SATURATING, slo={"tpot": 37.0}, about={"machine": machine_name(), "date": "today"})
    after = load_manifest(engine)
    assert dataclasses.replace(after, knee={}) == before and (engine / MANIFEST_FILE).stat().st_mode == mode
    assert after.knee["max_num_seqs"] == 2 and after.knee["concurrency"] == 8 and after.knee["slo_ms"] == {"tpot": 37.0}
    assert after.knee["curve"][3] == {"concurrency": 8, "tokens_per_second": 150, "p99_ttft_ms": 2.0, "p99_tpot_ms": 53}
    assert load_manifest(tiny_engine("fp32")).knee == {}, "the rename must not write through a link"
    assert sorted(path.name for path in engine.iterdir()) == sorted(path.name for path in tiny_engine("fp32").iterdir())


def test_a_failed_write_leaves_the_manifest_as_it_was(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (engine / MANIFEST_FILE).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match="No space left on device"):
        knee.write(engine, knee.find(SATURATING), SATURATING, slo=None, about={"machine": "m"})
    assert (engine / MANIFEST_FILE).read_bytes() == before
    assert not list(engine.glob(".manifest.*"))


def test_the_runtime_takes_the_knee_of_its_own_machine_only(engine: Path) -> None:
    manifest = load_manifest(engine, verify_checksums=False)
    assert resolve(RuntimeConfig(), manifest).max_num_seqs == manifest.max_num_seqs

    def with_knee(machine: str, batch: int) -> int:
        known = dataclasses.replace(manifest, knee={"machine": machine, "max_num_seqs": batch})
        return resolve(RuntimeConfig(), known).max_num_seqs

    assert with_knee(machine_name(), 4) == 4
    assert with_knee("another machine", 4) == manifest.max_num_seqs
    assert with_knee(machine_name(), 10_000) == manifest.max_num_seqs
    known = dataclasses.replace(manifest, knee={"machine": machine_name(), "max_num_seqs": 4})
    assert resolve(RuntimeConfig(max_num_seqs=16), known).max_num_seqs == 16, "the operator's choice comes first"


def test_manifest_is_json_a_person_can_read(engine: Path) -> None:
    knee.write(engine, knee.find(SATURATING), SATURATING, slo=None, about={"machine": "m"})
    assert json.loads((engine / MANIFEST_FILE).read_text())["knee"]["saturated"] is True
