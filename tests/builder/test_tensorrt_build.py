"""Real TensorRT-RTX plans of the trained tiny Llama, built with no GPU: precision, plugins, manifest, refusals."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest

from builder.build import build
from builder.config import BuildConfig
from builder.targets import tensorrt
from builder.targets.tensorrt_adapter import Adapter, shared_object
from plugins.paged_attention import cubins
from plugins.paged_attention import tensorrt as plugin
from runtime.contract import load_manifest
from runtime.errors import BuildError

rtx = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
pytest.importorskip("triton", reason="no kernel compiler for this Python version or platform")

TINY_LLAMA = Path(__file__).parent.parent / "models" / "tiny-llama"
NUM_LAYERS = 4
MOST_BYTES = {"fp16": 2.001, "fp8": 1.15, "int8": 1.15, "int4": 0.6}  # of attention and mlp weights in the plan, with scales


def _build(output, precision, **options):
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "eval_tokens": 0} | options
    result = build(BuildConfig(str(TINY_LLAMA), output, target="tensorrt-rtx", precision=precision, **options), quiet=True)
    return load_manifest(output), result.report


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    root = tmp_path_factory.mktemp("tensorrt")
    return {
        "fp16": _build(root / "fp16", "fp16", target_arch=("sm89",), eval_tokens=200),
        "fp8": _build(root / "fp8", "fp8", target_arch=("sm89",), eval_tokens=200, kv_cache_dtype="f16:i8"),
        "int4": _build(root / "int4", "int4", target_arch=("sm89",)),
        "root": root,
    }


@pytest.mark.parametrize("precision", ["fp16", "fp8", "int4"])
def test_plan_keeps_its_precision_and_has_a_plugin_per_layer(engines, precision):
    manifest, report = engines[precision]
    ((arch, figures),) = report["plans"].items()
    assert arch == "sm89" and manifest.gpu_architectures == ("sm89",)
    assert figures["attention_plugins"] == NUM_LAYERS
    assert figures["layers_bytes_per_weight"] <= MOST_BYTES[precision]
    assert figures["layers_bytes_per_weight"] == pytest.approx(report["weights"]["layers_bytes_per_weight"], rel=0.01)
    assert figures["second_copies"] == 0
    assert figures["launches_per_plugin"] == {"decode": 4, "mixed": 7}
    plan = engines["root"] / precision / manifest.plan["sm89"]
    assert plan.stat().st_size == figures["plan_bytes"] == manifest.weight_bytes
    assert figures["build_seconds"] > 0 and report["build"]["peak_rss_bytes"] > 100 << 20
    print(f"{precision}: {figures['build_seconds']} s, peak {report['build']['peak_rss_bytes'] >> 20} MiB, {figures}")


@pytest.mark.parametrize("precision", ["bf16", "int8", "int8-sq"])
def test_the_other_precisions_and_the_other_architecture(tmp_path, monkeypatch, precision):
    """Without kernels, which take most of a build's time."""
    monkeypatch.setattr(tensorrt, "build_plan", partial(tensorrt.build_plan, with_kernels=False))
    manifest, report = _build(tmp_path / "engine", precision, target_arch=("sm120",), calibration_samples=2)
    ((arch, figures),) = report["plans"].items()
    assert arch == "sm120" and figures["attention_plugins"] == NUM_LAYERS and figures["second_copies"] == 0
    least, most = (1.99, 2.001) if precision == "bf16" else (1.0, 1.15)
    assert least <= figures["layers_bytes_per_weight"] <= most
    assert manifest.precision.activations == {"bf16": "bf16", "int8": "fp16", "int8-sq": "int8"}[precision]
    assert (manifest.calibration_sha256 != "") == (precision == "int8-sq")


