"""8-bit weights with scales beside them, as compressed-tensors and ModelOpt store them alike: int8 or E4M3 q, weight = q · scale.

A scale is one number, one per output, one per group of inputs, or one per block of outputs and inputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from builder.quantized.grid import Grid
from builder.quantized.layout import Format, Headers, Layer, Tensors, damaged, grouped

Block = tuple[int, int]


def check_scale(
    fmt: Format, layer: str, name: str, headers: Headers | Tensors, weight: tuple[int, int], block: Block | None
) -> None:
    """`name` must be a scale of a weight [out, in]."""
    shape, (out, width) = tuple(headers[name].shape), weight
    sizes = [size for size in shape if size != 1]
    if not sizes or sizes == [out]:
        return
    if block is not None and _squeezed(shape) == (-(-out // block[0]), -(-width // block[1])):
        return
    if block is None and len(shape) == 2 and shape[0] == out and width % shape[1] == 0:
        return
    wanted = f"[1], [{out}, 1] or [{out}, groups of {width}]" if block is None else f"blocks of {block[0]} by {block[1]}"
    damaged(fmt, f"{layer}.{name}", f"has the shape {list(shape)} but its weight [{out}, {width}] needs {wanted}")


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def read_scaled(
    q: npt.NDArray,
    scale: npt.NDArray,
    zero: npt.NDArray | None,
    block: Block | None,
    *,
    is_float: bool,
    input_scale: float | None,
) -> Layer:
    """Of q [out, in], E4M3 as float32 or int8; shapes as `check_scale` lets them through."""
    out, width = q.shape
    scale = scale.astype(np.float32)
    if scale.size == 1 or scale.size == out:
        column = np.broadcast_to(scale.reshape(-1, 1), (out, 1))
        zeros = None if zero is None else np.broadcast_to(zero.reshape(-1, 1), (out, 1))
        if not is_float:
            return grouped(q, column, zeros, 8, input_scale)
        return Layer(q.astype(np.float32) * column, Grid("fp8", np.ascontiguousarray(column[:, 0]), input_scale=input_scale))
    if block is None:
        if not is_float:
            return grouped(q, scale, zero, 8, input_scale)
        return Layer(q.astype(np.float32) * scale.repeat(width // scale.shape[1], axis=1), reason="it has E4M3 scales by group")
    spread = scale.reshape(_squeezed(scale.shape)).repeat(block[0], axis=0)[:out].repeat(block[1], axis=1)[:, :width]
    return Layer(q.astype(np.float32) * spread, reason=f"it has scales by blocks of {block[0]} by {block[1]}")


def input_scale(tensors: Tensors) -> float | None:
    """One static, symmetric scale for the layer's input. One that is not positive was never calibrated: None."""
    scale, zero = tensors.get("input_scale"), tensors.get("input_zero_point")
    if scale is None or scale.size != 1 or (zero is not None and zero.any()):
        return None
    value = float(scale.reshape(-1)[0])
    return value if 0 < value < float("inf") else None
