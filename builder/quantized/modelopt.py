"""NVIDIA ModelOpt's Hugging Face export: hf_quant_config.json, or the same in config.json.

    FP8, FP8_PER_CHANNEL_PER_TOKEN   weight E4M3 [out, in], weight_scale [] or [out], input_scale [] (static)
    FP8_PB_WO                        the same with a scale per block of 128 by 128
    W8A8_SQ_PER_CHANNEL, W8A16       weight int8 [out, in], weight_scale [out], input_scale [] (SmoothQuant)
    W4A16_AWQ                        weight uint8 [out / 2, in]: outputs 2i (low bits) and 2i + 1; weight_scale [out, groups]
    MIXED_PRECISION                  one of these by layer

    weight = q · weight_scale · pre_quant_scale

`pre_quant_scale` [in] is what SmoothQuant or AWQ could not fold into the norm before the layer. A layer that has one lies on no
grid with a scale per output or group.

Its scales of a KV cache are k_proj.k_scale and v_proj.v_scale.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import numpy as np

from builder.quantized.eight_bit import Block, check_scale, input_scale, read_scaled
from builder.quantized.layout import (
    FLOATS,
    Headers,
    Layer,
    Tensors,
    grouped,
    need,
    need_dtype,
    need_matrix,
    need_shape,
    text_list,
    unsupported,
    whole_number,
)
from runtime.errors import CorruptCheckpoint

_BLOCKED = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
_READ = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", *_BLOCKED, "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ")
_BLOCK = 128
_PACKED = "U8"


class ModelOpt:
    name = "modelopt"
    bits = 4
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, config: Mapping[str, Any], given: str) -> None:
        """`config` is hf_quant_config.json or the quantization_config of config.json."""
        self.given = given
        config = config.get("quantization", config)
        if not isinstance(config, Mapping):
            raise CorruptCheckpoint(
                f"{given}: the quantization in hf_quant_config.json is {config!r} but must be an object; correct it"
            )
        by_layer = config.get("quantized_layers") or {}
        if not isinstance(by_layer, Mapping) or not all(isinstance(layer, Mapping) for layer in by_layer.values()):
            raise CorruptCheckpoint(
                f"{given}: quantized_layers of the modelopt quantization must map layers to objects; correct it"
            )
        algorithm = str(config.get("quant_algo") or "").upper()
        named = (
            {str(layer.get("quant_algo")).upper() for layer in by_layer.values()}
            if algorithm == "MIXED_PRECISION"
            else {algorithm}
        )
        for each in sorted(named - {""}):
            if each not in _READ:
                unsupported(self, f"quant_algo {each} (only {', '.join(_READ)} and MIXED_PRECISION of these are)")
        self._block: Block | None = None
        if named & set(_BLOCKED):
            size = whole_number(self, config, "group_size", default=_BLOCK)
            if size < 1:
                unsupported(self, f"a block of {size}")
            self._block = (size, size)
        self._excluded = text_list(self, config, "exclude_modules", "ignore")
        cache = config.get("kv_cache_quant_algo")
        if cache is None and isinstance(config.get("kv_cache_scheme"), Mapping):
            cache = "FP8" if config["kv_cache_scheme"].get("type") == "float" else "INT8"
        self.kv_dtype = {"FP8": "fp8", "INT8": "int8"}.get(str(cache).upper(), "")

    def is_quantized(self, headers: Headers) -> bool:
        scaled = any(name in headers for name in ("weight_scale", "pre_quant_scale"))
        return scaled or ("weight" in headers and headers["weight"].dtype not in FLOATS)

    def excludes(self, layer: str) -> bool:
        return any(fnmatch.fnmatchcase(layer, pattern) for pattern in self._excluded)

    def check(self, layer: str, headers: Headers) -> None:
        if "weight_scale_2" in headers:
            unsupported(self, f"{layer}.weight_scale_2, a second scale,")
        need(self, layer, headers, "weight", "weight_scale")
        need_dtype(self, layer, "weight_scale", headers, *FLOATS)
        rows, width = need_matrix(self, layer, "weight", headers, "F8_E4M3", "I8", _PACKED)
        if "pre_quant_scale" in headers:
            need_shape(self, layer, "pre_quant_scale", headers, (width,))
        if headers["weight"].dtype != _PACKED:
            check_scale(self, layer, "weight_scale", headers, (rows, width), self._block)
            return
        out, groups = need_matrix(self, layer, "weight_scale", headers, *FLOATS)
        if out != 2 * rows or width % max(1, groups):
            need_shape(self, layer, "weight_scale", headers, (2 * rows, groups))
            unsupported(self, f"{layer}, whose {width} inputs are not {groups} whole groups,")

    def read(self, layer: str, tensors: Tensors) -> Layer:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        if weight.dtype == np.uint8:
            found = grouped(_signed_nibbles(weight), scale, None, 4)
        else:
            is_float = weight.dtype == np.float32
            found = read_scaled(weight, scale, None, self._block, is_float=is_float, input_scale=input_scale(tensors))
        if "pre_quant_scale" not in tensors:
            return found
        dense = found.dense * tensors["pre_quant_scale"].astype(np.float32)
        return dataclasses.replace(found, dense=dense, grid=None, reason="it has a pre_quant_scale")


def _signed_nibbles(packed: np.ndarray) -> np.ndarray:
    """[out / 2, in] bytes → [out, in]."""
    low, high = packed & 15, packed >> 4
    q = np.stack([low, high], axis=1).reshape(-1, packed.shape[1]).astype(np.int16)
    return np.where(q > 7, q - 16, q).astype(np.int16)
