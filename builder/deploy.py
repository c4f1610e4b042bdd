"""`builder deploy`: make an engine a model in a Triton model repository.

Writes NAME/config.pbtxt, from the tensor table and the options, and NAME/1/model.py, which imports the runtime. The engine is
referred to by its path, or copied beside model.py. All or nothing: a directory made beside the repository becomes NAME by a
rename. Inside the repository Triton would take a half-written directory for a model and refuse to start, so that is where it is
made only when the repository is a file system of its own; what a killed process leaves is swept by the next deployment.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from builder.bundle import disk_errors, make_directory, require_space, tree_bytes
from builder.staging import LOCK_FILE, publish, staging_directory, sweep
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
CONFIG = "config.pbtxt"
ENGINE_COPY = "engine"
OTHER_PLACE = "choose another --repository"


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
    _check_replaceable(target)
    make_directory(target.parent, OTHER_PLACE)
    with disk_errors(target.parent, OTHER_PLACE):
        root = target.parent.resolve()
        _sweep(root, name)
        place, prefix = (root.parent, f"{root.name}.{name}") if _renames_between(root.parent, root, name) else (root, name)
        if copy:
            require_space(place, tree_bytes(engine), "a copy of the engine", OTHER_PLACE)
        with staging_directory(place, prefix) as staging, disk_errors(target.parent, OTHER_PLACE, written=staging):
            version = staging / "1"
            version.mkdir()
            (version / "model.py").write_text(MODEL_PY, encoding="utf-8")
            if copy:
                shutil.copytree(engine, version / ENGINE_COPY)
            config = model_config(name, manifest, serving, {ENGINE_DIR: ENGINE_COPY if copy else str(engine), **options})
            (staging / CONFIG).write_text(config, encoding="utf-8")  # last: without it nothing is a deployment
            staging.chmod(0o755)
            publish(staging, root / name, _check_replaceable)
    return target


def _check_replaceable(target: Path) -> None:
    if os.path.lexists(target) and not _is_deployment(target):
        raise BuildError(f"{target} exists and was not written by `builder deploy`; choose another --name or remove it")


def _renames_between(outside: Path, root: Path, name: str) -> bool:
    """Whether a rename into the repository works, tried with a file: a mount or missing rights can stand between."""
    try:
        with tempfile.NamedTemporaryFile(dir=outside, prefix=f".{root.name}.{name}.") as probe:
            moved = root / Path(probe.name).name
            os.link(probe.name, moved)
            moved.unlink()
    except OSError:
        return False
    return True


def _sweep(root: Path, name: str) -> None:
    """What killed deployments of `name` left in the repository; those of earlier versions are known by their config.pbtxt."""
    sweep(root, name)
    for entry in root.glob(f".{name}.*"):
        earlier = re.fullmatch(re.escape(f".{name}.") + r"[a-z0-9_]{8}(\.old)?", entry.name)
        if earlier and not (entry / LOCK_FILE).exists() and _is_deployment(entry):
            shutil.rmtree(entry, ignore_errors=True)


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
    config = path / CONFIG
    return config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
