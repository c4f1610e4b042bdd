"""Weights that a quantized checkpoint stored: kept on their own grid where the scheme has that grid, else rounded anew.

    int4   symmetric or with zero points, groups that nest in the checkpoint's; a scale per output suits any group
    int8   int8 or int4 values with one symmetric scale per output or per tensor
    fp8    E4M3 with one scale per output or per tensor

What is kept dequantizes to exactly the weight that the checkpoint means: it is compared, so that a weight that was changed since
(by SmoothQuant) is never mistaken for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize.activations import LIMITS
from builder.quantize.weight_only import Quantized
from builder.quantize.weights import Weight
from builder.quantized.grid import Grid, Origin

Array = npt.NDArray[np.float32]
_MIDDLE = 8  # of unsigned 4-bit integers


@dataclass
class CheckpointReport:
    """What became of the weights of a quantized checkpoint."""

    format: str = ""  # empty: it was not quantized
    num_weights: int = 0  # quantized ones in the checkpoint, merged ones counted once
    kept: dict[str, str] = field(default_factory=dict)  # weight → its type
    requantized: dict[str, str] = field(default_factory=dict)  # weight → why
    unquantized: list[str] = field(default_factory=list)  # left so because the checkpoint leaves them so

    @classmethod
    def of(cls, origin: Origin) -> CheckpointReport:
        return cls(origin.format, len(origin.grids) + len(origin.off_grid))

    def to_dict(self) -> dict[str, Any]:
        if not self.format:
            return {}
        return {
            "format": self.format,
            "num_weights": self.num_weights,
            "kept": len(self.kept),
            "requantized": dict(self.requantized),
            "dequantized": self.num_weights - len(self.kept) - len(self.requantized),
            "unquantized": list(self.unquantized),
        }


def from_checkpoint(
    origin: Origin, name: str, weight: Array, dtype: str, group_size: int | None, report: CheckpointReport, *, zeros: bool = True
) -> Quantized | None:
    """The weight `name` [out, in] as the checkpoint stored it, where the scheme can; `report` is told either way."""
    grid = origin.grids.get(name)
    if grid is None:
        if name in origin.off_grid:
            report.requantized[name] = origin.off_grid[name]
        return None
    found = keep(grid, weight, dtype, group_size, zeros=zeros)
    if isinstance(found, Quantized):
        report.kept[name] = dtype
        return found
    report.requantized[name] = found
    return None


def keep(grid: Grid, weight: Array, dtype: str, group_size: int | None, *, zeros: bool = True) -> Quantized | str:
    """`weight` [out, in] on `grid`, as a scheme's `dtype` and groups have it; else why not.

    `zeros`   has the kernel zero points?
    """
    if dtype == "int4":
        assert group_size is not None
        found = _int4(grid, weight, group_size, zeros)
    elif dtype == "int8":
        found = _int8(grid, weight)
    elif grid.dtype != "fp8":
        found = f"{grid.dtype} is not {dtype}"
    else:
        scale = _nonzero(grid.scale)
        q = np.clip(weight / scale[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
        found = Quantized(ir.Tensor(q), scale, 0)
    if isinstance(found, Quantized) and not np.array_equal(found.dense(), weight):
        return "its values were changed after it was read"
    return found


def is_excluded(origin: Origin, weight: Weight) -> bool:
    """Does the checkpoint, quantized elsewhere, leave this layer as it was?"""
    return weight.role in ("attention", "mlp") and weight.name in origin.dense


def stored_limits(origin: Origin, weights: Iterable[Weight], dtype: str) -> dict[ir.Value, float]:
    """Tensors for which every layer that reads them has a static input scale of `dtype` in the checkpoint, as a magnitude."""
    scales: dict[ir.Value, list[float]] = {}
    for weight in weights:
        grid = origin.grids.get(weight.name)
        scale = grid.input_scale if grid is not None and grid.dtype == dtype else None
        for x in (use.node.inputs[0] for use in weight.uses if use.kind != "lookup"):
            assert x is not None
            scales.setdefault(x, []).append(math.nan if scale is None else scale)
    return {x: max(each) * LIMITS[dtype] for x, each in scales.items() if not any(math.isnan(scale) for scale in each)}


def _int4(grid: Grid, weight: Array, group_size: int, zeros: bool) -> Quantized | str:
    if grid.dtype != "int4":
        return f"{grid.dtype} is not int4"
    if grid.zero is not None and not zeros:
        return "it has zero points, which this target's kernels have not"
    nested = grid.repeated(group_size, weight.shape[1])
    if nested is None:
        return f"groups of {group_size} do not divide its groups of {grid.group_size}"
    scale, zero = np.ascontiguousarray(_nonzero(nested[0])), nested[1]
    q = np.rint(weight / scale.repeat(group_size, axis=1))
    if zero is None:
        return Quantized(ir.Tensor(np.clip(q, -8, 7).astype(ml_dtypes.int4), dtype=ir.DataType.INT4), scale, group_size)
    shifted = np.clip(q + zero.repeat(group_size, axis=1) + _MIDDLE, 0, 15)
    stored = ir.Tensor(shifted.astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4)
    return Quantized(stored, scale, group_size, ir.Tensor((zero + _MIDDLE).astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4))


def _int8(grid: Grid, weight: Array) -> Quantized | str:
    if grid.dtype not in ("int8", "int4"):
        return f"{grid.dtype} is not int8"
    if grid.group_size:
        return f"it has a scale per group of {grid.group_size}, not per output"
    if grid.zero is not None:
        return "it has zero points"
    scale = _nonzero(grid.scale)
    return Quantized(ir.Tensor(np.clip(np.rint(weight / scale[:, None]), -128, 127).astype(np.int8)), scale, 0)


def _nonzero(scale: Array) -> Array:
    return np.where(scale == 0, np.float32(1), scale).astype(np.float32, copy=False)
