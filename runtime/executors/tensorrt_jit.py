"""Kernels that TensorRT-RTX compiles when it runs, kept for the next start.

A plan for RTX holds source; every bucket's shapes are compiled when its context first runs. The library keeps the result in a
runtime cache, which it checks against its own version, the GPU and the driver, and refuses when they differ: then everything is
compiled again and the file replaced. `tensorrt` compiles nothing at run time and has no such cache.

Place    $XDG_CACHE_HOME/forgeline/jit/<checksum of the plan>, written once after loading, whole or not at all
Raises   nothing: without a cache a start takes longer; the log says why
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from runtime.contract import cache_root

log = logging.getLogger("forgeline.tensorrt")


def cache_place(plan_checksum: str) -> Path | None:
    """None when the plan has no checksum or this user no home."""
    try:
        return cache_root() / "jit" / plan_checksum[:32] if plan_checksum else None
    except RuntimeError:
        return None


class CompiledKernels:
    """One runtime cache, shared by all contexts of an engine; it must outlive them."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._cache: Any = None
        self._read = b""

    def attach(self, config: Any) -> None:
        """`config` is an IRuntimeConfig, on a thread with a CUDA context."""
        if self._place is None or not hasattr(config, "create_runtime_cache"):
            return
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load(self._place)
        config.set_runtime_cache(self._cache)

    def _load(self, place: Path) -> None:
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            log.info("TensorRT-RTX compiles kernels for every bucket; the next start finds them in %s", place)
            return
        except OSError as error:
            log.warning("%s cannot be read (%s), so TensorRT-RTX compiles its kernels again", place, error.strerror)
            return
        if self._cache.deserialize(content):
            self._read = content
        else:
            log.info("%s is of another GPU, driver or TensorRT-RTX, so kernels are compiled again", place)

    def save(self) -> None:
        """Call when every bucket has run."""
        if self._cache is None or self._place is None:
            return
        content = bytes(memoryview(self._cache.serialize()))
        if content == self._read:
            return
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._place.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, self._place)
        except OSError as error:
            log.warning(
                "compiled kernels cannot be kept in %s (%s); the next start compiles them again", self._place, error.strerror
            )
