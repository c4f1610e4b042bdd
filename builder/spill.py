"""Arrays that are not needed now, in a nameless temporary file: read back when asked, gone with the last reader.

Written and read by calls, not mapped, so they never count as this process's memory.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.bundle import OTHER_OUTPUT, disk_errors
from builder.cache import REMEDY
from runtime.contract import cache_root


class Spill:
    """Owns the file; arrays stay as they were put.

    Raises   OutOfDisk
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._remedy = REMEDY if cache_root() in directory.resolve().parents else OTHER_OUTPUT
        self._file = tempfile.TemporaryFile(dir=directory, prefix=".spill-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._end = 0

    def put(self, array: npt.NDArray) -> Spilled:
        begin = self._end
        view = _bytes(np.ascontiguousarray(array))
        with disk_errors(self._directory, self._remedy):
            while view:
                written = os.pwrite(self._file.fileno(), view, self._end)
                self._end += written
                view = view[written:]
        return Spilled(self, begin, array.dtype, array.shape)

    def read(self, begin: int, into: npt.NDArray) -> None:
        view = _bytes(into)
        while view:
            count = os.preadv(self._file.fileno(), [view], begin)
            assert count, "the file ends before the array"
            begin += count
            view = view[count:]


def _bytes(array: npt.NDArray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8)).cast("B")  # type: ignore[arg-type]


class Spilled:
    """An array in a Spill; numpy reads it wherever it takes an array."""

    def __init__(self, place: Spill, begin: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._place, self._begin, self.dtype, self.shape = place, begin, dtype, shape

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        found = np.empty(self.shape, self.dtype)
        self._place.read(self._begin, found)
        return found if dtype is None else found.astype(dtype, copy=False)
