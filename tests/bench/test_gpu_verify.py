"""bench/gpu_verify.py: its table, its isolation, what it says without a GPU, and its kernel checks in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import gpu_verify  # noqa: E402
from fake_tensorrt import Rig, make_manifest  # noqa: E402
from gpu_verify import CHECKS, FAIL, NOT_RUN, PASS, Check, Context, NotRun, Row  # noqa: E402

from runtime.driver import Driver, Gpu  # noqa: E402

STUBS = """
import os, time
from gpu_verify import NotRun
def good(context): return f"saw {sorted(context.figures)}", {"x": 1.5}
def wrong(context): raise AssertionError("error 2 of 1\\nand more")
def breaks(context): return [][0]
def refuses(context): raise NotRun("no room")
def dies(context): os._exit(3)
def hangs(context): time.sleep(60)
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of a made-up module, for this process and for children."""
    (tmp_path / "stub_checks.py").write_text(STUBS)
    names = ("good", "wrong", "breaks", "refuses", "dies", "hangs")
    checks = tuple(Check(name, f"stub_checks:{name}", (), 2 if name == "hangs" else 30) for name in names)
    script = tmp_path / "verify.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'bench')!r}]\nimport gpu_verify\n"
        f"gpu_verify.CHECKS = tuple(gpu_verify.Check(n, 'stub_checks:' + n, (), 30) for n in {names!r})\n"
        "sys.exit(gpu_verify.main())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_verify, "CHECKS", checks)
    monkeypatch.setattr(gpu_verify, "__file__", str(script))


def rows_of(**options: Any) -> dict[str, Row]:
    settings: dict[str, Any] = {"target": "tensorrt", "model": "m", "seconds": 60, "interpret": False, "show": False, **options}
    return {row.name: row for row in gpu_verify.run_all(gpu_verify.CHECKS, **settings)}


def test_a_check_passes_fails_or_says_why_it_did_not_run_and_takes_nothing_else_down(stubs: None) -> None:
    rows = rows_of()
    assert {name: (row.status, row.detail) for name, row in rows.items()} == {
        "good": (PASS, "saw []"),
        "wrong": (FAIL, "error 2 of 1"),
        "breaks": (FAIL, "IndexError: list index out of range"),
        "refuses": (NOT_RUN, "no room"),
        "dies": (FAIL, "its process ended with 3: no output"),
        "hangs": (FAIL, "did not end within 2 s"),
    }
    assert rows["good"].figures == {"x": 1.5}
    assert gpu_verify.summary(list(rows.values())) == "1 passed, 4 failed, 1 not run"


def test_later_checks_see_the_figures_of_those_that_passed(stubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    good, wrong = gpu_verify.CHECKS[:2]
    monkeypatch.setattr(gpu_verify, "CHECKS", (good, wrong, good))
    rows = gpu_verify.run_all(gpu_verify.CHECKS, target="tensorrt", model="m", seconds=60, interpret=False, show=False)
    assert [row.detail for row in rows] == ["saw []", "error 2 of 1", "saw ['good']"]


def test_when_the_time_is_over_the_rest_does_not_run(stubs: None) -> None:
    rows = rows_of(seconds=3)
    assert {row.status for row in rows.values()} == {NOT_RUN}
    assert rows["good"].detail == "the 3 seconds are over; see --seconds and --only"


@pytest.mark.parametrize("only, status", [("good", 0), ("refuses", 0), ("wrong", 1), ("dies", 1)])
def test_exit_status_and_json(stubs: None, only: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_verify.main(["--only", only, "--json", str(tmp_path / "out" / "rows.json")]) == status
    report = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [row["name"] for row in report["rows"]] == [only]
    assert report["summary"] in capsys.readouterr().out


def test_a_machine_without_a_gpu_says_so_in_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_verify, "read_driver", lambda: Driver(problem="no driver here"))
    assert gpu_verify.main(["--json", str(tmp_path / "rows.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert all(line.endswith("not run: no driver here") for line in lines[:-1])
    assert lines[-1].startswith(f"0 passed, 0 failed, {len(CHECKS)} not run")


def test_a_gpu_without_tensorrt_runs_what_needs_torch_and_triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_verify, "read_driver", lambda: Driver("580", "13.0", (Gpu("L4", 89, 58, 24 << 30),)))
    installed = {"torch", "triton"}
    monkeypatch.setattr(gpu_verify, "_importable", lambda module: module in installed)
    reasons = {check.name: gpu_verify.missing(check.needs, "tensorrt") for check in CHECKS}
    kernels = ("copy bandwidth", "skinny GEMM", "attention against reference", "KV write against reference")
    assert {name for name, reason in reasons.items() if not reason} == {*kernels, "sampling against CPU", "attention bandwidth"}
    assert reasons["cubins against JIT"] == "cuda.bindings is not installed"
    installed.add("cuda.bindings")
    assert gpu_verify.missing(CHECKS[-1].needs, "tensorrt") == "tensorrt is not installed"
    assert gpu_verify.missing(CHECKS[-1].needs, "tensorrt-rtx") == "tensorrt_rtx is not installed"
    assert gpu_verify.pick_target() == "tensorrt"
    installed.add("tensorrt_rtx")
    assert gpu_verify.pick_target() == "tensorrt-rtx"


def test_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_verify.main(["--only", "nonsense"])
    assert "--only 'nonsense' is in no check's name; they are copy bandwidth" in capsys.readouterr().err


def test_all_checks_together_are_allowed_less_than_a_thousand_seconds_and_name_functions_that_exist() -> None:
    pytest.importorskip("triton")
    for check in CHECKS:
        module, _, function = check.where.partition(":")
        source = (ROOT / "bench" / f"{module}.py").read_text()
        assert f"def {function}(" in source, check.where


def test_buckets_are_timed_on_a_paper_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB of weights and 32 bytes per cached token; time is faked: a millisecond at every look at the clock."""
    import gpu_engines

    monkeypatch.setattr(gpu_engines, "CACHED_TOKENS", 10)
    monkeypatch.setattr(gpu_engines, "STEPS", 4)
    rig = Rig(tmp_path)
    monkeypatch.setattr(rig.engine, "_sequence", lambda *arguments: None)  # the cache holds nothing
    ticks = iter(range(1, 10**6))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks) * 1000)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-3)
    executor, manifest = rig.executor(), make_manifest()
    launched = rig.gpu.calls.count("cudaGraphLaunch")
    rows = gpu_engines.time_buckets(executor, manifest, ceiling=1.0)
    assert [row["bucket"] for row in rows] == [1, 2, 4, 8]
    # between the two looks at the outer clock lie 2 × 4 at the inner one: 9 ms for 4 steps, of 1 µs in submit each
    assert rows[1]["ms"] == pytest.approx(9 / 4) and rows[1]["host_us"] == pytest.approx(1)
    moved = manifest.weight_bytes + 2 * 10 * manifest.kv_cache.bytes_per_token
    assert rows[1]["share"] == pytest.approx(moved / (9 / 4) / 1e6)
    assert rig.gpu.calls.count("cudaGraphLaunch") - launched == 4 * (1 + 1 + 4)
    step = gpu_engines.decode_step(3, 4)
    assert step.slot_mapping.tolist() == [10, 22, 34] and step.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


INTERPRETED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import gpu_attention, gpu_write_sample
from gpu_verify import Context
context = Context("cpu", "tensorrt", "tiny-llama", Path("."), {})
for check in (gpu_attention.attention_correct, gpu_write_sample.write_correct, gpu_write_sample.sampling_correct):
    print(check(context)[0])
right = gpu_attention.wanted
gpu_attention.wanted = lambda case, data: 1.01 * right(case, data)
try:
    gpu_attention.attention_correct(context)
except AssertionError as error:
    print("caught", error)
"""


@pytest.mark.slow
def test_kernel_checks_run_in_the_interpreter_and_find_an_error_of_a_percent() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    attention, write, sampling, caught = run.stdout.splitlines()
    assert attention.startswith("3 cases") and write.startswith("fp16, int8") and sampling.startswith("argmax of 24 rows")
    assert caught.startswith("caught Case(") and "relative error" in caught


def test_context_is_small_off_the_gpu() -> None:
    assert Context("cpu", "t", "m", Path("."), {}).small and not Context("cuda", "t", "m", Path("."), {}).small
    assert issubclass(NotRun, Exception)
