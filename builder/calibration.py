"""What quantization needs to know of a model's activations and KV cache: collected once per model, text and need, then cached.

Cached     ranges, histograms and samples, by hash of graph, tokens and tensors; second moments (width² floats each) are not
Raises     BuildError as builder.observe and builder.calibration_data do
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from builder.calibrate import calibrate
from builder.calibration_data import CalibrationSet
from builder.config import code_sha256
from builder.observe import Progress, TensorStats, observe
from runtime.contract import cache_root

_CODE = ("builder/observe.py", "builder/segments.py", "builder/calibrate.py", "builder/calibration.py")
_KV_TOKENS = 4096
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Calibration:
    stats: dict[str, TensorStats] = field(default_factory=dict)  # layer input → statistics
    kv_amax: dict[str, Array] = field(default_factory=dict)  # keys or values → largest magnitude per head
    sha256: str = ""  # of the tokens; empty when nothing was run


def collect(
    canonical: Path,
    data: CalibrationSet,
    tensors: Sequence[str],
    kv_tensors: Mapping[str, int],
    *,
    model_key: str = "",
    hessians: bool = False,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """`canonical` is the model.onnx; `model_key` names its content, and is empty for "do not cache"."""
    if not tensors and not kv_tensors:
        return Calibration()
    place = None if hessians or not model_key else _place(model_key, data, tensors, kv_tensors)
    if place is not None and (found := _load(place)) is not None:
        return found
    stats = {}
    if tensors:
        stats = observe(canonical, data.windows, tensors, hessians=hessians, num_threads=num_threads, progress=progress)
    kv_amax: dict[str, Array] = {}
    if kv_tensors:
        tokens = [token for window in data.windows for token in window][:_KV_TOKENS]
        kv_amax = calibrate(canonical, tokens, kv_tensors, num_threads=num_threads)
    found = Calibration(stats, kv_amax, data.sha256)
    if place is not None:
        _save(place, found)
    return found


def _place(model_key: str, data: CalibrationSet, tensors: Sequence[str], kv_tensors: Mapping[str, int]) -> Path:
    parts = [model_key, data.sha256, list(tensors), sorted(kv_tensors), code_sha256(*_CODE)]
    return cache_root() / "calibration" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.npz"


_FIELDS = ("channel_amax", "histogram", "sample")


def _save(place: Path, found: Calibration) -> None:
    """Atomic: a reader sees a whole file or none."""
    arrays: dict[str, npt.NDArray] = {f"kv/{name}": amax for name, amax in found.kv_amax.items()}
    for name, stats in found.stats.items():
        arrays.update({f"{part}/{name}": getattr(stats, part) for part in _FIELDS})
        arrays[f"numbers/{name}"] = np.array([stats.limit, stats.num_rows], np.float64)
    arrays["sha256"] = np.array(found.sha256)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".npz", delete=False) as file:
        np.savez(file, **arrays)
    os.replace(file.name, place)


def _load(place: Path) -> Calibration | None:
    try:
        return _read(place)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # not there, or damaged
        return None


def _read(place: Path) -> Calibration:
    with open(place, "rb") as file, np.load(file) as arrays:
        kv_amax = {name[3:]: arrays[name] for name in arrays.files if name.startswith("kv/")}
        stats = {}
        for name in (each[len("numbers/") :] for each in arrays.files if each.startswith("numbers/")):
            limit, num_rows = arrays[f"numbers/{name}"]
            stats[name] = TensorStats(
                **{part: arrays[f"{part}/{name}"] for part in _FIELDS}, limit=float(limit), num_rows=int(num_rows)
            )
        return Calibration(stats, kv_amax, str(arrays["sha256"]))
