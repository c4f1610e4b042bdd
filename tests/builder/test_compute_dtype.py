"""`--compute-dtype bf16`: what it changes in an engine, and where it is refused. Tests that need such a CPU skip on others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from cpu_engines import Built, Sequences, build, fused, prompt, relative_error

from builder.build import build as build_engine
from builder.config import BuildConfig
from builder.report import summary
from builder.targets import openvino_check
from builder.targets.openvino import resolve_kv_dtype
from builder.targets.openvino_check import Expected
from plugins.paged_attention import openvino as paged
from runtime.contract import load_manifest
from runtime.errors import BuildError, ManifestMismatch, PrecisionLost

TINY = Path(__file__).parent.parent / "models" / "tiny-llama"
PROMPT = prompt(50, 1)
needs_bf16 = pytest.mark.skipif(not paged.has_bf16(ov.Core()), reason="this CPU has no bf16 arithmetic")


@pytest.fixture(scope="module")
def engine(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """`engine(model, precision, compute_dtype)`, each built once."""
    cache: dict[tuple[str, ...], Built] = {}

    def get(model: str, precision: str, compute_dtype: str) -> Built:
        key = (model, precision, compute_dtype)
        if key not in cache:
            directory = tmp_path_factory.mktemp("-".join(key))
            cache[key] = build(exported(model), directory, precision, compute_dtype=compute_dtype)
        return cache[key]

    return get


def with_arithmetic(built: Built, arithmetic: str) -> Built:
    details = {**built.manifest.precision.details, "arithmetic": arithmetic}
    precision = dataclasses.replace(built.manifest.precision, details=details)
    return dataclasses.replace(built, manifest=dataclasses.replace(built.manifest, precision=precision))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": "f16"}, "unknown --compute-dtype f16; choose one of f32, bf16"),
        ({"target": "tensorrt", "precision": "fp16", "compute_dtype": "f32"}, "--compute-dtype f32 is for --target cpu, not for"),
        (
            {"compute_dtype": "bf16"},
            "not available for --precision fp32, which means f32 arithmetic too; choose --precision bf16",
        ),
        (
            {"precision": "fp8", "compute_dtype": "bf16"},
            "not available with --precision fp8, whose rounding is emulated in exact",
        ),
        (
            {"precision": "int8", "activation_scales": "static", "compute_dtype": "bf16"},
            "not available with --activation-scales static, whose rounding is emulated in exact f32; leave it out",
        ),
    ],
)
def test_combinations_that_contradict_themselves_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        BuildConfig("model", Path("engine"), **options)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int8-wo", "int8-sq", "int4"])
def test_precisions_that_may_compute_in_bf16(precision: str) -> None:
    config = BuildConfig("model", Path("engine"), precision=precision, compute_dtype="bf16")
    assert config.key("source") != BuildConfig("model", Path("engine"), precision=precision).key("source")


def test_a_cpu_without_bf16_builds_no_such_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "has_bf16", lambda core: False)
    config = BuildConfig(str(TINY), tmp_path / "engine", precision="int8", compute_dtype="bf16", eval_tokens=0)
    with pytest.raises(
        BuildError, match=r"needs a CPU with bf16 arithmetic .* but OpenVINO lists .*FP32.* for this one; leave it"
    ):
        build_engine(config, quiet=True)
    assert not (tmp_path / "engine").exists()


def test_a_cpu_without_bf16_loads_no_such_engine(engine: Callable[..., Built], monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine("llama", "int8", "f32")
    monkeypatch.setattr(paged, "has_bf16", lambda core: False)
    with pytest.raises(ManifestMismatch, match=r"computes in bf16, which this CPU lacks; .* rebuild it with --compute-dtype f32"):
        with_arithmetic(built, "bf16").executor()
    built.executor()  # f32 needs nothing
    with pytest.raises(ManifestMismatch, match=r"arithmetic is 'f16' but this runtime knows f32, bf16; rebuild the engine"):
        with_arithmetic(built, "f16").executor()


@pytest.mark.parametrize(("asked", "wanted"), [("f32", "bf16"), pytest.param("bf16", "f32", marks=needs_bf16)])
def test_arithmetic_of_another_type_than_asked_for_fails_the_build(asked: str, wanted: str, engine: Callable[..., Built]) -> None:
    core = ov.Core()
    options = paged.compile_options(
        key_dtype="u8", value_dtype="u8", head_dims=[], dynamic_quantization_group_size=0, num_threads=1, compute_dtype=asked
    )
    compiled = core.compile_model(
        paged.read_model(core, engine("llama", "int8", "f32").directory / "plan/model.onnx"), "CPU", options
    )
    openvino_check.check(compiled, Expected(norms=5), asked)
    message = rf"computes in {asked} instead of {wanted} \(2 PagedAttention:{asked}, 5 RMS:{asked}\); choose another --compute"
    with pytest.raises(PrecisionLost, match=message):
        openvino_check.check(compiled, Expected(norms=5), wanted)


def test_kv_cache_types_beside_bf16(exported: Callable[[str], Any]) -> None:
    model = fused(exported("llama"))
    auto = {precision: resolve_kv_dtype("auto", precision, model, "bf16") for precision in ("bf16", "int8", "int4")}
    assert auto == {"bf16": ("bf16", "bf16"), "int8": ("u8", "u8"), "int4": ("u8", "u8")}
    assert resolve_kv_dtype("u8:u4", "int8", model, "bf16") == ("u8", "u4")
    for dtype in ("f32", "f16"):
        with pytest.raises(
            BuildError, match=rf"computing in bf16, cannot store the KV cache as {dtype} .* auto, bf16, u8, u8:u4$"
        ):
            resolve_kv_dtype(dtype, "int8", model, "bf16")
    with pytest.raises(BuildError, match=r"computing in f32, cannot store the KV cache as bf16"):
        resolve_kv_dtype("bf16", "int8", model)
    assert resolve_kv_dtype("auto", "bf16", fused(exported("gemma2")), "bf16") == ("f32", "f32")  # attention is decomposed


@needs_bf16
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])  # paged and decomposed attention, experts
def test_an_engine_computes_in_bf16(name: str, engine: Callable[..., Built]) -> None:
    exact, fast = engine(name, "bf16", "f32"), engine(name, "bf16", "bf16")
    assert (exact.plan.details["arithmetic"], exact.plan.activations) == ("f32", "fp32")
    assert (fast.plan.details["arithmetic"], fast.plan.activations) == ("bf16", "bf16")
    assert fast.plan.runtime_types["RMS:bf16"] == exact.plan.runtime_types["RMS:f32"]
    executor = fast.executor()
    logits = Sequences(executor).run([{"a": PROMPT}])["a"]
    wanted = Sequences(exact.executor()).run([{"a": PROMPT}])["a"]
    assert 1e-3 < relative_error(logits, wanted) < 0.1  # a number of bf16 has 8 bits: 0.004; some layers of them
    assert np.array_equal(logits, Sequences(executor).run([{"a": PROMPT}])["a"])


@needs_bf16
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_layers_stay_quantized_beside_bf16(precision: str, engine: Callable[..., Built]) -> None:
    exact, fast = engine("llama", precision, "f32"), engine("llama", precision, "bf16")
    layers = {kind: count for kind, count in exact.plan.runtime_types.items() if kind.startswith("FullyConnected")}
    assert {kind: count for kind, count in fast.plan.runtime_types.items() if kind.startswith("FullyConnected")} == layers
    assert fast.plan.activations == "int8"
    assert fast.manifest.kv_cache == exact.manifest.kv_cache


@needs_bf16
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_sequence_in_bf16_continues_from_copied_blocks(precision: str, engine: Callable[..., Built]) -> None:
    built = engine("llama", precision, "bf16")
    executor = built.executor(num_blocks=5)
    assert executor.kv_cache_bytes() == built.manifest.kv_cache.bytes_per_token * 32 * 5
    sequences = Sequences(executor)
    sequences.step({"a": PROMPT})
    copies = [(block, sequences.free.pop()) for block in sequences.tables["a"]]
    executor.copy_blocks(copies)
    sequences.tables["fork"], sequences.lengths["fork"] = [to for _, to in copies], len(PROMPT)
    forked, _ = sequences.step({"fork": [7]})
    original, _ = sequences.step({"a": [7]})
    assert np.array_equal(forked, original)


@needs_bf16
def test_a_single_row_in_bf16_has_no_neighbour(engine: Callable[..., Built]) -> None:
    for compute_dtype, rows in (("f32", 2), ("bf16", 1)):
        executor = engine("llama", "int8", compute_dtype).executor()
        assert executor.min_prefill_tokens == rows
        Sequences(executor).step({"a": [5]})
        assert executor._request.get_tensor("input_ids").shape == [rows]
        Sequences(executor).step({"a": PROMPT[:33]})  # few lengths in either: each costs memory
        assert executor._request.get_tensor("input_ids").shape == [40]


@needs_bf16
def test_the_gate_judges_and_the_report_names_the_engine_in_bf16(tmp_path: Path) -> None:
    found = {}
    for compute_dtype in ("f32", "bf16"):
        config = BuildConfig(str(TINY), tmp_path / compute_dtype, precision="int8", compute_dtype=compute_dtype, eval_tokens=256)
        report = build_engine(config, quiet=True).report
        assert load_manifest(config.output).precision.details["arithmetic"] == compute_dtype
        assert ("arithmetic bf16" in summary(report)) == (compute_dtype == "bf16")
        found[compute_dtype] = report["accuracy"]
    assert found["f32"]["reference_perplexity"] == found["bf16"]["reference_perplexity"]
    assert 1e-5 < found["bf16"]["mean_kl"] - found["f32"]["mean_kl"] < 0.01
