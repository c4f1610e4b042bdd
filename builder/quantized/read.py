"""The tensors of a quantized checkpoint → a dense fp32 state dict, and the Origin that says on which grids its weights lie."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.quantized import layers
from builder.quantized.grid import Grid, Origin
from builder.quantized.layout import Format, Header, damaged

# self_attn.k_proj.k_scale of ModelOpt, self_attn.k_scale and self_attn.k_proj.output_scale of compressed-tensors
_KV_SCALE = re.compile(r"\.(\d+)\.[\w.]*?(?:\.([kv])_scale|([kv])_proj\.output_scale)$")
_UNUSED = re.compile(r"\.(q|prob)_scale$|\.q_proj\.output_scale$")  # of attention computed in eight bits
_TABLES = ("lm_head", "embed_out")


def read(
    fmt: Format, files: Sequence[Path], headers: Mapping[str, Header], *, stored_in_out: bool = False
) -> tuple[dict[str, Any], Origin]:
    """Checked by `check`. `stored_in_out`: the model keeps its linear weights as [in, out] (GPT-2).

    Raises  CorruptCheckpoint
    """
    import torch
    from safetensors import safe_open

    where: dict[str, Any] = {}
    handles = [safe_open(str(path), framework="pt") for path in files]
    for handle in handles:
        where.update(dict.fromkeys(handle.keys(), handle))
    state: dict[str, Any] = {}
    grids: dict[str, Grid] = {}
    off_grid: dict[str, str] = {}
    found = layers(fmt, headers)
    consumed = {f"{layer}.{part}" for layer, parts in found.items() for part in parts}
    for layer, parts in found.items():
        tensors = {part: _array(where[f"{layer}.{part}"].get_tensor(f"{layer}.{part}")) for part in parts}
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name when the model has its weights
            read_layer = fmt.read(layer, tensors)
        name = f"{layer}.weight"
        dense = read_layer.dense.T if stored_in_out and layer not in _TABLES else read_layer.dense
        state[name] = torch.from_numpy(np.ascontiguousarray(dense, np.float32))
        if read_layer.grid is not None:
            grids[name] = read_layer.grid
        else:
            off_grid[name] = read_layer.reason
    cache: dict[tuple[int, str], npt.NDArray[np.float32]] = {}
    dense_names = set()
    for name, handle in where.items():
        if name in consumed or _UNUSED.search(name):
            continue
        if name in state:
            damaged(fmt, name, "is stored both quantized and not")
        tensor = handle.get_tensor(name)
        if match := _KV_SCALE.search(name):
            cache[int(match[1]), match[2] or match[3]] = _array(tensor).astype(np.float32).reshape(-1)
            continue
        state[name] = tensor.float() if tensor.is_floating_point() else tensor
        if tensor.ndim == 2 and found:
            dense_names.add(name)
    numbers = {layer for layer, _ in cache}
    kv = {n: (cache[n, "k"], cache[n, "v"]) for n in sorted(numbers) if (n, "k") in cache and (n, "v") in cache}
    return state, Origin(
        format=fmt.name,
        grids=grids,
        off_grid=off_grid,
        dense=frozenset(dense_names),
        excludes_head=any(fmt.excludes(name) for name in _TABLES),
        kv_dtype=fmt.kv_dtype if kv else "",
        kv_scales=kv,
    )


def _array(tensor: Any) -> npt.NDArray:
    """E4M3 and bf16 are widened: numpy knows neither."""
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
