"""Which kernels the quantized layers of a CPU engine get, and the compiled library of our own ones.

Place    $FORGELINE_KERNELS, or $XDG_CACHE_HOME/forgeline/kernels, <hash of sources, options, compiler and OpenVINO>.so: compiled
         once, copied into each engine. Without a cache (--no-cache, no home, a cache that cannot be written): in a directory of
         this process. A directory that $FORGELINE_KERNELS names is used with --no-cache as well
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from plugins.quantized_matmul import native
from runtime.contract import cache_root
from runtime.errors import BuildError


def why_not(compute_dtype: str) -> str:
    """Why engines cannot have forgeline's kernels here; empty when they can."""
    return native.why_not() if compute_dtype == "f32" else f"they compute in f32, not in {compute_dtype}"


def require(asked: str, compute_dtype: str) -> None:
    """Raises  BuildError when forgeline's kernels are asked for in vain."""
    if asked == "forgeline" and (reason := why_not(compute_dtype)):
        raise BuildError(
            f"--cpu-kernels forgeline is not available: {reason}; install g++ on a CPU with AVX512-VNNI and leave "
            "--compute-dtype at f32, or choose --cpu-kernels openvino"
        )


def choose(asked: str, compute_dtype: str, *, use_cache: bool = True) -> tuple[Path | None, str]:
    """The compiled library, or None for OpenVINO's kernels and why, where `auto` could not have ours.

    Raises  BuildError with what the compiler said, where forgeline's kernels were asked for by name
    """
    require(asked, compute_dtype)
    if asked == "openvino":
        return None, ""
    if reason := why_not(compute_dtype):
        return None, reason
    try:
        return library(use_cache=use_cache), ""
    except (native.CompilerError, OSError) as error:
        if asked == "auto":
            return None, f"they cannot be compiled ({error})"
        raise BuildError(f"the CPU kernels cannot be compiled ({error}); build with --cpu-kernels openvino") from error


def library(*, use_cache: bool = True) -> Path:
    """Raises  native.CompilerError, OSError"""
    name = f"{native.identity()[:32]}.so"
    place = os.environ.get("FORGELINE_KERNELS")
    if use_cache or place:
        with contextlib.suppress(OSError, RuntimeError):
            return _compiled((Path(place) if place else cache_root() / "kernels") / name)
    return _compiled(Path(_own_directory().name) / name)


def _compiled(path: Path) -> Path:
    """A file that is damaged, cut short by a full disk for instance, is compiled again."""
    if not native.is_whole(path):
        native.compile_library(path)
    return path


@lru_cache(maxsize=1)
def _own_directory() -> tempfile.TemporaryDirectory[str]:
    """Goes with this process."""
    return tempfile.TemporaryDirectory(prefix="forgeline-kernels-")
