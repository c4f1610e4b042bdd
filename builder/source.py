"""A model as files: find it, name it, hash it, and see from headers alone whether it is whole. Imports no torch.

Source   a Hugging Face directory, a .gguf file, or a hub id (downloaded when the hub can be reached)
Raises   ModelNotFound, UnsupportedModel, CorruptCheckpoint
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import families, quantized
from builder.model_zoo import MODELS
from builder.quantized.layout import Format, Header
from runtime.contract import file_sha256
from runtime.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
_DOWNLOAD = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16,
    "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    given: str  # as the user wrote it
    path: Path  # directory or .gguf file

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def name(self) -> str:
        return self.path.stem if self.is_gguf else (self.given if not Path(self.given).exists() else self.path.resolve().name)

    def weight_files(self) -> list[Path]:
        if self.is_gguf:
            return [self.path]
        for pattern in WEIGHT_PATTERNS:  # as transformers: .bin only where there is no safetensors
            if files := sorted(self.path.glob(pattern)):
                return files
        return []


def resolve(source: str) -> Source:
    """Find the files of `source`; for a hub id, download them or use the local copy of an earlier download."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ModelNotFound(f"{source} has no {CONFIG}; give a Hugging Face model directory, a .gguf file or a hub id")
        return Source(source, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{source} is a file but not .gguf; give the model's directory, a .gguf file or a hub id")
        return Source(source, path)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(source):
        names = ", ".join(MODELS)
        raise ModelNotFound(
            f"{source} does not exist; give a Hugging Face model directory, a .gguf file, a hub id or one of {names}"
        )
    return Source(source, _download(source))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_DOWNLOAD)))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and OSError alike
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{hub_id} is not a local path and could not be fetched from the hub ({reason}); "
            "give a local directory or .gguf file, or check the name and the network"
        ) from error


def read_config(source: Source) -> dict[str, Any]:
    return _read_json(source.path / CONFIG)


def quantization(source: Source) -> Format | None:
    """How the weights of the checkpoint are quantized; None when they are not, and for a GGUF file, which transformers reads."""
    if source.is_gguf:
        return None
    modelopt = source.path / quantized.MODELOPT_CONFIG
    found = _read_json(modelopt) if modelopt.is_file() else None
    return quantized.find(read_config(source).get("quantization_config"), found, source.given)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        return data
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error}); copy the checkpoint again") from error


def check_generation_config(source: Source) -> None:
    """Only what the runtime reads: the special tokens."""
    path = source.path / GENERATION_CONFIG
    if not path.is_file():
        return
    for name, value in _read_json(path).items():
        if name not in ("bos_token_id", "eos_token_id", "pad_token_id") or value is None:
            continue
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CorruptCheckpoint(f"{path}: {name} is {value!r} but must be a token's number; correct the file or remove it")


def _shards(index: Path) -> set[str]:
    weights = _read_json(index).get("weight_map", {})
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise CorruptCheckpoint(f"{index}: weight_map must map each weight to its file; copy the checkpoint again")
    return set(weights.values())


def check(source: Source) -> None:
    """Everything that can be known from config.json, file sizes and headers; milliseconds whatever the model's size."""
    if source.is_gguf:
        with open(source.path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise CorruptCheckpoint(f"{source.path} does not begin with GGUF; copy the file again")
        return
    families.check_config(read_config(source), source.given)
    if not any((source.path / name).is_file() for name in TOKENIZER_FILES):
        raise CorruptCheckpoint(
            f"{source.given} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files beside {CONFIG}"
        )
    check_generation_config(source)
    files = source.weight_files()
    for index in sorted(source.path.glob("*.index.json")):
        shards = _shards(index)
        missing = sorted(name for name in shards if not (source.path / name).is_file())
        if missing and not (index.name.startswith("pytorch_model") and files and files[0].suffix == ".safetensors"):
            raise CorruptCheckpoint(
                f"{source.given} lacks {len(missing)} of the {len(shards)} weight files in {index.name} ({missing[0]}); "
                "copy the checkpoint again"
            )
    if not files:
        raise CorruptCheckpoint(f"{source.given} has no weights (*.safetensors or pytorch_model*.bin); copy the checkpoint again")
    for path in files:
        if path.suffix == ".safetensors":
            check_safetensors(path)
    if (stored := quantization(source)) is not None:
        if files[0].suffix != ".safetensors":
            raise UnsupportedModel(
                f"{source.given}: the quantized weights are in {files[0].name} but only *.safetensors is read; convert them"
            )
        quantized.check(stored, headers(source))


def check_safetensors(path: Path) -> None:
    """Compare the header's shapes and offsets with each other and with the size of the file."""
    again = "copy the file again"
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CorruptCheckpoint(f"{path} is truncated: {size} bytes do not hold its header; {again}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [0]
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                bits = math.prod(entry["shape"]) * _DTYPE_BITS[entry["dtype"]]
                if end < begin or (end - begin) * 8 != bits:
                    raise ValueError(f"{name} has {end - begin} bytes but its shape needs {bits // 8}")
                ends.append(end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{path} has a damaged header ({type(error).__name__}: {error}); {again}") from error
    if 8 + length + max(ends) != size:
        raise CorruptCheckpoint(f"{path} has {size} bytes but its header describes {8 + length + max(ends)}; {again}")


def headers(source: Source) -> dict[str, Header]:
    """Every tensor of its safetensors files."""
    found: dict[str, Header] = {}
    for path in source.weight_files():
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                found[name] = Header(entry["dtype"], tuple(entry["shape"]))
    return found


def _hashed_files(source: Source) -> Iterator[Path]:
    if source.is_gguf:
        yield source.path
        return
    yield from source.weight_files()
    for pattern in ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"):
        yield from sorted(source.path.glob(pattern))


@functools.lru_cache
def _file_sha256(path: Path, size: int, mtime_ns: int) -> str:
    """A build asks twice: for its cache key and for the manifest. Tens of gigabytes need not be read twice."""
    return file_sha256(path)


def sha256(source: Source) -> str:
    """Over names and contents of config, weights and tokenizer; the location does not count."""
    digest = hashlib.sha256()
    for path in _hashed_files(source):
        name = "model.gguf" if source.is_gguf else path.name
        status = path.stat()
        digest.update(f"{name}\0{_file_sha256(path, status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def num_weights(source: Source) -> int:
    """At least so many values; exact for safetensors, elsewhere what the bytes hold in 32 bits each."""
    files = source.weight_files()
    if not files or files[0].suffix != ".safetensors":
        return sum(os.path.getsize(path) // 4 for path in files)
    stored = quantization(source)
    per_item = {} if stored is None else {"I32": 32 // stored.bits, "U8": 8 // stored.bits}
    return sum(header.size * per_item.get(header.dtype, 1) for header in headers(source).values())
