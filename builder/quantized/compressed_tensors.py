"""compressed-tensors, as llm-compressor writes it: int-quantized, float-quantized, naive-quantized and pack-quantized.

weight              [out, in]                int8 or E4M3
weight_packed       [out, in · bits / 32]    int32, lowest bits first; q + 2^(bits-1)
weight_shape        [2]                      out, in: of a packed weight
weight_scale        [1], [out, 1], [out, groups] or [blocks, blocks]
weight_zero_point   as the scale: int8, or packed along the outputs beside a packed weight; asymmetric only
weight_g_idx        [in]                     group of each input, where they were ordered by activation
input_scale         [1]                      static activations only

weight = (q - zero) · scale, q and zero signed
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.quantized.eight_bit import Block, check_scale, input_scale, read_scaled
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
    text_list,
    unpack,
    unsupported,
    whole_number,
)
from runtime.errors import CorruptCheckpoint

_READ = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_PACKED = ("weight_packed", "weight_shape", "weight_g_idx")


class CompressedTensors:
    name = "compressed-tensors"
    parts: tuple[str, ...] = (
        "weight", *_PACKED, "weight_scale", "weight_zero_point", "input_scale", "input_zero_point",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any], given: str) -> None:
        self.given = given
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups or not all(_is_scheme(group) for group in groups.values()):
            raise CorruptCheckpoint(
                f"{given}: config_groups of the compressed-tensors quantization must map names to schemes with weights; "
                "correct config.json"
            )
        self._groups = [dict(group) for group in groups.values()]
        self._ignored = text_list(self, config, "ignore")
        for pattern in (*self._ignored, *(name for group in self._groups for name in text_list(self, group, "targets"))):
            _check_pattern(pattern, given)
        self.bits = 4
        for group in self._groups:
            weights = group["weights"]
            layout = str(group.get("format") or config.get("format") or "")
            if layout not in _READ:
                unsupported(self, f"the layout {layout!r} (only {', '.join(_READ)} are)")
            bits = whole_number(self, weights, "num_bits", default=8)
            packed = layout == "pack-quantized"
            if bits != 8 and not (bits == 4 and packed):
                unsupported(self, f"a weight of {bits} bits in the layout {layout} (4 in pack-quantized and 8 are)")
            self.bits = max(self.bits, bits)
        sparsity, cache = (config.get(name) or {} for name in ("sparsity_config", "kv_cache_scheme"))
        if not isinstance(sparsity, Mapping) or not isinstance(cache, Mapping):
            raise CorruptCheckpoint(
                f"{given}: sparsity_config and kv_cache_scheme of the compressed-tensors quantization must be objects; "
                "correct config.json"
            )
        if sparsity.get("format", "dense") != "dense":
            unsupported(self, "a sparse weight")
        self.kv_dtype = {"float 8": "fp8", "int 8": "int8"}.get(f"{cache.get('type')} {cache.get('num_bits', 8)}", "")

    def is_quantized(self, headers: Headers) -> bool:
        scaled = any(name in headers for name in ("weight_packed", "weight_scale", "weight_zero_point"))
        return scaled or ("weight" in headers and headers["weight"].dtype not in FLOATS)

    def excludes(self, layer: str) -> bool:
        return any(_names(pattern, layer) for pattern in self._ignored)

    def _weights(self, layer: str) -> Mapping[str, Any]:
        """The scheme whose targets name the layer; else the first that targets a class of layers."""
        for group in self._groups:
            if any(_names(target, layer) for target in group.get("targets") or ()):
                return group["weights"]
        general = (group for group in self._groups if any("." not in name for name in group.get("targets") or ()))
        return next(general, self._groups[0])["weights"]

    def _block(self, layer: str) -> Block | None:
        weights = self._weights(layer)
        if weights.get("strategy") != "block":
            return None
        structure = weights.get("block_structure")
        if not (isinstance(structure, list) and len(structure) == 2 and all(type(n) is int and n > 0 for n in structure)):
            unsupported(self, f"{layer} with block_structure {structure!r}")
        return structure[0], structure[1]

    def check(self, layer: str, headers: Headers) -> None:
        weights = self._weights(layer)
        need(self, layer, headers, "weight_scale")
        need_dtype(self, layer, "weight_scale", headers, *FLOATS)
        if weights.get("symmetric") is False:
            need(self, layer, headers, "weight_zero_point")
        if "weight_packed" in headers:
            need(self, layer, headers, "weight_shape")
            need_matrix(self, layer, "weight_packed", headers, "I32")
            need_dtype(self, layer, "weight_shape", headers, "I64", "I32")
            return
        need(self, layer, headers, "weight")
        out, width = need_matrix(self, layer, "weight", headers, "F8_E4M3" if weights.get("type") == "float" else "I8")
        check_scale(self, layer, "weight_scale", headers, (out, width), self._block(layer))

    def read(self, layer: str, tensors: Tensors) -> Layer:
        if "weight_packed" in tensors:
            return self._read_packed(layer, tensors)
        is_float = self._weights(layer).get("type") == "float"
        zero = None if is_float else tensors.get("weight_zero_point")
        if zero is not None and zero.size not in (1, tensors["weight_scale"].size):
            damaged(self, f"{layer}.weight_zero_point", f"has {zero.size} values beside {tensors['weight_scale'].size} scales")
        scales = input_scale(tensors)
        return read_scaled(
            tensors["weight"], tensors["weight_scale"], zero, self._block(layer), is_float=is_float, input_scale=scales
        )

    def _read_packed(self, layer: str, tensors: Tensors) -> Layer:
        bits = whole_number(self, self._weights(layer), "num_bits", default=8)
        shape = tensors["weight_shape"].reshape(-1)
        words = tensors["weight_packed"]
        out, width = (int(shape[0]), int(shape[1])) if shape.size == 2 else (-1, -1)
        if words.shape != (out, -(-width * bits // 32)):
            damaged(
                self,
                f"{layer}.weight_packed",
                f"has the shape {list(words.shape)} but {shape.tolist()} in {bits} bits needs another",
            )
        middle = np.int16(1 << (bits - 1))
        q = unpack(words, bits, axis=1)[:, :width] - middle
        scale = tensors["weight_scale"]
        check_scale(self, layer, "weight_scale", tensors, (out, width), None)
        scale = np.broadcast_to(scale.reshape(1, 1), (out, 1)) if scale.size == 1 else scale.reshape(out, -1)
        zero = self._zero(layer, tensors, scale.shape, bits, middle)
        if "weight_g_idx" not in tensors:
            return grouped(q, scale, zero, bits)
        index = tensors["weight_g_idx"].astype(np.int64)
        if index.shape != (width,) or index.min() < 0 or index.max() >= scale.shape[1]:
            damaged(self, f"{layer}.weight_g_idx", f"must name one of {scale.shape[1]} groups for each of {width} inputs")
        if np.array_equal(index, np.arange(width) // (width // scale.shape[1])):
            return grouped(q, scale, zero, bits)
        values = q.astype(np.float32) if zero is None else (q - zero[:, index]).astype(np.float32)
        return Layer(values * scale[:, index].astype(np.float32), reason="its inputs are ordered by activation")

    def _zero(
        self, layer: str, tensors: Tensors, shape: tuple[int, ...], bits: int, middle: np.int16
    ) -> npt.NDArray[np.int16] | None:
        zero = tensors.get("weight_zero_point")
        if zero is None:
            return None
        if zero.dtype == np.int32 and zero.shape == (-(-shape[0] * bits // 32), shape[1]):
            return unpack(zero, bits, axis=0)[: shape[0]] - middle
        if zero.size == 1 or zero.size == shape[0] * shape[1]:  # as older versions wrote it
            return np.broadcast_to(zero.reshape(-1, 1) if zero.size == 1 else zero.reshape(shape), shape).astype(np.int16)
        damaged(self, f"{layer}.weight_zero_point", f"has the shape {list(zero.shape)} beside scales {list(shape)}")


def _is_scheme(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)


def _check_pattern(pattern: str, given: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise CorruptCheckpoint(
            f"{given}: {pattern!r} of the compressed-tensors quantization is no regular expression ({error}); correct config.json"
        ) from None


def _names(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return pattern == layer
