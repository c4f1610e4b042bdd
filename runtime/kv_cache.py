"""The memory of the KV cache: one array per layer and side, first axis the block. Knows no layout inside a block.

Memory is reserved at once and taken from the system page by page as blocks are first used. Copies, and any other whole-block
operation, are exact for every layout, since scales of quantized caches lie inside the block.

Shapes   pools[name] [num_blocks, *block_shape]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


@dataclass(frozen=True)
class PoolLayout:
    block_shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape, dtype=np.int64)) * self.dtype.itemsize


def zeros_aligned(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray:
    """Zeros on a cache-line boundary whose pages the system supplies on first touch."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class KVCache:
    """Owns the pools of every layer."""

    def __init__(self, layouts: Mapping[str, PoolLayout], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pools = {name: zeros_aligned((num_blocks, *layout.block_shape), layout.dtype) for name, layout in layouts.items()}

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every pool. All sources are read before any destination is written."""
        if not copies:
            return
        sources, destinations = (np.array(column, np.int64) for column in zip(*copies, strict=True))
        assert len(set(destinations.tolist())) == len(copies), f"a block is the destination of two copies: {copies}"
        for pool in self.pools.values():
            pool[destinations] = pool[sources]
