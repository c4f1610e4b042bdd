"""GPTQ as AutoGPTQ and GPTQModel store it: 4 or 8 bits, packed into 32-bit words along the inputs.

    qweight   [in · bits / 32, out]       int32, lowest bits first
    qzeros    [groups, out · bits / 32]   int32; format gptq stores words less 1 in every integer, gptq_v2 as they are
    scales    [groups, out]
    g_idx     [in], optional              group of each input; without order by activation i // group_size

    weight[i, o] = (q[i, o] - zero[g, o]) · scale[g, o]      g = g_idx[i]

With order by activation (desc_act) a group's inputs are scattered: such a layer is read, but no kernel here keeps its grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from builder.quantized.layout import (
    FLOATS,
    Headers,
    Layer,
    Tensors,
    damaged,
    grouped,
    need,
    need_dtype,
    need_matrix,
    need_shape,
    unpack,
    unsupported,
    whole_number,
)

_ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every integer of a word


class Gptq:
    name = "gptq"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    kv_dtype = ""

    def __init__(self, config: Mapping[str, Any], given: str) -> None:
        self.given = given
        self.bits = whole_number(self, config, "bits")
        self._group_size = whole_number(self, config, "group_size", default=-1)
        self._mixed = bool(config.get("dynamic"))  # some layers have their own bits or group size
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if config.get("is_marlin_format"):
            layout = "marlin"
        if self.bits not in _ONES:
            unsupported(self, f"a weight of {self.bits} bits (only 4 and 8 are)")
        if layout not in ("gptq", "gptq_v2"):
            unsupported(self, f"the layout {layout!r} (only gptq and gptq_v2 are)")
        if config.get("pack_dtype", "int32") != "int32":
            unsupported(self, f"packing into {config['pack_dtype']} (only int32 is)")
        self._adds_one = layout == "gptq"

    def is_quantized(self, headers: Headers) -> bool:
        return True

    def excludes(self, layer: str) -> bool:
        return False  # its configuration names what is quantized

    def check(self, layer: str, headers: Headers) -> None:
        need(self, layer, headers, "qweight", "qzeros", "scales")
        need_matrix(self, layer, "qweight", headers, "I32")
        need_matrix(self, layer, "qzeros", headers, "I32")
        need_matrix(self, layer, "scales", headers, *FLOATS)
        if "g_idx" in headers:
            need_dtype(self, layer, "g_idx", headers, "I32", "I64")
        width, bits = self._width_and_bits(layer, headers)
        rows, out = headers["scales"].shape
        need_shape(self, layer, "qweight", headers, (width * bits // 32, out))
        groups = -(-width // self._group(width, rows))
        need_shape(self, layer, "scales", headers, (groups, out))
        need_shape(self, layer, "qzeros", headers, (groups, out * bits // 32))

    def _width_and_bits(self, layer: str, headers: Headers | Tensors) -> tuple[int, int]:
        """The number of inputs is in g_idx, so that the bits of a layer that differs from the others are known."""
        words = headers["qweight"].shape[0]
        if "g_idx" not in headers:
            return words * 32 // self.bits, self.bits
        width = int(headers["g_idx"].shape[0])
        bits = words * 32 // max(1, width)
        if bits == self.bits or (self._mixed and bits in _ONES):
            return width, bits
        damaged(self, f"{layer}.qweight", f"holds {bits} bits for each of {width} inputs but must hold {self.bits}")

    def _group(self, width: int, groups: int) -> int:
        if self._mixed and width % groups == 0:
            return width // groups
        return self._group_size if self._group_size > 0 else width

    def read(self, layer: str, tensors: Tensors) -> Layer:
        width, bits = self._width_and_bits(layer, tensors)
        scales, words = tensors["scales"].astype(np.float32), tensors["qzeros"].astype(np.int64)
        if self._adds_one:
            words = (words + _ONES[bits]) & 0xFFFFFFFF  # as whole words: a zero of 0 was stored with a borrow
        middle = 1 << (bits - 1)
        zeros = unpack(words, bits, axis=1) - np.int16(middle)
        q = unpack(tensors["qweight"], bits, axis=0) - np.int16(middle)
        group_size = self._group(width, len(scales))
        plain = np.arange(width) // group_size
        index = tensors["g_idx"].astype(np.int64) if "g_idx" in tensors else plain
        index = np.where(index < 0, index + len(scales), index)
        if index.min() < 0 or index.max() >= len(scales):
            damaged(self, f"{layer}.g_idx", f"names a group beyond the {len(scales)} that have scales")
        if np.array_equal(index, plain) and width % group_size == 0:
            return grouped(q.T, scales.T, zeros.T, bits)
        dense = (q - zeros[index]).astype(np.float32) * scales[index]
        ordered = not np.array_equal(index, plain)
        why = (
            "its inputs are ordered by activation (desc_act)"
            if ordered
            else f"{width} inputs are not whole groups of {group_size}"
        )
        return Layer(np.ascontiguousarray(dense.T), reason=why)