def test_workspace_reaches_the_builder_and_timings_are_said_to_be_none(tmp_path, monkeypatch, capsys):
    """TensorRT-RTX 1.7 deprecates its timing cache, which does nothing; warnings are errors here, so nothing calls it."""
    monkeypatch.setattr(tensorrt, "build_plan", partial(tensorrt.build_plan, with_kernels=False))
    limits, flags = [], []
    original = Adapter._add_profile

    def spy(self, config, *rest):
        limits.append(config.get_memory_pool_limit(rtx.MemoryPoolType.WORKSPACE))
        flags.append(config.get_flag(rtx.BuilderFlag.REQUIRE_USER_ALLOCATION))
        original(self, config, *rest)

    monkeypatch.setattr(Adapter, "_add_profile", spy)
    config = BuildConfig(
        str(TINY_LLAMA), tmp_path / "e", target="tensorrt-rtx", precision="fp16", target_arch=("sm89",), workspace=512 << 20,
        timing_cache=tmp_path / "rtx.cache", max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, eval_tokens=0,
    )  # fmt: skip
    build(config)
    assert limits == [512 << 20] * 2
    assert flags == [True] * 2  # or a step that allocates would fail only when it is captured, on the GPU
    with pytest.raises(
        BuildError, match=r"--workspace is 65536 bytes but .* step needs (\d+) on sm89; give at least (\d+)M"
    ) as refused:
        build(dataclasses.replace(config, output=tmp_path / "less", workspace=1 << 16), quiet=True)
    least = int(re.search(r"at least (\d+)M", str(refused.value))[1])
    build(dataclasses.replace(config, output=tmp_path / "least", workspace=least << 20), quiet=True)
    assert "--timing-cache has no effect: TensorRT-RTX times no kernels" in capsys.readouterr().err
    assert not (tmp_path / "rtx.cache").exists()


class Timings:
    """What the builder configuration of `tensorrt` has of a timing cache."""

    def __init__(self, accepts=True):
        self.accepts, self.given, self.cache = accepts, None, None

    def create_timing_cache(self, serialized):
        self.given = bytes(serialized)
        return self

    def set_timing_cache(self, cache, ignore_mismatch):
        assert cache is self and ignore_mismatch is False
        self.cache = cache
        return self.accepts

    def get_timing_cache(self):
        return self.cache

    def serialize(self):
        return self.given + b" and more"


def test_timings_are_read_and_written(tmp_path):
    adapter, path = Adapter("tensorrt-rtx"), tmp_path / "timings" / "a.cache"
    for expected in (b"", b" and more"):
        config = Timings()
        adapter._read_timing_cache(config, path)
        assert config.given == expected
        adapter._write_timing_cache(config, path)
    assert path.read_bytes() == b" and more and more"
    with pytest.raises(BuildError, match=r"a\.cache is not a timing cache of tensorrt_rtx .* for this GPU; remove it"):
        adapter._read_timing_cache(Timings(accepts=False), path)
    untouched = Timings()
    adapter._read_timing_cache(untouched, None)
    adapter._write_timing_cache(untouched, None)
    assert untouched.given is None


def test_manifest_of_a_gpu_engine(engines):
    manifest, _ = engines["fp16"]
    assert manifest.target == "tensorrt-rtx" and manifest.libraries == {"tensorrt_rtx": rtx.__version__}
    assert manifest.buckets == (1, 2)
    assert [(p["kind"], p["num_tokens"], p["buckets"]) for p in manifest.profiles] == [
        ("decode", [1, 1, 2], [1, 2]),
        ("mixed", [1, 64, 64], [64]),
    ]
    assert manifest.plugin_sha256 == plugin.sha256()
    kv = manifest.kv_cache
    assert (kv.key_dtype, kv.value_dtype, kv.block_size, kv.bytes_per_token) == ("f16", "f16", 64, NUM_LAYERS * 2 * 2 * 64 * 2)
    assert manifest.calibration_sha256 == ""
    precision = manifest.precision
    assert (precision.weights, precision.activations, precision.embedding) == ("fp16", "fp16", "fp16")


def test_calibrated_engine(engines):
    manifest, _ = engines["fp8"]
    assert len(manifest.calibration_sha256) == 64
    assert (manifest.precision.weights, manifest.precision.activations, manifest.precision.lm_head) == ("fp8", "fp8", "int8")
    assert (manifest.kv_cache.key_dtype, manifest.kv_cache.value_dtype) == ("f16", "i8")
    assert manifest.kv_cache.bytes_per_token == NUM_LAYERS * 2 * 64 * (2 + 1)
    assert manifest.precision.details["calibrated_kv_scales"] is True


