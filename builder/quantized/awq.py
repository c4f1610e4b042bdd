"""AWQ in AutoAWQ's gemm layout: 4 bits, packed into 32-bit words along the outputs, in the order its kernel reads them.

    qweight   [in, out / 8]        int32
    qzeros    [groups, out / 8]    int32
    scales    [groups, out]

    weight[i, o] = (q[i, o] - zero[g, o]) · scale[g, o]      g = i // group_size

The eight integers of a word, lowest bits first, are outputs 0, 2, 4, 6, 1, 3, 5, 7. The scales of the method itself are in the
weights and norms already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.quantized.layout import (
    FLOATS,
    Headers,
    Layer,
    Tensors,
    grouped,
    need,
    need_matrix,
    need_shape,
    text_list,
    unpack,
    unsupported,
    whole_number,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


class Awq:
    name = "awq"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")
    kv_dtype = ""

    def __init__(self, config: Mapping[str, Any], given: str) -> None:
        self.given = given
        self.bits = whole_number(self, config, "bits", "w_bit")
        self._group_size = whole_number(self, config, "group_size", "q_group_size", default=128)
        self._kept = text_list(self, config, "modules_to_not_convert")
        layout = str(config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm").lower()
        if self.bits != 4:
            unsupported(self, f"a weight of {self.bits} bits (only 4 are)")
        if layout != "gemm":
            unsupported(self, f"the layout {layout!r} (only gemm is)")
        if config.get("zero_point") is False:
            unsupported(self, "a quantization without zero points")

    def is_quantized(self, headers: Headers) -> bool:
        return True

    def excludes(self, layer: str) -> bool:
        return any(name in layer for name in self._kept)

    def check(self, layer: str, headers: Headers) -> None:
        need(self, layer, headers, *self.parts)
        width, words = need_matrix(self, layer, "qweight", headers, "I32")
        need_matrix(self, layer, "qzeros", headers, "I32")
        need_matrix(self, layer, "scales", headers, *FLOATS)
        group_size = self._group_size if self._group_size > 0 else width
        groups = -(-width // group_size)
        need_shape(self, layer, "scales", headers, (groups, words * _PER_WORD))
        need_shape(self, layer, "qzeros", headers, (groups, words))
        if width % group_size:
            unsupported(self, f"{layer}, whose {width} inputs are not whole groups of {group_size},")

    def read(self, layer: str, tensors: Tensors) -> Layer:
        q, zeros = (_in_order(unpack(tensors[name], self.bits, axis=1)) - np.int16(8) for name in ("qweight", "qzeros"))
        return grouped(q.T, tensors["scales"].T, zeros.T, self.bits)


def _in_order(values: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """[rows, out], each eight as its word holds them → as the outputs are numbered."""
    words = values.reshape(len(values), -1, _PER_WORD)
    ordered = np.empty_like(words)
    ordered[..., _ORDER] = words
    return ordered.reshape(values.shape)
