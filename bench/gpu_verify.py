"""Does what was built without a GPU work on this one, and how fast? One table, under ten minutes.

    python bench/gpu_verify.py [--json FILE] [--only TEXT] [--seconds 580] [--target tensorrt|tensorrt-rtx] [--model MODEL]
    python bench/gpu_verify.py --interpret      the kernel checks on a CPU, tiny, in Triton's interpreter: a test of this script

Every check runs in a process of its own, with a time limit: a kernel that faults or hangs takes its check down and nothing else.
Checks that need only torch and Triton run where TensorRT is not installed. What cannot run says why.

Status   0 nothing failed (all passed, or did not run); 1 something failed; the JSON has every figure and reason
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from runtime.driver import read_driver  # noqa: E402

PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"


class NotRun(Exception):
    """The check found that it cannot run here; the message says why."""


@dataclass(frozen=True)
class Check:
    name: str
    where: str  # module:function
    needs: tuple[str, ...]
    limit_s: int
    interpreted: bool = False  # also runs in Triton's interpreter


@dataclass
class Row:
    name: str
    status: str
    detail: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What a check is given: `figures` of the checks before it, a directory that all of them share."""

    device: str  # cuda, cpu
    target: str
    model: str
    work: Path
    figures: dict[str, dict[str, Any]]

    @property
    def small(self) -> bool:
        return self.device == "cpu"


_KERNELS = ("gpu", "torch", "triton")
_ENGINES = ("gpu", "cuda-python", "library", "torch", "openvino")
CHECKS = (
    Check("copy bandwidth", "gpu_bandwidth:copy_bandwidth", ("gpu", "torch"), 60),
    Check("skinny GEMM", "gpu_bandwidth:skinny_gemm", ("gpu", "torch"), 60),
    Check("attention against reference", "gpu_attention:attention_correct", _KERNELS, 200, interpreted=True),
    Check("KV write against reference", "gpu_write_sample:write_correct", _KERNELS, 60, interpreted=True),
    Check("sampling against CPU", "gpu_write_sample:sampling_correct", _KERNELS, 60, interpreted=True),
    Check("cubins against JIT", "gpu_cubins:cubins_match_jit", (*_KERNELS, "cuda-python"), 120),
    Check("attention bandwidth", "gpu_bandwidth:attention_bandwidth", _KERNELS, 100),
    Check("engine build", "gpu_engines:build_engines", _ENGINES, 240),
    Check("engine load", "gpu_engines:load_engine", _ENGINES, 90),
    Check("greedy equality with CPU", "gpu_engines:greedy_equality", _ENGINES, 90),
    Check("graph replay", "gpu_engines:graph_replay", _ENGINES, 90),
)


def missing(needs: Sequence[str], target: str) -> str:
    """Why a check that needs these cannot run here; empty when it can."""
    modules = {
        "torch": "torch",
        "triton": "triton",
        "openvino": "openvino",
        "cuda-python": "cuda.bindings",
        "library": "tensorrt_rtx" if target == "tensorrt-rtx" else "tensorrt",
    }
    for need in needs:
        if need == "gpu":
            driver = read_driver()
            if not driver.gpus:
                return driver.problem or "the driver reports no GPU"
        elif not _importable(modules[need]):
            return f"{modules[need]} is not installed"
    return ""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def pick_target() -> str:
    return "tensorrt" if _importable("tensorrt") or not _importable("tensorrt_rtx") else "tensorrt-rtx"


# -------------------------------------------------------------------------------------------------------------- one check


