"""The accuracy gate: what it refuses, what it says, and that a fallback ends where the limits hold.

The hard model computes the tiny Llama's function with three input channels and two pairs of key channels 60 times as large. On
both, the measure is KL: the tiny Llama knows little, so its perplexity moves less than its predictions.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import outlier_model
import pytest
from cpu_engines import relative_error

from builder import gate
from builder.build import build
from builder.calibrate import calibrate
from builder.config import PRECISIONS, BuildConfig
from builder.judge import parts
from builder.kv_noise import cache_noise
from builder.quantize import LayerReport, kv_cache
from runtime.errors import AccuracyGate

TINY_LLAMA = Path(__file__).parents[1] / "models" / "tiny-llama"
MAX_KL = 0.02


def accuracy(ratio: float, kl: float = 0.0) -> dict[str, float]:
    return {"perplexity_ratio": ratio, "mean_kl": kl}


def test_limits_are_inclusive_and_named() -> None:
    limits = gate.Limits(max_ppl_increase=5.0, max_kl=0.1)
    assert gate.check(accuracy(1.05 - 1e-9, 0.1), limits).passed
    assert gate.check(accuracy(0.9), limits).passed
    verdict = gate.check(accuracy(1.0712, 0.25), limits)
    assert verdict.failures == ("perplexity rose by 7.12 % (limit 5 %)", "mean KL divergence is 0.25 (limit 0.1)")
    assert verdict.exceeded == ("--max-ppl-increase", "--max-kl")
    refusal = gate.refusal("bf16", "f16", "f16", gate.check(accuracy(1.0, 0.25), limits), {}, {}, static=False, fallback=False)
    assert "a higher --max-kl, if" in str(refusal) and "--max-ppl-increase" not in str(refusal)
    assert not gate.check(accuracy(float("nan")), limits).passed


def test_perplexity_alone_does_not_let_predictions_change() -> None:
    assert gate.Limits.of() == gate.Limits(5.0, pytest.approx(2 * math.log(1.05)))
    assert gate.Limits.of(15.0, 0.5) == gate.Limits(15.0, 0.5)
    verdict = gate.check(accuracy(0.99, 0.12), gate.Limits.of())
    assert verdict.failures == ("mean KL divergence is 0.12 (limit 0.09758)",)
    assert gate.check(accuracy(0.99, 0.12), gate.Limits.of(15.0)).passed


LAYERS = {
    "a": LayerReport("int4", 30.0, 30.0, 50.0),
    "b": LayerReport("int4", 10.0, 10.0, 50.0),
    "c": LayerReport("int4", 20.0, 20.0, 50.0),
    "head": LayerReport("int8", 15.0, 15.0, 50.0),
}


def test_the_noisiest_layers_are_raised_first_each_by_one_step() -> None:
    first = gate.raised("int4", LAYERS, {}, 1)
    assert first == {"b": "int8"}
    assert gate.raised("int4", LAYERS, first, 2) == {"b": "bf16", "head": "bf16"}
    assert gate.raised("int4", LAYERS, {"b": "bf16"}, 2) == {"b": "bf16", "head": "bf16", "c": "int8"}
    everything = dict.fromkeys(LAYERS, "bf16")
    assert gate.raised("int4", LAYERS, everything, 4) == everything


def test_a_refusal_has_the_figures_the_layers_and_what_the_loss_points_at() -> None:
    verdict = gate.check(accuracy(1.3), gate.Limits.of())
    told = {name: {"mean_kl": kl} for name, kl in (("weights", 0.01), ("activations", 0.28), ("kv_cache", 0.3))}
    error = gate.refusal("int8", "u8", "u8", verdict, LAYERS, told, static=True, fallback=False)
    assert str(error) == (
        "--precision int8 with KV cache u8:u8 loses too much: perplexity rose by 30.00 % (limit 5 %); mean KL with, in turn, "
        "weights 0.0100, activations 0.2800, kv cache 0.3000; noisiest layers: b (10.0 dB), head (15.0 dB), c (20.0 dB), "
        "a (30.0 dB); try --activation-scales dynamic, --precision int8-sq, which moves outliers of activations into the "
        "weights, or --fallback, which raises the precision of the noisiest layers"
    )
    told["kv_cache"]["mean_kl"] = 0.6
    cache = {"layers.1.keys": 9.04, "layers.0.values": 31.0, "layers.0.keys": 30.5}
    error = gate.refusal("fp16", "f8", "f8", verdict, LAYERS, told, static=False, fallback=True, cache=cache, unit_scales=True)
    assert (
        "kv cache 0.6000; noisiest of the KV cache: layers.1.keys (9.0 dB), layers.0.keys (30.5 dB), layers.0.values (31.0 dB); "
        "noisiest layers: b (10.0 dB)" in str(error)
    )
    assert str(error).endswith(
        "; try --kv-cache-scales calibrated, --kv-cache-dtype bf16:f8 or bf16, which keep keys wider, or --kv-cache-dtype f32"
    )
    error = gate.refusal("bf16", "f8", "f8", verdict, {}, told, static=False, fallback=False, cache=cache)
    assert "--fallback" not in str(error)  # no layer is quantized
    for precision, sixteen in (("fp16", "f16"), ("bf16", "bf16")):  # on a GPU the precision's own 16 bits only
        found = gate.remedies(precision, "f8", "f8", told, static=False, fallback=True, available=PRECISIONS["tensorrt-rtx"])
        assert found[0] == f"--kv-cache-dtype {sixteen}:f8 or {sixteen}, which keep keys wider"
        assert "--kv-cache-dtype f32" not in found
    (first, *_) = gate.remedies("fp8", "f8", "f8", told, static=True, fallback=False)
    assert first.startswith("--kv-cache-dtype bf16:f8 or bf16")
    for value, expected in (("u4", ["u8", "f16", "f32"]), ("u8", ["f16", "f32"])):  # pairs that the CPU target has
        found = gate.remedies("int8", "u8", value, told, static=False, fallback=True)
        assert [each.split()[-1] for each in found if each.startswith("--kv-cache-dtype")] == expected


@pytest.fixture(scope="module")
def hard_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hard")
    outlier_model.write(directory)
    return directory


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def built(model: Path, output: Path, **options: Any) -> dict[str, Any]:
    options = {"precision": "int8", "activation_scales": "static", "kv_cache_dtype": "f32", "calibration_samples": 4, **options}
    options = {"eval_tokens": 300, "max_kl": MAX_KL, "max_ppl_increase": 100, **options}
    return build(BuildConfig(str(model), output, **options), quiet=True).report


def test_static_int8_of_the_hard_model_is_refused_by_name(hard_model: Path, own_cache: None, tmp_path: Path) -> None:
    with pytest.raises(AccuracyGate) as refusal:
        built(hard_model, tmp_path / "engine")
    text = str(refusal.value)
    assert re.search(r"mean KL divergence is 0\.\d+ \(limit 0\.02\)", text)
    named = re.findall(r"model\.layers\.\d\.(\S+) \((\S+) dB\)", text)
    assert len(named) == 5
    assert {name for name, _ in named} <= {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"}  # what reads the channels
    assert "--activation-scales dynamic" in text and "--precision int8-sq" in text and "--fallback" in text
    assert not (tmp_path / "engine").exists()


def test_the_limits_that_nobody_set_refuse_it_too(hard_model: Path, own_cache: None, tmp_path: Path) -> None:
    with pytest.raises(AccuracyGate, match=r"mean KL divergence is 0\.\d+ \(limit 0\.09758\)"):
        built(hard_model, tmp_path / "engine", max_kl=None, max_ppl_increase=5.0, kv_cache_dtype="auto", eval_tokens=1024)
    report = built(TINY_LLAMA, tmp_path / "plain", max_kl=None, max_ppl_increase=5.0, kv_cache_dtype="auto", eval_tokens=1024)
    assert report["accuracy"]["gate"] == {"max_ppl_increase": 5.0, "max_kl": pytest.approx(2 * math.log(1.05)), "passed": True}


def test_smoothquant_saves_it(hard_model: Path, own_cache: None, tmp_path: Path) -> None:
    report = built(hard_model, tmp_path / "engine", precision="int8-sq")
    assert report["accuracy"]["mean_kl"] < MAX_KL / 10
    assert report["accuracy"]["gate"]["passed"]
    assert json.loads((tmp_path / "engine" / "manifest.json").read_text())["precision"]["emulated"]


def test_fallback_raises_the_layers_that_read_the_channels(hard_model: Path, own_cache: None, tmp_path: Path) -> None:
    report = built(hard_model, tmp_path / "engine", fallback=True)
    assert report["accuracy"]["mean_kl"] <= MAX_KL
    record = report["accuracy"]["fallback"]
    assert [step["raised"] for step in record["steps"]] == [0, 1, 3, 7][: len(record["steps"])]
    assert record["steps"][0]["mean_kl"] > MAX_KL
    assert set(record["raised"].values()) == {"bf16"}
    assert {name.split(".", 3)[3] for name in record["raised"]} <= {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"}
    assert report["weights"]["layers"].keys().isdisjoint(record["raised"])


def test_the_hard_model_computes_what_the_trained_one_does(hard_model: Path) -> None:
    import torch

    ids = torch.tensor([tokens(128)])
    with torch.no_grad():
        hard, plain = (outlier_model.load(model)(ids).logits.numpy() for model in (hard_model, TINY_LLAMA))
    assert 0 < relative_error(hard, plain) < 1e-5


def tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(5, 2048, count)]


def test_narrow_keys_are_refused_where_wide_keys_pass(hard_model: Path, own_cache: None, tmp_path: Path) -> None:
    """Integers with a scale per head cannot hold key channels 60 times apart. E4M3 rounds each number by itself: it holds them by
    a calibrated scale and saturates with a scale of 1. Values and 16-bit keys stand it all, and so does the model as trained.
    """
    strict = gate.Limits(max_ppl_increase=100, max_kl=0.002)

    def passing(model: Path, *choices: tuple[str, str]) -> list[bool]:
        directory = tmp_path / model.name
        built(model, directory, precision="fp32", activation_scales="auto", eval_tokens=0, max_kl=None)
        graph = directory / "plan" / "canonical.onnx"
        return [gate.check(kv_loss(graph, *choice), strict).passed for choice in choices]

    pairs = (("i8", "calibrated"), ("f8", "calibrated"), ("f8", "unit"), ("bf16:f8", "unit"), ("bf16:i8", "calibrated"))
    assert passing(hard_model, *pairs) == [False, True, False, True, True]
    assert passing(TINY_LLAMA, ("i8", "calibrated"), ("f8", "unit")) == [True, True]


@pytest.mark.parametrize(("pair", "scales"), [("i8", "calibrated"), ("f8", "unit")])
def test_the_noisiest_keys_are_those_of_the_layers_made_hard(pair: str, scales: str, own_cache: None, tmp_path: Path) -> None:
    hard = (1, 3)
    outlier_model.write(tmp_path / "model", inputs=False, layers=hard)
    built(tmp_path / "model", tmp_path / "e", precision="fp32", activation_scales="auto", eval_tokens=0, max_kl=None)
    graph = tmp_path / "e" / "plan" / "canonical.onnx"
    assert cache_noise(graph, [tokens(128)], num_threads=1) == {}  # f32 loses nothing
    rounded = with_cache(graph, pair, scales)
    levels = cache_noise(rounded, [tokens(128), tokens(40)], num_threads=1)
    assert levels != cache_noise(rounded, [tokens(40)], num_threads=1)  # all windows count
    assert len(levels) == 8 and list(levels.values()) == sorted(levels.values())
    assert set(list(levels)[:2]) == {f"layers.{layer}.keys" for layer in hard}
    plain = levels["layers.0.keys"], levels["layers.2.keys"]
    assert max(levels[f"layers.{layer}.keys"] for layer in hard) < min(plain) - 6  # half the amplitude


def kv_loss(graph: Path, pair: str, scales: str) -> dict[str, float]:
    return parts(graph, with_cache(graph, pair, scales), tokens(256), num_threads=1)["kv_cache"]


def with_cache(graph: Path, pair: str, scales: str) -> Path:
    model = ir.load(graph)
    key, value = kv_cache.parse_pair(pair)
    if scales == "unit":
        amax = kv_cache.unit_scales(model, key, value)
    else:
        amax = calibrate(graph, tokens(256), kv_cache.cached_tensors(model, key, value), num_threads=1)
    kv_cache.insert(model, key, value, amax)
    rounded = graph.with_name("rounded.onnx")
    ir.save(model, rounded)
    return rounded