def test_accuracy_is_that_of_the_lowered_graph(engines):
    """fp16 rounding costs almost nothing; E4M3 with per-tensor inputs and int8 values a little, and it shows."""
    fp16, fp8 = engines["fp16"][0].accuracy, engines["fp8"][0].accuracy
    assert 0 < fp16["mean_kl"] < 1e-5 and fp16["top1_agreement"] > 0.98
    assert 1e-5 < fp8["mean_kl"] < 0.02 and abs(fp8["perplexity_ratio"] - 1) < 0.05


def test_engine_carries_the_kernels_its_plugin_launches(engines):
    manifest, _ = engines["fp16"]
    directory = engines["root"] / "fp16" / manifest.plan["kernels"]
    names = {path.stem for path in (directory / "sm89").glob("*.cubin")}
    assert {"plan_t64", "attention_decode_d64_fp16_kfp16_vfp16_b64", "write_d64_fp16_kfp16_vfp16", "sample"} <= names
    assert {cubins.load(directory, 89, name).arch for name in names} == {89}
    listed = {name for name in manifest.checksums if name.startswith("plan/kernels/")}
    assert len(listed) == 2 * len(names)


def test_unchanged_inputs_build_nothing(engines):
    place = engines["root"] / "int4"
    before = (place / "manifest.json").stat().st_mtime_ns
    _build(place, "int4", target_arch=("sm89",))
    assert (place / "manifest.json").stat().st_mtime_ns == before


def test_report_page_has_the_plan(engines):
    root = engines["root"] / "fp8"
    assert "attention_plugins" in (root / "report.html").read_text()
    assert json.loads((root / "report.json").read_text())["precision"] == "fp8"


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precision": "fp32"},
            "--precision fp32 is not available for --target tensorrt-rtx; its precisions are fp16, bf16, fp8",
        ),
        (
            {"target_arch": ("sm90",)},
            "--target tensorrt-rtx does not build for sm90; it builds for sm75, sm80, sm86, sm89, sm120",
        ),
        ({"kv_cache_dtype": "bf16"}, "attention computes in fp16, so 16-bit keys and values are f16, not bf16"),
        ({"kv_cache_dtype": "u8"}, "cannot store the KV cache as u8"),
        ({"optimization_level": 6}, "--optimization-level is 6"),
        ({"workspace": 0}, "--workspace is 0"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message):
    with pytest.raises(BuildError, match=message):
        _build(tmp_path / "x", options.pop("precision", "fp16"), **options)
    assert not (tmp_path / "x").exists()


def test_the_library_for_data_centre_gpus_is_named_when_it_is_missing(tmp_path):
    try:
        import tensorrt  # noqa: F401
    except ImportError:
        with pytest.raises(BuildError, match=r"--target tensorrt needs the module tensorrt, .* pip install tensorrt-cu13"):
            Adapter("tensorrt")


def test_data_centre_target_names_one_architecture():
    assert tensorrt.resolve_architectures("tensorrt", ["sm90"]) == ("sm90",)
    for given in ((), ("sm90", "sm100")):
        with pytest.raises(BuildError, match="must name its architecture alone"):
            tensorrt.resolve_architectures("tensorrt", given)
    assert tensorrt.resolve_architectures("tensorrt-rtx", ()) == ("sm89", "sm120")


def test_gpu_options_are_refused_for_the_cpu(tmp_path):
    with pytest.raises(BuildError, match="--target-arch is for the TensorRT targets"):
        BuildConfig("m", tmp_path, target_arch=("sm89",))


def test_a_library_can_be_loaded_under_another_name(tmp_path):
    """What the parser of TensorRT-RTX needs, tried on the C library."""
    import platform

    path = tmp_path / "x.so"
    path.write_bytes(shared_object(b"libforgeline_alias.so", b"libc.so.6", {"x86_64": 62, "aarch64": 183}[platform.machine()]))
    ctypes.CDLL(str(path))
    again = ctypes.CDLL("libforgeline_alias.so")  # found by its name, since it is loaded
    assert again.abs(-5) == 5
