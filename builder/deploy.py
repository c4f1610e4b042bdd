"""`builder deploy`: make an engine a model in a Triton model repository.

Writes NAME/config.pbtxt, from the tensor table and the options, and NAME/1/model.py, which imports the runtime. The engine is
referred to by its path, or copied beside model.py. All or nothing: a hidden directory becomes NAME by a rename.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from builder.bundle import disk_errors, require_space, tree_bytes
from runtime.contract import Manifest, load_manifest
from runtime.errors import BuildError, InvalidRequest
from runtime.serving.options import ENGINE_DIR, ServingOptions, parse_options
from runtime.serving.tensors import INPUTS, OUTPUTS, TensorSpec

HEADER = "# Written by `builder deploy`; deploy again to change it."
MODEL_PY = """\
\"\"\"Loaded by Triton's Python backend.\"\"\"

from runtime.serving.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
ENGINE_COPY = "engine"


def deploy(
    engine_dir: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    name: str,
    *,
    options: Mapping[str, str] | None = None,
    copy: bool = False,
) -> Path:
    """Write REPOSITORY/NAME and return its path; an earlier deployment of that name is replaced.

    Raises  EngineError and its kinds for a bad engine, InvalidRequest for a bad option or name, BuildError, OutOfDisk.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise InvalidRequest(f"the model name {name!r} must be made of letters, digits, '_', '-' and '.'")
    engine, target = Path(engine_dir).resolve(), Path(repository).absolute() / name
    manifest = load_manifest(engine)
    options = dict(options or {})
    if ENGINE_DIR in options:
        raise InvalidRequest(f"{ENGINE_DIR} is not an option, it follows from the engine that is deployed; leave it out")
    serving = parse_options(options, manifest)
    if target.exists() and not _is_deployment(target):
        raise BuildError(f"{target} exists and was not written by `builder deploy`; choose another --name or remove it")
    with disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        if copy:
            require_space(target.parent, tree_bytes(engine), "a copy of the engine")
        staging = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=target.parent))
        try:
            version = staging / "1"
            version.mkdir()
            (version / "model.py").write_text(MODEL_PY, encoding="utf-8")
            if copy:
                shutil.copytree(engine, version / ENGINE_COPY)
            config = model_config(name, manifest, serving, {ENGINE_DIR: ENGINE_COPY if copy else str(engine), **options})
            (staging / "config.pbtxt").write_text(config, encoding="utf-8")
            staging.chmod(0o755)
            _replace(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _replace(staging: Path, target: Path) -> None:
    old = staging.with_name(staging.name + ".old")
    existed = target.exists()
    if existed:
        os.rename(target, old)
    try:
        os.rename(staging, target)
    except OSError:
        if existed:
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def model_config(name: str, manifest: Manifest, serving: ServingOptions, parameters: Mapping[str, str]) -> str:
    """The text of config.pbtxt."""
    about = (
        f"# {manifest.model.name}, {manifest.precision.name}, target {manifest.target}, max_model_len {manifest.max_model_len}"
    )
    lines = [
        HEADER,
        about.replace("\n", " "),
        f"name: {_quote(name)}",
        'backend: "python"',
        f"max_batch_size: {serving.max_batch_size}",
        f"model_transaction_policy {{ decoupled: {str(serving.decoupled).lower()} }}",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        *(_tensor("input", spec) for spec in INPUTS),
        *(_tensor("output", spec) for spec in OUTPUTS),
        *(f"parameters {{ key: {_quote(key)} value {{ string_value: {_quote(value)} }} }}" for key, value in parameters.items()),
    ]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec) -> str:
    dims = ", ".join(map(str, spec.dims))
    optional = " optional: true" if kind == "input" and spec.optional else ""
    return f'{kind} [ {{ name: "{spec.name}" data_type: TYPE_{spec.data_type} dims: [ {dims} ]{optional} }} ]'


def _quote(text: str) -> str:
    """A string literal of the protobuf text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _is_deployment(path: Path) -> bool:
    config = path / "config.pbtxt"
    return config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
