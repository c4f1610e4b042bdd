"""E4M3 weights: one scale per output channel, its extreme on 448."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize.weight_only import Quantized

E4M3_MAX = np.float32(448)


def quantize(weight: npt.NDArray[np.float32]) -> Quantized:
    """Of `weight` [out, in]."""
    scale = scales(weight)
    return Quantized(ir.Tensor(to_e4m3(weight / scale[:, None])), scale, 0)


def scales(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[out]"""
    extreme = np.abs(weight).max(axis=1)
    return np.where(extreme == 0, np.float32(1), extreme / E4M3_MAX).astype(np.float32)


def to_e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray:
    """To nearest even; beyond ±448 to ±448, NaN to NaN."""
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
