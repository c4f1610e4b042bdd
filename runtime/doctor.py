"""`runtime doctor`: what is on this machine, and what of Forgeline will work on it. Needs nothing and fails on nothing.

found          driver, GPUs, libraries with their versions
will work      one line per target and task: yes, build only, or no, with the reason and what to do about it
engine         with ENGINE: whether that engine loads here, in the words that loading would use
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runtime import __version__
from runtime.driver import Gpu
from runtime.errors import ForgelineError
from runtime.inventory import Machine, read_machine

YES, BUILD_ONLY, NO = "yes", "build only", "no"
RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)  # what TensorRT-RTX builds for and runs on


@dataclass(frozen=True)
class Verdict:
    what: str
    works: str  # YES, BUILD_ONLY, NO
    why: str = ""


@dataclass(frozen=True)
class Report:
    machine: Machine
    verdicts: list[Verdict] = field(default_factory=list)
    engine: Verdict | None = None

    def to_json(self) -> str:
        return json.dumps({"forgeline": __version__, **dataclasses.asdict(self)}, indent=2)


# ------------------------------------------------------------------------------------------------------------ will work


def judge(machine: Machine) -> list[Verdict]:
    gpu = max(machine.driver.gpus, key=lambda each: each.memory_bytes, default=None)
    return [
        _needs(machine, "run engines of target cpu", "openvino", "numpy", "tokenizers"),
        _needs(machine, "build engines (target cpu)", "torch", "transformers", "onnx", "openvino", "onnxruntime"),
        _tensorrt(machine, gpu),
        _tensorrt_rtx(machine, gpu),
        _kernels(machine, gpu),
        _fp8(gpu),
        Verdict("serve through Triton", YES if machine.has_server else NO, machine.server),
    ]


def _needs(machine: Machine, what: str, *libraries: str) -> Verdict:
    return Verdict(what, NO, machine.missing(*libraries)) if not machine.has(*libraries) else Verdict(what, YES)


def _no_gpu(machine: Machine) -> str:
    return machine.driver.problem or "the driver reports no GPU"


def _tensorrt(machine: Machine, gpu: Gpu | None) -> Verdict:
    what = "target tensorrt"
    if not machine.has("tensorrt", "cuda-python"):
        return Verdict(what, NO, machine.missing("tensorrt", "cuda-python"))
    if gpu is None:
        return Verdict(what, NO, f"it builds and runs on a GPU only; {_no_gpu(machine)}")
    if gpu.capability < 75:
        return Verdict(what, NO, f"{gpu.name} is sm{gpu.capability}; TensorRT 11 needs sm75 or newer")
    return Verdict(what, YES, f"{gpu.name}, sm{gpu.capability}")


def _tensorrt_rtx(machine: Machine, gpu: Gpu | None) -> Verdict:
    what = "target tensorrt-rtx"
    if not machine.has("tensorrt_rtx"):
        return Verdict(what, NO, machine.missing("tensorrt_rtx"))
    if gpu is None:
        return Verdict(what, BUILD_ONLY, _no_gpu(machine))
    if gpu.capability not in RTX_CAPABILITIES:
        known = ", ".join(f"sm{each}" for each in RTX_CAPABILITIES)
        return Verdict(what, BUILD_ONLY, f"{gpu.name} is sm{gpu.capability}, not one of {known}; use target tensorrt")
    if not machine.has("cuda-python"):
        return Verdict(what, BUILD_ONLY, machine.missing("cuda-python"))
    return Verdict(what, YES, f"{gpu.name}, sm{gpu.capability}")


def _kernels(machine: Machine, gpu: Gpu | None) -> Verdict:
    from plugins.paged_attention.cubins import arch_for

    what = "attention kernels"
    if gpu is None:
        works = BUILD_ONLY if machine.has("triton (kernel compiler)") else NO
        return Verdict(what, works, f"{_no_gpu(machine)}" + ("; they can be compiled here" if works == BUILD_ONLY else ""))
    try:
        return Verdict(what, YES, f"those for sm{arch_for(gpu.capability)}")
    except ValueError as error:
        return Verdict(what, NO, str(error))


def _fp8(gpu: Gpu | None) -> Verdict:
    what = "FP8 arithmetic"
    if gpu is None:
        return Verdict(what, NO, "no GPU; target cpu emulates it, to judge accuracy")
    if gpu.capability < 89:
        return Verdict(what, NO, f"{gpu.name} is sm{gpu.capability} and FP8 needs sm89; FP8 KV caches work, int8 and int4 too")
    return Verdict(what, YES, f"{gpu.name}, sm{gpu.capability}")


def judge_engine(engine: Path) -> Verdict:
    """Everything loading checks before it reads weights."""
    from runtime.contract import check_library, load_manifest

    what = f"engine {engine}"
    try:
        manifest = load_manifest(engine)
        if manifest.target == "cpu":
            from plugins.paged_attention import openvino

            check_library(manifest, openvino.LIBRARY, openvino.library_version())
        else:
            from runtime.executors import kv_cache_free_bytes

            kv_cache_free_bytes(manifest)
    except (ForgelineError, ImportError) as error:
        return Verdict(what, NO, str(error))
    return Verdict(what, YES, f"{manifest.model.name}, {manifest.precision.name}, target {manifest.target}")


# ---------------------------------------------------------------------------------------------------------------- shown


def render(report: Report) -> str:
    machine = report.machine
    driver = machine.driver
    rows = [
        ("forgeline", __version__),
        ("python", f"{machine.python}, {machine.system}"),
        ("cpu", f"{machine.cpu}, {machine.num_cpus} usable; {' '.join(machine.cpu_features) or 'no vector extensions found'}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("NVIDIA driver", ", CUDA ".join(filter(None, (driver.version, driver.cuda))) or driver.problem),
    ]
    for gpu in driver.gpus:
        rows.append(("gpu", f"{gpu.name}, sm{gpu.capability}, {gpu.num_sms} SMs, {gpu.memory_bytes / 2**30:.1f} GiB"))
    for name, library in machine.libraries.items():
        rows.append((name, " — ".join(filter(None, (library.version or "not installed", library.problem)))))
    rows.append(("tritonserver", machine.server))
    verdicts = [(each.what, f"{each.works:<10}  {each.why}".rstrip()) for each in (*report.verdicts, report.engine) if each]
    width = max(len(name) for name, _ in (*rows, *verdicts))
    lines = ["found", *(f"  {name:<{width}}  {text}" for name, text in rows), "", "will work"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in verdicts)])


def doctor(engine: Path | None = None, *, as_json: bool = False, read: Callable[[], Machine] = read_machine) -> int:
    """Print the report. 1 when `engine` was given and does not load here, else 0."""
    machine = read()
    report = Report(machine, judge(machine), judge_engine(engine) if engine else None)
    print(report.to_json() if as_json else render(report))
    return 1 if report.engine and report.engine.works != YES else 0
