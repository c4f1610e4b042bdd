"""Compiles the CPU kernels, of matrices, attention, layers and sampling: C++ → a library for this machine's CPU and OpenVINO.

Needs    a C++17 compiler ($CXX, g++, c++ or clang++) where engines are built; the runtime needs none
         the headers and libraries that OpenVINO's wheel brings, oneTBB's among them
CPU      AVX512 F, BW, DQ, VL and VNNI: Intel from Ice Lake, AMD from Zen 4
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import openvino as ov

_PLUGINS = Path(__file__).parent.parent
_PLACES = (
    Path(__file__).parent,
    _PLUGINS / "paged_attention" / "native",
    _PLUGINS / "decoder_layers",
    _PLUGINS / "sampling" / "native",
)
SOURCES = tuple(file for place in _PLACES for file in sorted(place.glob("*.cpp")))
HEADERS = tuple(file for place in _PLACES for file in sorted(place.glob("*.h")))
CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c")  # as Linux names them
OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-s")
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 600
_UNFINISHED = ".compiling-"
_DIGEST = hashlib.sha256().digest_size


class CompilerError(Exception):
    """What the compiler said."""


def missing_cpu_flags() -> list[str]:
    """What the kernels need and this CPU lacks."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return list(CPU_FLAGS)
    return [flag for flag in CPU_FLAGS if flag not in _cpu_flags()]


def why_not() -> str:
    """Why the kernels cannot be compiled for this machine; empty when they can."""
    if missing := missing_cpu_flags():
        return f"this CPU lacks {', '.join(missing)}"
    if compiler() is None:
        wanted = os.environ.get("CXX")
        return f"$CXX is {wanted!r}, which is not found" if wanted else f"no C++ compiler is installed ({', '.join(_COMPILERS)})"
    if not (_openvino() / "include" / "oneapi" / "tbb").is_dir() or _libraries() is None:
        return "this installation of openvino brings no headers"
    return ""


def compiler() -> tuple[str, ...] | None:
    """Program and arguments: $CXX, which may have some (`ccache g++`), or the first that is installed."""
    for words in [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [[name] for name in _COMPILERS]:
        if words and (found := shutil.which(words[0])):
            return found, *words[1:]
    return None


def identity() -> str:
    """Hash of everything that shapes the library: sources, options, compiler, OpenVINO."""
    digest = hashlib.sha256()
    for file in (*SOURCES, *HEADERS):
        digest.update(file.read_bytes())
    digest.update(repr((OPTIONS, CPU_FLAGS, _version(compiler()), ov.get_version())).encode())
    return digest.hexdigest()


def compile_library(path: Path) -> None:
    """Write the library to `path`, whole or not at all.  Raises  CompilerError, OSError"""
    libraries = _libraries()
    found = compiler()
    assert libraries is not None and found is not None, why_not()
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in path.parent.glob(f"{_UNFINISHED}*"):  # by a process that was killed
        with contextlib.suppress(OSError):
            if abandoned.stat().st_mtime < time.time() - 2 * _TIMEOUT_S:
                shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as directory:
        made = Path(directory) / path.name
        command = [
            *found, *OPTIONS, *(f"-m{flag.replace('_', '')}" for flag in CPU_FLAGS), f"-I{_openvino() / 'include'}",
            *map(str, SOURCES), "-o", str(made), f"-L{_openvino() / 'libs'}", *(f"-l:{library}" for library in libraries),
        ]  # fmt: skip
        status, stderr = _run(command, Path(directory))
        if status:
            said = [line for line in stderr.splitlines() if "error" in line] or stderr.splitlines() or ["nothing"]
            raise CompilerError(f"{shlex.join(found)} ended with status {status}: {said[0].strip()}")
        if not made.is_file():
            raise CompilerError(f"{shlex.join(found)} ended well but wrote nothing")
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())  # behind what a loader reads
        os.replace(made, path)


def _run(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """(status, stderr). What the compiler started ends with this call, however that ends; its files go to `directory`."""
    environment = {**os.environ, "TMPDIR": str(directory)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            _, stderr = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompilerError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
            raise
    return process.returncode, stderr


def is_whole(path: Path) -> bool:
    """Whether `path` is what `compile_library` wrote. A library that was cut short would not raise when loaded, but crash."""
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _openvino() -> Path:
    return Path(ov.__file__).parent


def _libraries() -> list[str] | None:
    """File names of OpenVINO and TBB, which are loaded already when an engine loads the kernels."""
    found = [sorted((_openvino() / "libs").glob(pattern)) for pattern in ("libopenvino.so.*", "libtbb.so.*")]
    return [paths[0].name for paths in found] if all(found) else None


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        lines = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(lines[1].split()) if lines else frozenset()


@lru_cache(maxsize=4)
def _version(command: tuple[str, ...] | None) -> str:
    if command is None:
        return ""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60).stdout.partition("\n")[0]
    except (OSError, subprocess.TimeoutExpired):  # compiling will say so
        return ""
