"""What a quantized checkpoint stored of a weight besides its values: the grid they lie on. Knows no file format.

A weight is (q - zero) · scale with integer or E4M3 q. Only scale and zero are kept here: q follows exactly from the dense weight,
so a grid stays small and survives transposing, merging and saving as fp32.

Shapes   scale, zero [out] for one scale per output, or [out, in / group_size]; rows are a weight's outputs, however it is stored
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE = "checkpoint_grids.npz"  # beside the canonical graph
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    dtype: str  # int4, int8, fp8
    scale: Array
    group_size: int = 0  # 0: per output
    zero: npt.NDArray[np.int16] | None = None  # signed, as q is; None: symmetric
    input_scale: float | None = None  # of the layer's input, static, in the same type as the weight

    def repeated(self, group_size: int, width: int) -> tuple[Array, npt.NDArray[np.int16] | None] | None:
        """Scale and zero for smaller groups of `width` inputs; None where the groups do not nest."""
        own = self.group_size or width
        if own % group_size:
            return None
        times = own // group_size
        rows = len(self.scale)
        scale = self.scale.reshape(rows, -1).repeat(times, axis=1)
        return scale, None if self.zero is None else self.zero.reshape(rows, -1).repeat(times, axis=1)


def concatenated(grids: Sequence[Grid]) -> Grid | None:
    """Of weights with the same input, one below the other; None where the grids differ in kind."""
    first = grids[0]
    if len({(grid.dtype, grid.group_size, grid.scale.shape[1:]) for grid in grids}) > 1:
        return None
    zero = None
    if any(grid.zero is not None for grid in grids):
        zeros = (np.zeros(grid.scale.shape, np.int16) if grid.zero is None else grid.zero for grid in grids)
        zero = np.concatenate(list(zeros))
    scales = [grid.input_scale for grid in grids if grid.input_scale is not None]
    return Grid(
        first.dtype,
        np.concatenate([grid.scale for grid in grids]),
        first.group_size,
        zero,
        max(scales) if len(scales) == len(grids) else None,  # as the kernels of fused layers take it
    )


@dataclass(frozen=True)
class Origin:
    """How a checkpoint was quantized, by weight of the graph; all empty for one that was not."""

    format: str = ""
    grids: Mapping[str, Grid] = field(default_factory=dict)
    off_grid: Mapping[str, str] = field(default_factory=dict)  # quantized weight → why it has no grid
    dense: frozenset[str] = frozenset()  # matrices stored unquantized beside quantized ones
    excludes_head: bool = False  # by name, in the checkpoint's configuration
    kv_dtype: str = ""  # of kv_scales: fp8, int8
    kv_scales: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)  # layer → of keys, of values; one, or one per head

    def fused(self, parts: Mapping[str, Sequence[str]], names: Collection[str]) -> Origin:
        """By the `names` of a graph's weights; `parts` has the old names that each merged weight was made of.

        What is in no graph are the experts of a mixture, which transformers loads as one weight.
        """
        grids, off_grid, dense = dict(self.grids), dict(self.off_grid), set(self.dense)
        for name, old in parts.items():
            if mixed := [part for part in old if part in dense]:
                dense -= set(mixed)
                dense.add(name)
            elif all(part in self.grids for part in old) and (joint := concatenated([self.grids[part] for part in old])):
                grids[name] = joint
            elif any(part in self.grids or part in off_grid for part in old):
                reasons = [off_grid[part] for part in old if part in off_grid]
                off_grid[name] = reasons[0] if reasons else "merged layers have grids of different kinds"
            for part in old:
                grids.pop(part, None)
                off_grid.pop(part, None)
        if lost := [name for name in (*grids, *off_grid) if name not in names]:
            for name in lost:
                grids.pop(name, None)
                off_grid.pop(name, None)
            off_grid.update((name, "the experts of a layer are one weight") for name in names if ".experts." in name)
        return dataclasses.replace(self, grids=grids, off_grid=off_grid, dense=frozenset(dense))

    def save(self, directory: Path) -> None:
        about: dict[str, object] = {
            "format": self.format,
            "off_grid": dict(self.off_grid),
            "dense": sorted(self.dense),
            "excludes_head": self.excludes_head,
            "kv_dtype": self.kv_dtype,
            "grids": {name: [grid.dtype, grid.group_size, grid.input_scale] for name, grid in self.grids.items()},
        }
        arrays: dict[str, npt.NDArray] = {"about": np.array(json.dumps(about))}
        for name, grid in self.grids.items():
            arrays[f"scale/{name}"] = grid.scale
            if grid.zero is not None:
                arrays[f"zero/{name}"] = grid.zero
        for layer, (key, value) in self.kv_scales.items():
            arrays[f"kv/{layer}/k"], arrays[f"kv/{layer}/v"] = key, value
        np.savez(directory / FILE, **arrays)

    @classmethod
    def load(cls, directory: Path) -> Origin:
        """Of the canonical graph in `directory`."""
        path = directory / FILE
        if not path.is_file():
            return cls()
        with np.load(path) as arrays:
            about = json.loads(str(arrays["about"]))
            grids = {
                name: Grid(dtype, arrays[f"scale/{name}"], group, arrays.get(f"zero/{name}"), input_scale)
                for name, (dtype, group, input_scale) in about.pop("grids").items()
            }
            layers = sorted({int(name.split("/")[1]) for name in arrays.files if name.startswith("kv/")})
            kv = {layer: (arrays[f"kv/{layer}/k"], arrays[f"kv/{layer}/v"]) for layer in layers}
        return cls(**{**about, "dense": frozenset(about["dense"])}, grids=grids, kv_scales=kv)

    def cache_scales(self, layer: int, dtypes: Sequence[str], num_heads: int) -> list[Array | None]:
        """Per head, of keys and of values; None where the checkpoint has none for that type."""
        stored = self.kv_scales.get(layer)
        if stored is None:
            return [None, None]
        fits: Callable[[Array], bool] = lambda scale: scale.size in (1, num_heads)  # noqa: E731
        return [
            np.broadcast_to(scale.reshape(-1), num_heads).astype(np.float32) if dtype == self.kv_dtype and fits(scale) else None
            for scale, dtype in zip(stored, dtypes, strict=True)
        ]
