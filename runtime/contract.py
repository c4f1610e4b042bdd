"""What builder and runtime agree on: engine I/O names and dtypes, bundle layout, manifest schema. Standard library only.

Canonical graph, one ragged step: T query tokens of B sequences, R rows of logits wanted.

    input_ids, positions          [T]     int64
    slot_mapping                  [T]     int32   block_id * block_size + offset
    block_table                   [B, M]  int32   padded with 0
    query_start_loc               [B+1]   int32   cumulative query lengths, starts with 0
    seq_lens                      [B]     int32   cached + new tokens
    logits_indices                [R]     int64   rows of T whose logits are wanted
    k_pool.i, v_pool.i            [num_blocks, block_size, Hkv, D] in the canonical graph; opaque per target
 →  logits                        [R, V]  float32
    next_token                    [R]     int64   argmax of logits, so plain greedy never moves [R, V]
    k_pool_out.i, v_pool_out.i    canonical graph only; compiled targets update the pools in place
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import BuildError, ChecksumMismatch, EngineError, EngineNotFound, ManifestMismatch

DOMAIN = "forgeline"
DOMAIN_VERSION = 1
ATTENTION_OP = "PagedAttention"

INPUT_IDS = "input_ids"
POSITIONS = "positions"
SLOT_MAPPING = "slot_mapping"
BLOCK_TABLE = "block_table"
QUERY_START_LOC = "query_start_loc"
SEQ_LENS = "seq_lens"
LOGITS_INDICES = "logits_indices"
LOGITS = "logits"
NEXT_TOKEN = "next_token"
STEP_INPUTS = (INPUT_IDS, POSITIONS, SLOT_MAPPING, BLOCK_TABLE, QUERY_START_LOC, SEQ_LENS, LOGITS_INDICES)
INPUT_DTYPES = {
    INPUT_IDS: "int64",
    POSITIONS: "int64",
    SLOT_MAPPING: "int32",
    BLOCK_TABLE: "int32",
    QUERY_START_LOC: "int32",
    SEQ_LENS: "int32",
    LOGITS_INDICES: "int64",
}


def k_pool(layer: int) -> str:
    return f"k_pool.{layer}"


def v_pool(layer: int) -> str:
    return f"v_pool.{layer}"


def k_pool_out(layer: int) -> str:
    return f"k_pool_out.{layer}"


def v_pool_out(layer: int) -> str:
    return f"v_pool_out.{layer}"


MANIFEST_FILE = "manifest.json"
PLAN_DIR = "plan"
TOKENIZER_DIR = "tokenizer"
REPORT_JSON = "report.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, as the KV pool sees it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0  # tokens; 0 = full attention


@dataclass(frozen=True)
class ModelSpec:
    name: str
    architecture: str  # the Hugging Face class, e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_parameters: int = 0
    source_sha256: str = ""  # hash of config and weights


@dataclass(frozen=True)
class PrecisionSpec:
    """Storage type of each class of tensors: fp32, bf16, fp8, int8, int4."""

    name: str  # what --precision said
    weights: str
    activations: str
    embedding: str
    lm_head: str
    group_size: int = 0  # weights per scale along the input axis; 0 = per output channel
    emulated: bool = False  # arithmetic stands in for hardware this target lacks
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KVSpec:
    key_dtype: str  # f32, f16, bf16, u8, u4, i8, f8
    value_dtype: str
    block_size: int  # tokens
    layout: str  # opaque name; the executor that owns it checks it
    bytes_per_token: int  # keys and values of all layers, scales included


@dataclass(frozen=True)
class Manifest:
    """Facts about an engine, fixed when it is built. See `load_manifest`."""

    schema_version: int
    forgeline_version: str
    created: str  # ISO 8601, UTC
    target: str  # cpu, reference, tensorrt, tensorrt-rtx
    model: ModelSpec
    precision: PrecisionSpec
    kv_cache: KVSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    libraries: dict[str, str]  # library → version the plan depends on
    plan: dict[str, str]  # role → path inside the bundle, e.g. {"model": "plan/model.onnx"}
    checksums: dict[str, str]  # path inside the bundle → sha256
    weight_bytes: int
    gpu_architectures: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()
    profiles: tuple[dict[str, Any], ...] = ()
    plugin_sha256: str = ""
    calibration_sha256: str = ""
    accuracy: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)  # seconds per stage, peak_rss_bytes
    knee: dict[str, Any] = field(default_factory=dict)  # measured batch knee, when known

    def to_json(self) -> str:
        return strict_json(dataclasses.asdict(self), "the manifest")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        data = dict(data)
        model = dict(data["model"])
        model["layers"] = tuple(LayerSpec(**layer) for layer in model["layers"])
        model["eos_token_ids"] = tuple(model["eos_token_ids"])
        data["model"] = ModelSpec(**model)
        data["precision"] = PrecisionSpec(**data["precision"])
        data["kv_cache"] = KVSpec(**data["kv_cache"])
        for name in ("gpu_architectures", "buckets", "profiles"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)


def cache_root() -> Path:
    """Of builder and runtime alike.  Raises  RuntimeError when this user has no home and XDG_CACHE_HOME is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forgeline"


