"""The manifest on disk: strict JSON, and a sentence when it or a file it names cannot be read."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from runtime.contract import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    KVSpec,
    LayerSpec,
    Manifest,
    ModelSpec,
    PrecisionSpec,
    file_sha256,
    load_manifest,
)
from runtime.errors import BuildError, EngineError

MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    forgeline_version="0",
    created="2026-01-01T00:00:00+00:00",
    target="cpu",
    model=ModelSpec("m", "LlamaForCausalLM", "llama", 100, 64, (LayerSpec(4, 2, 16),), 256, eos_token_ids=(2,)),
    precision=PrecisionSpec("fp32", "fp32", "fp32", "fp32", "fp32"),
    kv_cache=KVSpec("f32", "f32", 32, "openvino", 256),
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    libraries={"openvino": "1"},
    plan={"model": "plan/model.onnx"},
    checksums={},
    weight_bytes=4,
)


def write(root: Path, **changes: Any) -> Path:
    (root / MANIFEST_FILE).write_text(dataclasses.replace(MANIFEST, **changes).to_json())
    return root


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    accuracy = {"perplexity": 16.5, "parts": [{"kl": 0.0}]}
    assert load_manifest(write(tmp_path, accuracy=accuracy)) == dataclasses.replace(MANIFEST, accuracy=accuracy)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_figure_that_json_cannot_say_is_refused_by_name(number: float) -> None:
    manifest = dataclasses.replace(MANIFEST, accuracy={"perplexity": 16.5, "parts": [{"kl": 0.0}, {"kl": number}]})
    with pytest.raises(BuildError) as caught:
        manifest.to_json()
    assert str(caught.value) == "accuracy.parts.1.kl of the manifest is not a finite number; check the checkpoint's weights"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("max_model_len",), "64", "TypeError: max_model_len is '64'"),
        (("max_num_seqs",), True, "TypeError: max_num_seqs is True"),
        (("kv_cache", "block_size"), 0, "ValueError: kv_cache.block_size is 0"),
        (("model", "layers"), [], "ValueError: model.layers is ()"),
        (("model", "eos_token_ids"), ["a"], "TypeError: model.eos_token_ids has 'a'"),
        (("plan",), {"model": 5}, "TypeError: plan has 5"),
        (("checksums",), None, "TypeError: checksums is None"),
    ],
)
def test_a_manifest_with_a_field_of_another_kind(place: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    data = json.loads(MANIFEST.to_json())
    load = data
    for name in place[:-1]:
        load = load[name]
    load[place[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(EngineError, match=rf"manifest.json is damaged \({re.escape(message)}\); rebuild the engine$"):
        load_manifest(tmp_path)


def test_a_manifest_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(EngineError) as caught:
        load_manifest(write(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/manifest.json cannot be read (Permission denied); make the engine readable for this user or copy it again"
    )


def test_a_file_that_the_disk_does_not_give(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    weights = tmp_path / "plan" / "weights.bin"
    weights.write_bytes(b"\x01")
    engine = write(tmp_path, checksums={"plan/weights.bin": file_sha256(weights)})
    assert json.loads((engine / MANIFEST_FILE).read_text())["checksums"] == load_manifest(engine).checksums
    weights.unlink()
    weights.symlink_to("/proc/self/mem")  # opens, and cannot be read
    with pytest.raises(EngineError, match=r" cannot be read \(Input/output error\); make the engine readable"):
        load_manifest(engine)
