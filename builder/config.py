"""What a build was asked for. `BuildConfig.key` names everything that can change the result, so equal keys mean equal engines."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BuildError

TARGETS = ("cpu",)
PRECISIONS = ("fp32", "bf16", "int8", "int4")
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "openvino", "numpy")


@dataclass(frozen=True)
class BuildConfig:
    source: str
    output: Path
    target: str = "cpu"
    precision: str = "fp32"
    kv_cache_dtype: str = "auto"
    group_size: int | None = None  # int4 only; None: the largest of 128, 64, 32 that divides every layer's width
    max_model_len: int | None = None  # None: what the model was trained for, at most 8192
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    eval_tokens: int = 2048  # held-out tokens for the accuracy report; 0 = none
    use_cache: bool = True

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise BuildError(f"unknown target {self.target!r}; the targets are {', '.join(TARGETS)}")
        if self.precision not in PRECISIONS:
            raise BuildError(
                f"unknown precision {self.precision!r}; the precisions for {self.target} are {', '.join(PRECISIONS)}"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BuildError(f"--{name.replace('_', '-')} is {value} but must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BuildError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is smaller than --max-num-seqs {self.max_num_seqs}, "
                f"so a full batch could not decode; raise it to at least {self.max_num_seqs}"
            )
        if self.eval_tokens < 0:
            raise BuildError(f"--eval-tokens is {self.eval_tokens} but must be 0 (no evaluation) or more")

    def key(self, source_sha256: str) -> str:
        """Hash of the model's content, every option that shapes the engine, this package's code and the libraries' versions."""
        options = dataclasses.asdict(self)
        for name in ("source", "output", "use_cache"):
            del options[name]
        return _digest({"source": source_sha256, "options": options, "code": code_sha256("builder", "plugins", "runtime")})


# What turns a checkpoint into the exported, fused graph; a change elsewhere leaves cached graphs valid.
CANONICAL_CODE = (
    "builder/attention_hook.py", "builder/checkpoint.py", "builder/export.py", "builder/families.py", "builder/fuse",
    "builder/normal_form.py", "builder/source.py", "plugins/paged_attention/op.py", "plugins/paged_attention/spec.py",
)  # fmt: skip


def canonical_key(source_sha256: str) -> str:
    """Names the exported and fused graph, which every precision and target of one model shares."""
    return _digest({"source": source_sha256, "code": code_sha256(*CANONICAL_CODE)})


def _digest(parts: dict[str, object]) -> str:
    parts["libraries"] = {name: _version(name) for name in LIBRARIES}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_sha256(*parts: str) -> str:
    """Hash of this installation's own source under the given packages or files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for part in parts:
        place = root / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