def strict_json(content: Mapping[str, Any], what: str) -> str:
    """JSON that every reader accepts.  Raises  BuildError for NaN and infinity, which JSON has no word for."""
    try:
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        name = ".".join(_not_finite(content)) or "a figure"
        raise BuildError(f"{name} of {what} is not a finite number; check the checkpoint's weights") from error


def _not_finite(content: Any) -> tuple[str, ...]:
    """The path to the first NaN or infinity."""
    items: Any = (
        content.items() if isinstance(content, Mapping) else enumerate(content) if isinstance(content, (list, tuple)) else ()
    )
    for key, value in items:
        if isinstance(value, float) and not math.isfinite(value):
            return (str(key),)
        if below := _not_finite(value):
            return (str(key), *below)
    return ()


def file_sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def load_manifest(engine: str | os.PathLike[str], *, verify_checksums: bool = True) -> Manifest:
    """Read and check an engine directory.

    Raises  EngineNotFound, ManifestMismatch, ChecksumMismatch, EngineError; library versions are checked by the executor.
    """
    try:
        return _load_manifest(Path(engine), verify_checksums)
    except OSError as error:  # no permission, a failing disk
        raise EngineError(
            f"{error.filename or engine} cannot be read ({error.strerror or error}); "
            "make the engine readable for this user or copy it again"
        ) from error


_SIZES = (
    "vocab_size", "hidden_size", "layers", "num_heads", "num_kv_heads", "head_dim", "block_size", "bytes_per_token",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip


def _load_manifest(root: Path, verify_checksums: bool) -> Manifest:
    path = root / MANIFEST_FILE
    if not path.is_file():
        raise EngineNotFound(
            f"{root} is not an engine: it has no {MANIFEST_FILE}; build one with `builder build MODEL --output {root}`"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data.get("schema_version")
        if schema != SCHEMA_VERSION:
            raise ManifestMismatch(
                f"{path}: schema_version is {schema} but this runtime reads {SCHEMA_VERSION}; "
                "rebuild the engine with this version of forgeline"
            )
        manifest = Manifest.from_dict(data)
        _check_types(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is damaged ({type(error).__name__}: {error}); rebuild the engine") from error
    for name, expected in manifest.checksums.items():
        file = root / name
        if not file.is_file():
            raise EngineNotFound(f"{root}: {name} is missing; rebuild the engine or copy the whole directory again")
        if verify_checksums and (found := file_sha256(file)) != expected:
            raise ChecksumMismatch(
                f"{root}: {name} was altered, sha256 {found[:12]}… is not the manifest's {expected[:12]}…; "
                "rebuild the engine or copy it again"
            )
    return manifest


def _check_types(spec: Any, path: str = "") -> None:
    """Raises TypeError or ValueError for a field that is not what its dataclass declares, or a size below 1."""
    for name, declared in typing.get_type_hints(type(spec)).items():
        value, where = getattr(spec, name), path + name
        kinds = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
        if type(value) not in {typing.get_origin(kind) or kind for kind in kinds}:
            raise TypeError(f"{where} is {value!r}")
        if name in _SIZES and not (value and (not isinstance(value, int) or value > 0)):
            raise ValueError(f"{where} is {value!r}")
        if dataclasses.is_dataclass(value):
            _check_types(value, f"{where}.")
        elif isinstance(value, (tuple, dict)):
            kind = typing.get_args(declared)[0 if isinstance(value, tuple) else 1]
            for each in value.values() if isinstance(value, dict) else value:
                if dataclasses.is_dataclass(kind):
                    _check_types(each, f"{where}.")
                elif kind in (int, str) and type(each) is not kind:
                    raise TypeError(f"{where} has {each!r}")


def check_library(manifest: Manifest, library: str, installed: str) -> None:
    """Raise ManifestMismatch unless `installed` is the version the plan was built with."""
    built = manifest.libraries.get(library)
    if built is None:
        raise ManifestMismatch(f"the manifest does not say which {library} the engine was built with; rebuild the engine")
    if built != installed:
        raise ManifestMismatch(
            f"the engine was built with {library} {built} but {installed} is installed; "
            f"install {library}=={built} or rebuild the engine"
        )
