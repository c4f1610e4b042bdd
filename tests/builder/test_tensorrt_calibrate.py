"""What a TensorRT build calibrates: the given text, samples and method reach it, and nothing runs that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import fused

from builder import calibration, calibration_data
from builder.config import BuildConfig
from builder.targets import tensorrt_calibrate
from builder.targets.tensorrt_calibrate import Calibration, calibrate
from builder.targets.tensorrt_quantize import activation_names
from plugins.paged_attention.op import attach_functions
from runtime.errors import BuildError


class Bytes:
    """A tokenizer of bytes, for a vocabulary of 100."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + byte % 90 for byte in text.encode()]


@pytest.fixture(scope="module")
def canonical(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("canonical")
    ir.save(attach_functions(fused(exported("llama"))), place / "model.onnx")
    return place


@pytest.fixture
def run(canonical: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calibration]:
    monkeypatch.setattr(tensorrt_calibrate.Tokenizer, "load", lambda _: Bytes())

    def call(precision: str, kinds: tuple[str, str] = ("fp16", "fp16"), **options: Any) -> Calibration:
        options = {"eval_tokens": 0, "use_cache": False, **options}
        if "text" in options:
            options["calibration_data"] = tmp_path / "given.txt"
            options["calibration_data"].write_text(options.pop("text"))
        config = BuildConfig("m", tmp_path / "e", target="tensorrt-rtx", precision=precision, **options)
        return calibrate(config, canonical, ir.load(canonical / "model.onnx"), kinds, num_threads=1)

    return call


def test_the_given_text_is_the_one_that_is_run(run: Callable[..., Calibration], canonical: Path) -> None:
    text = "abcdefgh" * 100
    found = run("fp8", text=text, calibration_samples=1)
    assert list(found.stats) == activation_names(ir.load(canonical / "model.onnx"))
    assert {stats.num_rows for stats in found.stats.values()} == {512}  # one window of the 800
    assert found.sha256 == calibration_data.CalibrationSet((tuple(Bytes().encode(text)[:512]),)).sha256
    other = run("fp8", text="hgfedcba" * 100, calibration_samples=1)
    assert other.sha256 != found.sha256
    assert any(not np.array_equal(found.stats[name].channel_amax, other.stats[name].channel_amax) for name in found.stats)
    with pytest.raises(BuildError, match=r"given.txt has 5 tokens but at least 128 are needed"):
        run("fp8", text="short")


@pytest.mark.parametrize(
    ("precision", "kinds", "options", "ranges", "moments", "scales", "named"),
    [
        ("fp16", ("fp16", "fp16"), {"eval_tokens": 64}, False, False, False, False),
        ("int8", ("fp16", "fp16"), {}, False, False, False, False),
        ("int8", ("fp16", "fp16"), {"eval_tokens": 64}, True, False, False, False),  # to name the noisiest layers
        ("int8", ("fp16", "int8"), {}, False, False, True, True),
        ("int8-sq", ("fp16", "fp16"), {}, True, False, False, True),
        ("int4", ("fp16", "fp16"), {}, True, True, False, True),
        ("int4", ("fp16", "fp16"), {"calibration_samples": 0}, False, False, False, False),
        ("fp8", ("fp8", "fp8"), {}, True, True, True, True),
    ],
)
def test_what_each_precision_needs(
    run: Callable[..., Calibration],
    precision: str,
    kinds: tuple[str, str],
    options: dict,
    ranges: bool,
    moments: bool,
    scales: bool,
    named: bool,
) -> None:
    found = run(precision, kinds, text="The quick brown fox. " * 40, **options)
    assert bool(found.stats) == ranges
    assert {stats.hessian is not None for stats in found.stats.values()} == ({moments} if ranges else set())
    assert sorted(found.kv_scales) == ([0, 1] if scales else [])
    assert (found.sha256 != "") == named  # a text that only the report needs is not part of the engine


def test_scales_map_the_largest_magnitude_of_a_head_to_the_end_of_its_type(
    run: Callable[..., Calibration], canonical: Path
) -> None:
    found = run("fp16", ("fp8", "int8"), text="The quick brown fox. " * 40)
    model = ir.load(canonical / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "PagedAttention")
    names = {str(value.name): 1 for value in node.inputs[1:3] if value is not None}
    tokens = Bytes().encode("The quick brown fox. " * 40)
    key, value = calibration.calibrate(canonical / "model.onnx", tokens, names, num_threads=1).values()
    scales = found.kv_scales[0]
    np.testing.assert_allclose(scales[0], key / 448, rtol=1e-6)
    np.testing.assert_allclose(scales[1], value / 127, rtol=1e-6)


def test_scales_of_1_need_no_text(run: Callable[..., Calibration]) -> None:
    options = {"kv_cache_dtype": "f16:f8", "kv_cache_scales": "unit", "calibration_samples": 0}
    found = run("fp16", ("fp16", "fp8"), **options)
    assert (found.stats, found.sha256) == ({}, "")
    for scales in found.kv_scales.values():
        for scale in scales:
            np.testing.assert_array_equal(scale, np.ones(2, np.float32))
    assert sorted(found.kv_scales) == [0, 1]
    calibrated = run("fp8", ("fp8", "fp8"), text="The quick brown fox. " * 40, kv_cache_dtype="f8", kv_cache_scales="unit")
    assert calibrated.stats and np.array_equal(calibrated.kv_scales[1][0], np.ones(2))


@pytest.mark.parametrize(
    ("precision", "kv", "message"),
    [("fp8", "auto", "--precision fp8 needs calibration"), ("int8", "i8", "--kv-cache-dtype i8 needs calibration")],
)
def test_no_samples_where_they_are_needed(run: Callable[..., Calibration], precision: str, kv: str, message: str) -> None:
    kinds = ("fp16", "fp16") if kv == "auto" else ("int8", "int8")
    with pytest.raises(BuildError, match=f"{message}, but --calibration-samples is 0; leave it out"):
        run(precision, kinds, kv_cache_dtype=kv, calibration_samples=0)
