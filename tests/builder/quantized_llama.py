"""The tiny Llama as ModelOpt, GPTQ, AWQ and compressed-tensors store it, by packers that share nothing with builder.quantized.

`write` returns what every quantized weight stands for: (q - zero) · scale in fp32, computed from the integers before packing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TINY_LLAMA = Path(__file__).parents[1] / "models" / "tiny-llama"
Array = np.ndarray


@dataclass(frozen=True)
class Integers:
    """Of one weight: q and zero unsigned, scale in fp16 values; q [out, in], zero and scale [out, groups]."""

    q: Array
    zero: Array
    scale: Array
    index: Array  # group of each input
    bits: int

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)

    @property
    def dense(self) -> Array:
        return (self.q - self.zero[:, self.index]).astype(np.float32) * self.scale[:, self.index]


def integers(weight: Array, bits: int, group: int, symmetric: bool, order: Array | None = None) -> Integers:
    """`group` 0: one per output. `order` permutes the inputs before they are grouped."""
    out, width = weight.shape
    group = group or width
    index = np.empty(width, np.int64)
    index[np.arange(width) if order is None else order] = np.arange(width) // group
    top = 2**bits - 1
    scale, zero = np.empty((2, out, width // group), np.float32)
    for g in range(width // group):
        part = weight[:, index == g]
        if symmetric:
            scale[:, g], zero[:, g] = np.abs(part).max(1) / (top // 2), 2 ** (bits - 1)
        else:
            low = np.minimum(part.min(1), 0)
            scale[:, g] = (np.maximum(part.max(1), 0) - low) / top
            zero[:, g] = np.rint(-low / scale[:, g])
    scale = np.where(scale == 0, 1, scale).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint(weight / scale[:, index]) + zero[:, index], 0, top)
    return Integers(q.astype(np.int64), zero.astype(np.int64), scale, index, bits)


def words(values: Array, bits: int, order: Any = None) -> Array:
    """Unsigned integers, packed along the last axis into int32: those first in `order` in the lowest bits."""
    count = 32 // bits
    order = range(count) if order is None else order
    packed = sum(values[..., at::count].astype(np.int64) << (bits * place) for place, at in enumerate(order))
    return packed.astype(np.uint32).view(np.int32)


def gptq(w: Integers, v2: bool = False) -> dict[str, Array]:
    zeros = words(w.zero.T, w.bits).view(np.uint32).astype(np.int64)
    if not v2:
        zeros -= sum(1 << shift for shift in range(0, 32, w.bits))  # borrows where a zero is 0
    return {
        "qweight": np.ascontiguousarray(words(w.q, w.bits).T),
        "qzeros": (zeros % 2**32).astype(np.uint32).view(np.int32),
        "scales": np.ascontiguousarray(w.scale.T.astype(np.float16)),
        "g_idx": w.index.astype(np.int32),
    }


def awq(w: Integers) -> dict[str, Array]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(np.ascontiguousarray(w.q.T), 4, order),
        "qzeros": words(np.ascontiguousarray(w.zero.T), 4, order),
        "scales": np.ascontiguousarray(w.scale.T.astype(np.float16)),
    }


def packed(w: Integers, symmetric: bool = True) -> dict[str, Array]:
    parts = {"weight_packed": words(w.q, w.bits), "weight_scale": w.scale, "weight_shape": np.array(w.q.shape, np.int64)}
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(words(np.ascontiguousarray(w.zero.T), w.bits).T)
    return parts


def int8(w: Integers, symmetric: bool = True) -> dict[str, Array]:
    parts = {"weight": (w.q - w.middle).astype(np.int8), "weight_scale": w.scale}
    return parts if symmetric else {**parts, "weight_zero_point": (w.zero - w.middle).astype(np.int8)}


def modelopt_int4(w: Integers) -> dict[str, Array]:
    nibbles = (w.q - 8) % 16
    return {"weight": (nibbles[0::2] + 16 * nibbles[1::2]).astype(np.uint8), "weight_scale": w.scale}


def write(
    directory: Path,
    quantization: Mapping[str, Any],
    store: Callable[[str, Array], tuple[Mapping[str, Any], Array]],
    *,
    keep: Callable[[str], bool] = lambda name: False,
    extra: Mapping[str, Any] | None = None,
    modelopt: bool = False,
) -> dict[str, Array]:
    """`store(layer, weight)` gives a layer's tensors by last part of their names, and its dense weight; `keep` leaves a layer."""
    shutil.copytree(TINY_LLAMA, directory)
    tensors: dict[str, Any] = dict(extra or {})
    dense = {}
    for name, tensor in load_file(TINY_LLAMA / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or keep(layer):
            tensors[name] = tensor
            continue
        parts, dense[name] = store(layer, tensor.float().numpy())
        tensors.update({f"{layer}.{part}": value for part, value in parts.items()})
    rewrite(directory, tensors)
    if modelopt:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    else:
        config = json.loads((TINY_LLAMA / "config.json").read_text()) | {"quantization_config": quantization}
        (directory / "config.json").write_text(json.dumps(config))
    return dense


def rewrite(directory: Path, tensors: Mapping[str, Any]) -> None:
    save_file({name: torch.as_tensor(value).contiguous() for name, value in tensors.items()}, directory / "model.safetensors")


def by_integers(pack: Callable[[Integers], Mapping[str, Any]], bits: int, group: int, symmetric: bool, order: Any = None) -> Any:
    def store(layer: str, weight: Array) -> tuple[Mapping[str, Any], Array]:
        found = integers(weight, bits, group, symmetric, None if order is None else order(weight.shape[1]))
        return pack(found), found.dense

    return store


def e4m3(per_output: bool, input_scale: float | None = None) -> Any:
    def store(layer: str, weight: Array) -> tuple[Mapping[str, Any], Array]:
        amax = np.abs(weight).max(1, keepdims=True) if per_output else np.abs(weight).max()
        scale = torch.tensor(amax / np.float32(448))
        q = (torch.from_numpy(weight) / scale).to(torch.float8_e4m3fn)
        parts = {"weight": q, "weight_scale": scale if per_output else scale.reshape(())}
        if input_scale is not None:
            factor = {"k_proj": 2, "down_proj": 16}.get(layer.split(".")[-1], 1)  # the down projection reads values up to 286
            parts["input_scale"] = torch.tensor(input_scale * factor)
        return parts, (q.float() * scale).numpy()

    return store


def scheme(layout: str, bits: int = 8, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", **weights},
    }
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
