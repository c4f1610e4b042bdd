"""forgeline::PagedAttention on the CPU: the lowered op of plugins.paged_attention.openvino, computed by our own kernels.

A row's result depends on its sequence alone: not on what shares its step, how its prompt was cut, or the number of threads.
Its pools have the size of OpenVINO's, [num_blocks, Hkv, 32, bytes], as bytes, and another order inside a block (attention.h).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino  # noqa: F401  # loads what the library links to

NATIVE_OP = "PagedAttention"  # in domain forgeline, of the library
BLOCK_SIZE = 32
KV_TYPES = ("f32", "f16", "bf16", "u8", "u4")  # attention.h: Element
KV_PAIRS = (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("u8", "u8"), ("u8", "u4"))
MAX_HEAD_DIM = 256
_SCALE_BYTES = 8  # scale and zero point
_U4_GROUP = 32

Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


class _Shape(ctypes.Structure):
    """attention.h: AttentionShape."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("sliding_window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("keys", ctypes.c_int32),
        ("values", ctypes.c_int32),
    )


class _Sequences(ctypes.Structure):
    """attention.h: Sequences."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("past_lens", "begins", "blocks", "block_begins")),
        ("count", ctypes.c_int64),
    )


class _Tensors(ctypes.Structure):
    """attention.h: AttentionTensors."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        ("q_stride", ctypes.c_int64),
        ("kv_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("key_pool", "value_pool", "out")),
    )


def supports(head_dim: int, key_dtype: str, value_dtype: str) -> bool:
    multiple = _U4_GROUP if value_dtype == "u4" else 16
    return (key_dtype, value_dtype) in KV_PAIRS and head_dim <= MAX_HEAD_DIM and head_dim % multiple == 0


def bytes_per_head(head_dim: int, dtype: str) -> int:
    """Of one token's keys or values of one head: the last axis of a pool."""
    if dtype == "u8":
        return head_dim + _SCALE_BYTES
    if dtype == "u4":
        return head_dim // 2 + head_dim // _U4_GROUP * _SCALE_BYTES
    return head_dim * (4 if dtype == "f32" else 2)


@dataclass(frozen=True)
class Attention:
    """One layer's shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_dtype: str
    value_dtype: str
    scale: float
    sliding_window: int = 0

    def pools(self, num_blocks: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Of keys and of values, zeroed, on cache lines as the kernels want them."""
        made = []
        for dtype in (self.key_dtype, self.value_dtype):
            shape = (num_blocks, self.num_kv_heads, BLOCK_SIZE, bytes_per_head(self.head_dim, dtype))
            raw = np.zeros(int(np.prod(shape)) + 64, np.uint8)
            start = -raw.ctypes.data % 64
            made.append(raw[start : start + int(np.prod(shape))].reshape(shape))
        return made[0], made[1]


class Library:
    """The compiled kernels, outside OpenVINO: for tests and tuning."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = ctypes.CDLL(os.fspath(path))

    def attend(
        self,
        layer: Attention,
        q: Array,
        k: Array,
        v: Array,
        key_pool: npt.NDArray[np.uint8],
        value_pool: npt.NDArray[np.uint8],
        past_lens: IntArray,
        begins: IntArray,
        blocks: IntArray,
        block_begins: IntArray,
    ) -> Array:
        """Inputs of the lowered op → [T, Hq*D]; the pools are written."""
        shape = _Shape(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.sliding_window,
            layer.scale,
            KV_TYPES.index(layer.key_dtype),
            KV_TYPES.index(layer.value_dtype),
        )
        floats: list[Array] = [np.ascontiguousarray(x, np.float32) for x in (q, k, v)]
        ints: list[IntArray] = [np.ascontiguousarray(x, np.int32) for x in (past_lens, begins, blocks, block_begins)]
        out = np.empty_like(floats[0])
        sequences = _Sequences(*(x.ctypes.data for x in ints), len(past_lens))
        strides = [heads * layer.head_dim for heads in (layer.num_heads, layer.num_kv_heads)]
        pools = [key_pool.ctypes.data, value_pool.ctypes.data]
        tensors = _Tensors(*(x.ctypes.data for x in floats), *strides, *pools, out.ctypes.data)
        self._library.forgeline_attend(ctypes.byref(shape), ctypes.byref(sequences), ctypes.byref(tensors))
        return out


def attributes(node: Any, key_dtype: str, value_dtype: str) -> dict[str, Any]:
    """Of the library's op, from a lowered node."""
    names = ("scale", "sliding_window", "num_kv_heads", "head_dim")
    return {**{name: node.get_attribute(name) for name in names}, "key_type": key_dtype, "value_type": value_dtype}
