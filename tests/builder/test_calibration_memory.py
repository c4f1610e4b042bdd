"""What calibration holds does not depend on how much text it reads, and a build that changes nothing does not calibrate."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import fused, prompt

from builder import calibration
from builder.build import build
from builder.config import BuildConfig
from builder.observe import SAMPLE_ROWS, TensorStats, observe
from builder.quantize import layer_inputs
from builder.spill import Spill
from plugins.paged_attention.op import attach_functions
from runtime.errors import OutOfDisk

CONTEXT = 40
TINY_LLAMA = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"


@pytest.fixture
def graph(exported: Callable[[str], Any], tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(attach_functions(fused(exported("llama"))), path)
    return path


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


def run(graph: Path, windows: Sequence[list[int]]) -> tuple[dict[str, TensorStats], list[int]]:
    """Statistics, and the resident set after each window."""
    resident: list[int] = []
    names = layer_inputs(ir.load(graph), "int8-sq")
    return observe(
        graph, windows, names, hessians=True, num_threads=1, progress=lambda *_: resident.append(resident_bytes())
    ), resident


def num_bytes(stats: TensorStats) -> int:
    arrays = [getattr(stats, field.name) for field in dataclasses.fields(stats)]
    return sum(array.nbytes for array in arrays if hasattr(array, "nbytes"))


def test_statistics_take_the_same_memory_however_long_the_text(graph: Path) -> None:
    count = SAMPLE_ROWS + 2  # a row of each window would be too many
    few, _ = run(graph, [prompt(CONTEXT, seed) for seed in range(4)])
    many, _ = run(graph, [prompt(CONTEXT, seed) for seed in range(count)])
    for name in few:
        assert len(many[name].sample) == SAMPLE_ROWS
        assert num_bytes(many[name]) == num_bytes(few[name])
        assert many[name].num_rows == count * CONTEXT


def test_windows_leave_nothing_behind(graph: Path) -> None:
    """Keeping what flows through the layers would cost `activations` for each window."""
    windows = [prompt(256, seed) for seed in range(60)]
    stats, resident = run(graph, windows)
    activations = sum(4 * 256 * len(entry.channel_amax) for entry in stats.values())
    assert resident[-1] - resident[20] < 10 * activations


def test_a_build_with_unchanged_inputs_calibrates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> dict[str, TensorStats]:
        calls.append(1)
        return observe(*arguments, **options)

    monkeypatch.setattr(calibration, "observe", counted)
    config = BuildConfig(str(TINY_LLAMA), tmp_path / "engine", precision="int8-sq", eval_tokens=0, calibration_samples=2)
    assert not build(config, quiet=True).up_to_date
    assert len(calls) == 1
    assert build(config, quiet=True).up_to_date
    elsewhere = dataclasses.replace(config, output=tmp_path / "other", max_num_seqs=4)  # another engine
    assert not build(elsewhere, quiet=True).up_to_date  # ranges are in the cache
    assert len(calls) == 1


def test_a_full_disk_under_set_aside_arrays_names_that_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "forgeline" / "canonical"
    place.mkdir(parents=True)
    spill = Spill(place)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfDisk, match=f"the disk of {place} is full.*XDG_CACHE_HOME"):
        spill.put(np.zeros(3))
