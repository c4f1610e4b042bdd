"""GPTQ: round a weight column by column, and move each column's rounding error onto the columns not rounded yet.

With H = mean of x xᵀ over calibration text, a weight error e costs e H eᵀ of the layer's squared output. After column j is
rounded, the remaining columns change by -error_j · U[j, j+1:] / U[j, j], where U is the upper Cholesky factor of H⁻¹: the change
that minimizes the error left. Columns run from the largest diagonal of H down (those that matter most are rounded while every
other can still compensate); the groups of a scale stay as they lie in memory, so kernels see an ordinary grouped weight.

Scale     of a group, before any rounding: its range, shrunk to no less than 0.6, with the least error weighted by H's diagonal
Zero      a zero point per group where the kernel has one: 9 % less error in groups of 64, 15 % in groups of 32 (SmolLM2)
Damping   `DAMPING` of H's mean diagonal is added to it; a column that was never fed keeps its plain rounding
Shapes    weight [out, in], hessian [in, in]; scale [out, in / group_size]
Source    Frantar et al., arXiv:2210.17323
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize import fp8
from builder.quantize.weight_only import Quantized

Array = npt.NDArray[np.float32]
DAMPING = 0.01
_BLOCK = 64  # columns whose updates to the rest are applied together
_SHRINK = np.linspace(1.0, 0.6, 17, dtype=np.float32)


def int4(weight: Array, hessian: npt.ArrayLike, group_size: int, *, symmetric: bool = False) -> Quantized:
    """Of `weight`; `group_size` divides its width. `symmetric` for kernels that know no zero point."""
    rows, width = weight.shape
    hessian = np.asarray(hessian, np.float32)
    assert hessian.shape == (width, width) and width % group_size == 0, (hessian.shape, weight.shape, group_size)
    diagonal = np.ascontiguousarray(np.diag(hessian))
    scale, zero = group_scales(weight, diagonal, group_size, symmetric=symmetric)
    order = np.argsort(-diagonal, kind="stable")
    first = -8 if symmetric else 0
    scales, zeros = scale.T[order // group_size], zero.T[order // group_size]  # [in, out]

    def to_grid(column: int, values: Array) -> tuple[Array, Array]:
        levels = np.clip(np.rint(values / scales[column]) + zeros[column], first, first + 15)
        return levels, (levels - zeros[column]) * scales[column]

    q = np.empty((rows, width), np.float32)
    q[:, order] = _round(weight[:, order].copy(), _factor(hessian[np.ix_(order, order)]), to_grid)
    if symmetric:
        return Quantized(ir.Tensor(q.astype(ml_dtypes.int4), dtype=ir.DataType.INT4), scale, group_size)
    stored = ir.Tensor(q.astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4)
    return Quantized(stored, scale, group_size, ir.Tensor(zero.astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4))


def e4m3(weight: Array, hessian: npt.ArrayLike) -> Quantized:
    """Of `weight`, one scale per output channel."""
    hessian = np.asarray(hessian, np.float32)
    order = np.argsort(-np.diag(hessian), kind="stable")
    scale = fp8.scales(weight)

    def to_grid(_: int, values: Array) -> tuple[Array, Array]:
        levels = fp8.to_e4m3(values / scale).astype(np.float32)
        return levels, levels * scale

    q = np.empty_like(weight)
    q[:, order] = _round(weight[:, order].copy(), _factor(hessian[np.ix_(order, order)]), to_grid)
    return Quantized(ir.Tensor(fp8.to_e4m3(q)), scale, 0)


def group_scales(weight: Array, importance: Array, group_size: int, *, symmetric: bool = False) -> tuple[Array, Array]:
    """Scales and zero points, [out, groups]. Symmetric: a group's extreme, whatever its sign, on -8; else its range on 0 … 15."""
    rows = len(weight)
    groups = weight.reshape(rows, -1, group_size)
    cost = np.maximum(importance, importance.mean() * 1e-4).reshape(1, -1, group_size)
    if symmetric:
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)[..., 0]
        full, low = extreme / np.float32(-8), np.zeros_like(extreme)
    else:
        low = np.minimum(groups.min(2), 0)
        full = (np.maximum(groups.max(2), 0) - low) / np.float32(15)
    full = np.where(full == 0, np.float32(1), full).astype(np.float32)
    zero = np.clip(np.rint(-low / full), 0, 15)
    first, last = (-8, 7) if symmetric else (0, 15)
    best, least = full, np.full(full.shape, np.inf, np.float32)
    for shrink in _SHRINK:
        scale = full * shrink
        levels = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], first, last) - zero[..., None]
        error = (np.square(levels * scale[..., None] - groups) * cost).sum(-1)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return np.ascontiguousarray(best, np.float32), zero.astype(np.float32)


def _factor(hessian: Array) -> Array:
    """Upper Cholesky factor of the damped inverse."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped).copy()
    diagonal[diagonal == 0] = 1.0
    np.fill_diagonal(damped, diagonal + DAMPING * diagonal.mean())
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


def _round(weight: Array, factor: Array, to_grid: Callable[[int, Array], tuple[Array, Array]]) -> Array:
    """What is stored of `weight` [out, in], which is used up.

    to_grid   (column, values [out]) → (what is stored, the values that stands for)
    """
    width = weight.shape[1]
    q = np.empty_like(weight)
    for begin in range(0, width, _BLOCK):
        end = min(begin + _BLOCK, width)
        block = np.ascontiguousarray(weight[:, begin:end].T)  # [columns, out]
        errors = np.empty_like(block)
        for index in range(end - begin):
            column = begin + index
            q[:, column], near = to_grid(column, block[index])
            errors[index] = (block[index] - near) / factor[column, column]
            block[index + 1 :] -= np.outer(factor[column, column + 1 : end], errors[index])
        weight[:, end:] -= errors.T @ factor[begin:end, end:]
    return q
