"""--fallback on the TensorRT targets: layers are raised to types these targets have, and refusals name precisions they have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder import build, gate
from builder.config import PRECISIONS, BuildConfig
from builder.quantize import LayerReport
from builder.stages import Stages
from builder.targets.tensorrt_quantize import SCHEMES
from runtime.errors import AccuracyGate, BuildError

LAYERS = {"a": LayerReport("int4", 30.0, 30.0, 50.0), "b": LayerReport("int4", 10.0, 10.0, 50.0)}


def _accept(monkeypatch: pytest.MonkeyPatch, precision: str, ratios: list[float]) -> tuple[Any, list[dict[str, str]]]:
    """Attempts whose perplexity ratios are given; what was raised in each."""
    tried: list[dict[str, str]] = []

    def attempt(*arguments: Any) -> build.Attempt:
        overrides = arguments[-1]
        tried.append(dict(overrides))
        layers = {name: layer for name, layer in LAYERS.items() if overrides.get(name) != "fp16"}
        plan = SimpleNamespace(quantization=SimpleNamespace(layers=layers, is_quantized=True), wider=SCHEMES[precision].wider)
        plan.kv_cache = SimpleNamespace(key_dtype="f16", value_dtype="f16")
        monkeypatch.setattr(build, "_parts", lambda *_: {})
        manifest = SimpleNamespace(plan={}, kv_cache=plan.kv_cache, precision=SimpleNamespace(details={}))
        accuracy = {"perplexity_ratio": ratios[len(tried) - 1], "mean_kl": 0.01}
        return build.Attempt(plan, manifest, accuracy)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "_attempt", attempt)
    config = BuildConfig("m", Path("e"), target="tensorrt-rtx", precision=precision, fallback=True)
    stages = Stages(build.STAGES, quiet=True)
    return build._accepted(config, stages, Path(), None, Path(), 64), tried  # type: ignore[arg-type]


def test_layers_are_raised_until_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, tried = _accept(monkeypatch, "int4", [1.3, 1.2, 1.01])
    assert tried == [{}, {"b": "int8"}, {"b": "fp16", "a": "int8"}]
    assert attempt.accuracy["fallback"]["raised"] == {"b": "fp16", "a": "int8"}


def test_when_nothing_is_left_to_raise_the_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccuracyGate, match=r"--precision fp8 .* rose by 30.00 %"):
        _accept(monkeypatch, "fp8", [1.3] * 9)


@pytest.mark.parametrize(
    ("precision", "remedy"), [("int8-sq", "--precision int8"), ("int8", "--precision bf16"), ("int4", "--precision int8")]
)
def test_remedies_are_precisions_of_the_target(precision: str, remedy: str) -> None:
    found = gate.remedies(precision, "f16", "f16", {}, static=True, fallback=True, available=PRECISIONS["tensorrt-rtx"])
    assert [each for each in found if each.startswith("--precision")] == [remedy]


@pytest.mark.parametrize(
    ("precision", "scales", "reason"),
    [
        ("fp8", "dynamic", "they are static"),
        ("int8", "static", "its inputs stay 16 bit"),
        ("fp16", "dynamic", "its inputs stay 16 bit"),
    ],
)
def test_scales_the_target_does_not_have(precision: str, scales: str, reason: str) -> None:
    from builder.targets.tensorrt_engine import _check_activation_scales

    config = BuildConfig("m", Path("e"), target="tensorrt-rtx", precision=precision, activation_scales=scales)
    with pytest.raises(BuildError, match=f"--activation-scales {scales} is not available .* {reason}"):
        _check_activation_scales(config, SCHEMES[precision].activations)


def test_static_scales_may_be_asked_for_by_name() -> None:
    from builder.targets.tensorrt_engine import _check_activation_scales

    for precision, scales in (("fp8", "static"), ("int8-sq", "static"), ("fp16", "auto"), ("fp8", "auto")):
        config = BuildConfig("m", Path("e"), target="tensorrt-rtx", precision=precision, activation_scales=scales)
        _check_activation_scales(config, SCHEMES[precision].activations)
