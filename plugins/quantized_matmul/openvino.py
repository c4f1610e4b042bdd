"""QuantizedMatMul on the CPU: forgeline's own kernels, compiled into a library that OpenVINO loads as an extension.

`builder.targets.openvino` lowers quantized layers to forgeline::QuantizedMatMul; reading such a model packs each weight into the
order the kernels read (kernels.h) and makes the operation of extension.cpp. The weights in the file stay as ONNX has them.

Inputs   x, weight, scale; zero points (uint4) where the shape has them; norm where `normed` (x goes through an RMS norm of that
         weight first); residual where `added`
Shapes   x [..., width] f32   weight [outputs, width] int8, or int4 two in a byte   scale [outputs] or [outputs, groups] f32
         → [..., outputs], or [..., outputs / 2] when gated: silu(first half) * second half
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.op as ov_op
from openvino.frontend.onnx import ConversionExtension
from openvino.utils.node_factory import NodeFactory

from plugins.paged_attention.op import DOMAIN
from plugins.quantized_matmul.arena import Arena

LOWERED_OP = "QuantizedMatMul"
GROUPS = (128, 64, 32)  # columns under one sum that the kernels know


class Shape(ctypes.Structure):
    """kernels.h: Shape."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("input_group", ctypes.c_int32),
        ("zero_points", ctypes.c_bool),
        ("epsilon", ctypes.c_float),
        ("gated", ctypes.c_bool),
    )


class Library:
    """The compiled kernels, outside OpenVINO: packing, and multiplication for tests and tuning."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = ctypes.CDLL(os.fspath(path))
        self._library.forgeline_packed_bytes.restype = ctypes.c_size_t
        self._arena = Arena()

    def packed_bytes(self, shape: Shape) -> int:
        return int(self._library.forgeline_packed_bytes(ctypes.byref(shape)))

    def take(self, size: int) -> np.ndarray:
        """Memory for packed weights, uint8 [size]."""
        return self._arena.take(size)

    def pack(
        self,
        shape: Shape,
        weight: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None = None,
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """weight: int8 [outputs, width] or uint8 [outputs, width / 2]; scale f32 [outputs] or [outputs, n]; zero_point uint8 like
        the scale, where the shape has them → uint8 [bytes], which is `into` if given."""
        weight, scale = np.ascontiguousarray(weight), np.ascontiguousarray(scale, np.float32)
        assert weight.nbytes * 8 == shape.outputs * shape.width * shape.bits, f"{weight.shape} of {shape.bits} bits"
        packed = self.take(self.packed_bytes(shape)) if into is None else into
        assert packed.nbytes >= self.packed_bytes(shape)
        assert (zero_point is not None) == shape.zero_points and (zero_point is None or zero_point.size == scale.size)
        zeros = None if zero_point is None else np.ascontiguousarray(zero_point, np.uint8)
        per_row = ctypes.c_int64(scale.size // shape.outputs)
        self._library.forgeline_pack(
            ctypes.byref(shape), _pointer(weight), _pointer(scale), _pointer(zeros), per_row, _pointer(packed)
        )
        return packed

    def multiply(
        self, shape: Shape, packed: np.ndarray, x: np.ndarray, norm: np.ndarray | None = None, residual: np.ndarray | None = None
    ) -> np.ndarray:
        """x [rows, width] f32 → [rows, outputs] f32, or half of them when gated. norm [width], residual like the result."""
        x = np.ascontiguousarray(x, np.float32)
        y = np.empty((len(x), shape.outputs // 2 if shape.gated else shape.outputs), np.float32)
        further = [None if each is None else np.ascontiguousarray(each, np.float32) for each in (norm, residual)]
        rows = ctypes.c_int64(len(x))
        self._library.forgeline_multiply(
            ctypes.byref(shape), _pointer(packed), _pointer(x), *map(_pointer, further), rows, _pointer(y)
        )
        return y


def add_to(core: ov.Core, path: str | os.PathLike[str]) -> None:
    """Teach `core` to read and compile models with the lowered op, by the library at `path`."""
    library = Library(path)
    factory = NodeFactory()
    factory.add_extension(os.fspath(path))

    def convert(node: Any) -> list[ov.Output]:
        shape = {name: node.get_attribute(name) for name, _ in Shape._fields_}
        shape.update({name: bool(shape[name]) for name in ("gated", "zero_points")})
        flags = {name: bool(node.get_attribute(name)) for name in ("normed", "added")}
        begin = 3 + shape["zero_points"]
        packed = pack_constants(library, Shape(**shape), [node.get_input(index).get_node() for index in range(1, begin)])
        further = [node.get_input(index) for index in range(begin, begin + flags["normed"] + flags["added"])]
        made = factory.create(
            LOWERED_OP, [node.get_input(0), ov_op.Constant(packed, shared_memory=True), *further], {**shape, **flags}
        )
        return [made.output(0)]

    core.add_extension(os.fspath(path))
    core.add_extension(ConversionExtension(LOWERED_OP, DOMAIN, convert))


def pack_constants(
    library: Library, shape: Shape, constants: Sequence[ov_op.Constant], into: np.ndarray | None = None
) -> np.ndarray:
    """Weight, scale and, where the shape has them, zero points, as a model holds them."""
    weight, scale, *zeros = constants
    return library.pack(shape, _bytes(weight), scale.data, _halves(zeros[0]) if zeros else None, into)


def _bytes(constant: ov_op.Constant) -> np.ndarray:
    """As they lie: four-bit values two in a byte."""
    return np.asarray(constant.data).view(np.uint8).reshape(-1)


def _halves(constant: ov_op.Constant) -> np.ndarray:
    """Four-bit values, one in a byte; the first of two is in the low half."""
    packed = _bytes(constant)
    return np.stack([packed & 15, packed >> 4], -1).reshape(-1)[: int(np.prod(constant.get_output_shape(0)))]


def _pointer(array: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)
