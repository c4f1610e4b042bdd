"""`runtime doctor` on machines made up here, on this one, and in a Python that has nothing installed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.doctor import BUILD_ONLY, NO, YES, doctor, judge
from runtime.driver import Driver, Gpu, read_driver
from runtime.inventory import LIBRARIES, Library, Machine, read_library

ROOT = Path(__file__).resolve().parent.parent.parent
ADA, HOPPER = Gpu("L4", 89, 58, 24 << 30), Gpu("H100", 90, 132, 80 << 30)
AMPERE, PASCAL = Gpu("A10", 86, 72, 24 << 30), Gpu("P4", 61, 20, 8 << 30)
NO_DRIVER = Driver(problem="no driver")


def machine(driver: Driver = NO_DRIVER, *, absent: tuple[str, ...] = (), broken: str = "") -> Machine:
    libraries = {name: Library("" if name in absent else "1.0") for name in LIBRARIES}
    if broken:
        libraries[broken] = Library("1.0", "cannot be imported (why)")
    return Machine("3.11", "Linux", "CPU", ("avx2",), 2, 8 << 30, driver, libraries, "/usr/bin/tritonserver", True)


def verdicts(given: Machine) -> dict[str, str]:
    return {verdict.what: verdict.works for verdict in judge(given)}


def why(given: Machine, what: str) -> str:
    return next(verdict.why for verdict in judge(given) if verdict.what == what)


EVERYWHERE = {"run engines of target cpu": YES, "build engines (target cpu)": YES, "serve through Triton": YES}


@pytest.mark.parametrize(
    "gpu, tensorrt, rtx, kernels, fp8",
    [
        (None, NO, BUILD_ONLY, BUILD_ONLY, NO),
        (ADA, YES, YES, YES, YES),
        (HOPPER, YES, BUILD_ONLY, YES, YES),  # TensorRT-RTX has no sm90
        (AMPERE, YES, YES, YES, NO),
        (PASCAL, NO, BUILD_ONLY, NO, NO),
    ],
)
def test_what_works_depends_on_the_gpu(gpu: Gpu | None, tensorrt: str, rtx: str, kernels: str, fp8: str) -> None:
    given = machine(Driver("580.1", "13.0", (gpu,)) if gpu else NO_DRIVER)
    expected = {"target tensorrt": tensorrt, "target tensorrt-rtx": rtx, "attention kernels": kernels, "FP8 arithmetic": fp8}
    assert verdicts(given) == {**EVERYWHERE, **expected}


def test_the_reason_names_what_is_missing_or_broken() -> None:
    bare = machine(absent=tuple(LIBRARIES))
    assert set(verdicts(bare).values()) == {NO, YES} and verdicts(bare)["serve through Triton"] == YES
    assert why(bare, "run engines of target cpu") == "openvino: not installed; numpy: not installed; tokenizers: not installed"
    assert why(machine(broken="openvino"), "run engines of target cpu") == "openvino: cannot be imported (why)"
    gpu = Driver("580.1", "13.0", (ADA,))
    assert why(machine(gpu, absent=("cuda-python",)), "target tensorrt") == "cuda-python: not installed"
    assert verdicts(machine(gpu, absent=("cuda-python",)))["target tensorrt-rtx"] == BUILD_ONLY
    assert "no driver" in why(machine(), "target tensorrt")


def test_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = machine(Driver("580.1", "13.0", (ADA,)), absent=("torch",))
    assert doctor(read=lambda: given) == 0
    lines = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    table = dict(pair for pair in lines if len(pair) == 2)
    assert table["NVIDIA driver"] == "580.1, CUDA 13.0"
    assert table["gpu"] == "L4, sm89, 58 SMs, 24.0 GiB"
    assert table["torch"] == "not installed"
    assert doctor(tmp_path / "none", as_json=True, read=lambda: given) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["driver"]["gpus"] == [dataclasses.asdict(ADA)]
    assert report["engine"]["works"] == NO and "is not an engine" in report["engine"]["why"]


def test_an_engine_that_loads_and_one_that_does_not(tiny_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tiny_engine("fp32")
    assert doctor(engine, read=machine) == 0
    assert "tiny-llama, fp32, target cpu" in capsys.readouterr().out
    data = json.loads((engine / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**data, "checksums": {}, "libraries": {"openvino": "2020.1"}}))
    assert doctor(tmp_path, read=machine) == 1
    assert "built with openvino 2020.1 but" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- driver


class FakeDriverLibrary:
    """libcuda.so.1 with some GPUs, or with a call that fails."""

    def __init__(self, *gpus: Gpu, fails: dict[str, int] | None = None) -> None:
        self.gpus = gpus
        self.fails = fails or {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.fails:
                return self.fails[name]
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = 13010
            elif name == "cuDeviceGetCount":
                arguments[0]._obj.value = len(self.gpus)
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = arguments[1]
            elif name == "cuDeviceGetName":
                arguments[0].value = self.gpus[arguments[2]].name.encode()
            elif name == "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = self.gpus[arguments[1]].memory_bytes
            elif name == "cuDeviceGetAttribute":
                gpu = self.gpus[arguments[2]]
                arguments[0]._obj.value = {75: gpu.capability // 10, 76: gpu.capability % 10, 16: gpu.num_sms}[arguments[1]]
            else:
                assert name == "cuInit", name
            return 0

        return call


def test_driver_is_read_through_its_c_library(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n")
    assert read_driver(lambda _: FakeDriverLibrary(ADA, HOPPER), file) == Driver("580.95.05", "13.1", (ADA, HOPPER))


@pytest.mark.parametrize(
    "fails, problem",
    [
        ({"cuInit": 100}, "cuInit failed with CUDA error 100: no GPU is visible"),
        ({"cuDeviceTotalMem_v2": 5}, "cuDeviceTotalMem_v2 failed with CUDA error 5"),
    ],
)
def test_a_driver_that_does_not_answer(fails: dict[str, int], problem: str, tmp_path: Path) -> None:
    assert read_driver(lambda _: FakeDriverLibrary(ADA, fails=fails), tmp_path / "none") == Driver("", "13.1", (), problem)


def test_no_driver(tmp_path: Path) -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert read_driver(load, tmp_path / "none").problem == "libcuda.so.1 is not on this machine: no NVIDIA driver is installed"


def test_a_library_that_fails_when_imported_is_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no such device')\n")
    (tmp_path / "lacks.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_library("breaks", ("pytest",)).problem == "fails when imported (RuntimeError: no such device)"
    assert not read_library("breaks", ("no-such-distribution",)).usable
    assert read_library("lacks", ("no-such-distribution",)) == Library()
    assert "a_module_that_is_not_there" in read_library("lacks", ("pytest",)).problem
    assert read_library("", ("pytest",)).usable


def test_it_works_in_a_python_with_nothing_installed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-m", "runtime.cli", "doctor", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert {library["version"] for library in report["machine"]["libraries"].values()} == {""}
    assert [verdict["works"] for verdict in report["verdicts"][:4]] == [NO] * 4
