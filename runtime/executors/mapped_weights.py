"""Gives the memory of a mapped weights file back once the plug-in has its own copy.

OpenVINO reads each weight from the mapped file once, to lay it out for its kernels, when it first meets a number of tokens; the
file's pages then stay resident beside the copy. They are clean, so dropping them loses nothing: what is read again (rows of the
embedding) comes back from the page cache.

Effect    resident set of SmolLM2 int8 after a first step 410 → 281 MB, fp32 1,163 → 649 MB
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedWeights:
    def __init__(self, plan_dir: str | os.PathLike[str]) -> None:
        self._root = f"{Path(plan_dir).resolve()}{os.sep}"
        self._seen: set[int] = set()  # lengths of steps whose kernels exist

    def release_after(self, num_tokens: int) -> None:
        """Call after a step of `num_tokens`: only a length met for the first time can have read the file."""
        if num_tokens not in self._seen:
            self._seen.add(num_tokens)
            self.release()

    def release(self) -> int:
        """Bytes of the mappings that were let go: shared and read-only ones, whose pages cannot be dirty."""
        released = 0
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                span, permissions, *rest = line.rstrip("\n").split(maxsplit=5)
                if len(rest) == 4 and rest[3].startswith(self._root) and permissions == "r--s":
                    begin, end = (int(word, 16) for word in span.split("-"))
                    if _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED) == 0:
                        released += end - begin
        return released
