"""The memory of the KV cache: one array per layer and side, first axis the block. Knows no layout inside a block.

Memory is reserved at once and taken from the system as blocks are first used: by the page, in large pools by the huge page, where
Linux has them (decode of SmolLM2 int8 at batch 1: 1.09 times as fast). Copies, and any other whole-block operation, are exact for
every layout, since scales of quantized caches lie inside the block.

Shapes   pools[name] [num_blocks, *block_shape]
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_HUGE_PAGE = 2 << 20  # bytes
_HUGE_FROM = 4 * _HUGE_PAGE  # below, rounding up to whole huge pages could cost more than it brings


@dataclass(frozen=True)
class PoolLayout:
    block_shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape, dtype=np.int64)) * self.dtype.itemsize


def zeros_aligned(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray:
    """Zeros on a cache-line boundary, on that of a huge page when large, whose pages the system supplies on first touch."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        raw = _huge_pages(size)
    else:
        raw = np.zeros(size + _ALIGNMENT, np.uint8)
        raw = raw[-raw.ctypes.data % _ALIGNMENT :]
    return raw[:size].view(dtype).reshape(shape)


def _huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Ordinary pages at the end: an executor's last block is its padding's, which alone would take a huge page in every pool."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, (size - 1) // _HUGE_PAGE * _HUGE_PAGE)
    return raw[start:]


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
