"""What a target hands back to the build: the same for every target, so that the build does not ask which one it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.quantize import QuantizationReport
from runtime.contract import KVSpec, Manifest
from runtime.executors.base import Executor


@dataclass(frozen=True)
class Compiled:
    quantization: QuantizationReport
    plan: dict[str, str]  # role → path inside the bundle
    kv_cache: KVSpec
    libraries: dict[str, str]
    weight_bytes: int
    activations: str
    details: dict[str, Any]
    runtime_types: dict[str, int]
    compile_ms: float
    executor: Callable[[Manifest, int], Executor]  # (manifest, context tokens) → what accuracy is measured on
    graph: Path  # what the reference executor runs of it; there when `executor` was called
    wider: tuple[str, ...] | None = None  # what --fallback raises a layer to, in turn; None: as the scheme has it
    emulated: bool = False  # arithmetic stands in for hardware this target lacks
    manifest: dict[str, Any] = field(default_factory=dict)  # fields of Manifest that only this target fills
    report: dict[str, Any] = field(default_factory=dict)  # sections of report.json beside "compiled"
