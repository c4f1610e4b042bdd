"""Memory for packed weights: on cache lines, and in huge pages where Linux has them.

Why      a step reads every weight once, in order: 64 bytes from an odd address cost two cache lines, and 4 KiB pages a walk each
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_CHUNK = 16 * _HUGE_PAGE  # reserved at a time; what is not used is never taken from the system


class Arena:
    """Hands out pieces that live as long as somebody holds them, or a neighbour from the same chunk."""

    def __init__(self) -> None:
        self._chunk: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Zeroed bytes."""
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > len(self._chunk):
            self._chunk = _reserve(max(_CHUNK, -(-padded // _HUGE_PAGE) * _HUGE_PAGE))
        piece, self._chunk = self._chunk[:size], self._chunk[padded:]
        return piece


def _reserve(size: int) -> npt.NDArray[np.uint8]:
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, size)
    return raw[start : start + size]
