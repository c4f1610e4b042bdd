"""Checkpoints that are quantized already: known by their configuration, checked by headers, read as dense weights and grids.

    gptq, awq, compressed-tensors   quantization_config in config.json
    modelopt                        hf_quant_config.json, or quantization_config

Imports no torch; read.py does, when weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from builder.quantized.awq import Awq
from builder.quantized.compressed_tensors import CompressedTensors
from builder.quantized.gptq import Gptq
from builder.quantized.layout import Format, Header, damaged, need
from builder.quantized.modelopt import ModelOpt
from runtime.errors import UnsupportedModel

FORMATS: dict[str, Callable[[Mapping[str, Any], str], Format]] = {
    "modelopt": ModelOpt,
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
}
MODELOPT_CONFIG = "hf_quant_config.json"


def find(quantization: Mapping[str, Any] | None, modelopt: Mapping[str, Any] | None, given: str) -> Format | None:
    """`quantization` is config.json's quantization_config, `modelopt` the content of hf_quant_config.json; None for an
    unquantized checkpoint.

    Raises  UnsupportedModel, CorruptCheckpoint
    """
    if modelopt is not None:
        return ModelOpt(modelopt, given)
    if not quantization:
        return None
    method = str(quantization.get("quant_method", "unknown")).lower()
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{given}: the weights are quantized by {method!r}, which is not read; build from the unquantized checkpoint, a GGUF "
            f"file, or one quantized by {', '.join(FORMATS)}"
        )
    return FORMATS[method](quantization, given)


def layers(fmt: Format, headers: Mapping[str, Header]) -> dict[str, dict[str, Header]]:
    """Quantized layers by name, each with its tensors by the last part of their names."""
    found: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        layer, _, part = name.rpartition(".")
        if part in fmt.parts and layer:
            found.setdefault(layer, {})[part] = header
    return {layer: parts for layer, parts in found.items() if fmt.is_quantized(parts)}


def check(fmt: Format, headers: Mapping[str, Header]) -> None:
    """Raises CorruptCheckpoint or UnsupportedModel when a layer lacks a tensor or its tensors do not fit together."""
    for layer, parts in layers(fmt, headers).items():
        need(fmt, layer, parts)
        for part, header in parts.items():
            if not header.size:
                damaged(fmt, f"{layer}.{part}", f"has the shape {list(header.shape)} and so no values")
        fmt.check(layer, parts)