def run_here(check: Check, context: Context) -> Row:
    """In this process. A check returns (detail, figures), raises AssertionError when it finds something wrong."""
    started = time.perf_counter()
    try:
        module, _, function = check.where.partition(":")
        detail, figures = getattr(importlib.import_module(module), function)(context)
        row = Row(check.name, PASS, detail, figures=figures)
    except NotRun as reason:
        row = Row(check.name, NOT_RUN, str(reason))
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        row = Row(check.name, FAIL, kind + text.splitlines()[0])
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def run_apart(check: Check, context: Context, limit_s: float, *, interpret: bool = False) -> Row:
    """In a process of its own."""
    started = time.perf_counter()
    result = context.work / "row.json"
    result.unlink(missing_ok=True)
    request = context.work / "request.json"
    request.write_text(json.dumps({"check": check.name, **asdict(context), "work": str(context.work)}))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(Path(__file__)), "--child", str(request), "--result", str(result)]
    try:
        child = subprocess.run(command, env=environment, timeout=limit_s, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return Row(check.name, FAIL, f"did not end within {limit_s:.0f} s", round(time.perf_counter() - started, 1))
    if not result.is_file():
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return Row(
            check.name, FAIL, f"its process ended with {child.returncode}: {last}", round(time.perf_counter() - started, 1)
        )
    return Row(**json.loads(result.read_text()))


def child(request: Path, result: Path) -> int:
    given = json.loads(request.read_text())
    name, work = given.pop("check"), Path(given.pop("work"))
    check = next(check for check in CHECKS if check.name == name)
    row = run_here(check, Context(**given, work=work))
    result.write_text(json.dumps(asdict(row)))
    return 0


# -------------------------------------------------------------------------------------------------------------- the table


def run_all(checks: Sequence[Check], *, target: str, model: str, seconds: float, interpret: bool, show: bool = True) -> list[Row]:
    deadline = time.monotonic() + seconds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gpu-verify-") as work:
        for check in checks:
            left = deadline - time.monotonic()
            reason = missing([need for need in check.needs if not (interpret and need == "gpu")], target)
            if interpret and not check.interpreted:
                reason = "it measures a GPU, or needs one"
            if reason:
                row = Row(check.name, NOT_RUN, reason)
            elif left < 5:
                row = Row(check.name, NOT_RUN, f"the {seconds:.0f} seconds are over; see --seconds and --only")
            else:
                figures = {row.name: row.figures for row in rows if row.status == PASS}
                context = Context("cpu" if interpret else "cuda", target, model, Path(work), figures)
                row = run_apart(check, context, min(check.limit_s, left), interpret=interpret)
            rows.append(row)
            if show:
                print(line(row), flush=True)
    return rows


def line(row: Row) -> str:
    width = max(len(check.name) for check in CHECKS)
    colon = ": " if row.status == NOT_RUN else "  "
    return f"{row.name:<{width}}  {row.status}{colon}{row.detail}" + (f"  ({row.seconds:.0f} s)" if row.seconds >= 1 else "")


def summary(rows: Sequence[Row]) -> str:
    counts = {status: sum(row.status == status for row in rows) for status in (PASS, FAIL, NOT_RUN)}
    return f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[NOT_RUN]} not run"


def report(rows: Sequence[Row], target: str, *, interpret: bool) -> dict[str, Any]:
    driver = read_driver()
    return {
        "benchmark": "gpu_verify",
        "interpreted": interpret,
        "target": target,
        "python": platform.python_version(),
        "driver": asdict(driver),
        "rows": [asdict(row) for row in rows],
        "summary": summary(rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "bench" / "out" / "gpu_verify.json",
        help="all figures; default: bench/out/gpu_verify.json",
    )
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--seconds", type=float, default=580, help="for all checks together; default: 580")
    parser.add_argument(
        "--target",
        choices=("tensorrt", "tensorrt-rtx"),
        default=pick_target(),
        help="default: tensorrt, or tensorrt-rtx where only that is installed",
    )
    parser.add_argument("--model", default="tiny-llama", help="tiny-llama, or anything `builder build` takes")
    parser.add_argument("--interpret", action="store_true", help="kernel checks on the CPU, tiny")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return child(arguments.child, arguments.result)
    checks = [check for check in CHECKS if arguments.only.lower() in check.name.lower()]
    if not checks:
        parser.error(f"--only {arguments.only!r} is in no check's name; they are {', '.join(check.name for check in CHECKS)}")
    for gpu in read_driver().gpus:
        print(f"{gpu.name}, sm{gpu.capability}, {gpu.num_sms} SMs, {gpu.memory_bytes / 2**30:.0f} GiB; target {arguments.target}")
    rows = run_all(
        checks, target=arguments.target, model=arguments.model, seconds=arguments.seconds, interpret=arguments.interpret
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report(rows, arguments.target, interpret=arguments.interpret), indent=2) + "\n")
    print(f"{summary(rows)}; {arguments.json}")
    return 1 if any(row.status == FAIL for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
