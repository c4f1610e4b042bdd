"""Tokens from logits by the compiled kernel (choose.cpp): what `runtime.logits.choose` does, in a tenth of its time.

Shapes   values f32 [R, V], contiguous; the others [N], one entry per row that is wanted → int64 [N]
Raises   MemoryError
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.floating[Any]]

CHOICE = np.dtype(
    [
        ("row", np.int64),
        ("top_p", np.float64),
        ("uniform", np.float64),
        ("best", np.float32),
        ("inverse_temperature", np.float32),
        ("farthest", np.float32),
        ("top_k", np.int32),
    ],
    align=True,
)


class Choose:
    def __init__(self, function: Any, num_threads: int) -> None:
        self._function = function
        self._num_threads = num_threads

    @classmethod
    def of(cls, library: str | os.PathLike[str], num_threads: int) -> Choose | None:
        """None: the library was compiled before it had this kernel."""
        function = getattr(ctypes.CDLL(os.fspath(library)), "forgeline_choose", None)
        if function is None:
            return None
        function.restype = ctypes.c_bool
        return cls(function, num_threads)

    def __call__(
        self,
        values: npt.NDArray[np.float32],
        rows: Ints,
        best: Numbers,
        temperature: Numbers,
        top_k: Ints,
        top_p: Numbers,
        min_p: Numbers,
        uniform: npt.NDArray[np.float64],
    ) -> Ints:
        """`best` is each row's largest value, finite; temperature > 0; top_k < 1 or ≥ V, top_p = 1 and min_p = 0 are off."""
        assert values.dtype == np.float32 and values.flags.c_contiguous
        assert len(rows) == 0 or 0 <= rows.min() <= rows.max() < len(values)
        choices = np.empty(len(rows), CHOICE)
        with np.errstate(divide="ignore"):
            choices["farthest"] = -np.log(min_p).astype(np.float32)
        choices["inverse_temperature"] = 1 / temperature
        for name, each in (("row", rows), ("best", best), ("top_k", np.clip(top_k, 0, values.shape[1])), ("top_p", top_p)):
            choices[name] = each
        choices["uniform"] = uniform
        tokens = np.empty(len(rows), np.int64)
        done = self._function(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_int64(values.shape[1]),
            ctypes.c_void_p(choices.ctypes.data),
            ctypes.c_int64(len(rows)),
            ctypes.c_int32(self._num_threads),
            ctypes.c_void_p(tokens.ctypes.data),
        )
        if not done:
            raise MemoryError(f"no memory to sample {len(rows)} rows of {values.shape[1]} logits")
        return tokens
