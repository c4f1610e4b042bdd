"""Loading a TensorRT engine: what is captured, what is refused and in which words, what is given back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import (
    BLOCK,
    NUM_BLOCKS,
    NUM_LAYERS,
    SLOT_BYTES,
    FakeContext,
    FakeTensorRT,
    Rig,
    make_manifest,
    placed,
    step,
)

from builder.targets.buckets import token_buckets
from plugins.paged_attention import tensorrt as plugin
from runtime import __version__
from runtime.config import ResolvedConfig, RuntimeConfig, resolve
from runtime.contract import KVSpec, Manifest
from runtime.driver import read_driver
from runtime.errors import EngineError, ManifestMismatch, UnsupportedFeature
from runtime.executors import kv_cache_free_bytes, load_executor, tensorrt_load
from runtime.executors.tensorrt_buckets import mixed_sizes
from runtime.executors.tensorrt_pools import LAYOUT, RESERVE_BYTES, check_fits

SHAPES = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (64, 8, 8), (100, 8, 8)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_loading_captures_every_bucket_after_a_plain_run(rig: Rig) -> None:
    executor = rig.executor()
    calls = rig.gpu.calls
    assert rig.engine.shapes_run == SHAPES  # each once for real
    assert calls.count("execute_async_v3") == 2 * len(SHAPES)
    assert calls.count("cudaGraphUpload") == len(SHAPES)
    assert rig.registered == [rig.directory]
    assert calls.index("load_weights_async") < calls.index("cudaMalloc"), "weights are on their way while memory is allocated"
    assert executor.kv_cache_bytes() == NUM_BLOCKS * BLOCK * 2 * NUM_LAYERS * SLOT_BYTES


def test_closing_gives_everything_back(rig: Rig) -> None:
    executor = rig.executor()
    _ = executor.execute(step([([1], 0, [3])])).logits
    executor.execute(step(placed([[1] * 40, [1] * 40])))
    executor.close()
    assert rig.gpu.device == {} and rig.gpu.host == {}


def test_a_context_that_cannot_be_captured_runs_without_a_graph(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeContext, "is_stream_capturable", lambda self, stream: False, raising=False)
    executor = rig.executor()
    assert executor.execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]
    assert "cudaGraphLaunch" not in rig.gpu.calls
    assert "without a CUDA graph" in caplog.text


OLDER = {"plugin_sha256": "badbad", "forgeline_version": "0.0.1"}


@pytest.mark.parametrize(
    "facts, gpu, error, message",
    [
        ({"libraries": {"tensorrt": "11.3.0"}}, {}, ManifestMismatch, r"built with tensorrt 11\.3\.0 but 11\.4\.0 is installed"),
        (OLDER, {}, ManifestMismatch, r"badbad but .* has c0ffee; .*, or install forgeline==0\.0\.1$"),
        ({"plugin_sha256": "badbad", "forgeline_version": __version__}, {}, ManifestMismatch, r"has c0ffee; rebuild the engine$"),
        ({}, {"num_devices": 0}, EngineError, r"needs an NVIDIA GPU \(sm80, sm89\) but CUDA finds none"),
        ({}, {"capability": 90}, ManifestMismatch, r"for sm80, sm89 but this GPU, Paper GPU, is sm90; .*--target-arch sm90"),
        ({"weight_bytes": 9 << 30}, {}, ManifestMismatch, r"weights need 9216 MiB but 7936 of the GPU's 8192 MiB are free"),
        ({"max_num_seqs": 32}, {}, ManifestMismatch, r"plan takes steps of 8 sequences and 100 tokens but the manifest says 32"),
        ({"buckets": (1, 16)}, {}, ManifestMismatch, r"no optimization profile of the plan allows a step of"),
        ({"kv_cache": KVSpec("u4", "f16", BLOCK, LAYOUT, 64)}, {}, ManifestMismatch, r"KV cache holds u4 but this runtime knows"),
        ({"kv_cache": KVSpec("f16", "f8", BLOCK, LAYOUT, 64)}, {}, ManifestMismatch, r"built for 64 bytes .* lays out 24"),
        ({"kv_cache": KVSpec("f16", "f16", BLOCK, "other", 64)}, {}, ManifestMismatch, r"layout is 'other' but"),
        ({"plan": {"sm80": "x"}}, {}, ManifestMismatch, r"no plan for sm89, only sm80"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, facts: dict, gpu: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Rig(tmp_path, **gpu).executor(**facts)
    assert "\n" not in str(caught.value) and type(caught.value) is error


def test_too_little_memory_says_how_many_tokens_would_fit(tmp_path: Path) -> None:
    manifest = make_manifest()
    block = BLOCK * manifest.kv_cache.bytes_per_token
    check_fits(manifest, 1000, RESERVE_BYTES + 1000 * block, 1 << 30)
    with pytest.raises(ManifestMismatch, match=r"cache of 4004 tokens .* 4000 tokens would fit; set num_blocks=1000 or less"):
        check_fits(manifest, 1001, RESERVE_BYTES + 1000 * block, 1 << 30)
    rig = Rig(tmp_path, memory_bytes=RESERVE_BYTES + (4 << 20))
    with pytest.raises(ManifestMismatch, match=r"tokens would fit"):
        rig.executor(num_blocks=1 << 20)


def test_a_library_that_cannot_defer_weights_loads_them_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeTensorRT.ICudaEngine, "load_weights_async")
    assert rig.executor().execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]
    assert "load_weights_async" not in rig.gpu.calls


def test_a_plan_that_says_it_does_not_run_here_is_refused(rig: Rig) -> None:
    """TensorRT-RTX reads it from the plan's header."""

    class Runtime(rig.trt.Runtime):
        def get_engine_validity(self, buffer: memoryview) -> tuple[int, int]:
            return (2, 0x10) if bytes(buffer).startswith(b"plan") else (0, 0)

    rig.trt.Runtime = Runtime
    rig.trt.EngineValidity = type("EngineValidity", (), {"INVALID": 2})
    with pytest.raises(ManifestMismatch, match=r"tensorrt says that .*model\.plan does not run .* \(diagnostics 0x10\)"):
        rig.executor()


def test_a_damaged_plan_is_refused(rig: Rig) -> None:
    (rig.directory / "plan" / "model.plan").write_bytes(b"nonsense")
    with pytest.raises(EngineError, match=r"cannot read .*model\.plan"):
        rig.executor()


def test_a_plan_per_architecture_is_chosen_by_the_gpu(rig: Rig) -> None:
    (rig.directory / "plan" / "model.plan").rename(rig.directory / "plan" / "sm89.plan")
    rig.executor(plan={"sm80": "plan/sm80.plan", "sm89": "plan/sm89.plan"})


def test_a_step_larger_than_every_profile_is_refused(rig: Rig) -> None:
    executor = rig.executor()
    with pytest.raises(UnsupportedFeature, match=r"128 tokens exceeds the 100 .*--max-num-batched-tokens 128"):
        executor.execute(step(placed([[1] * 64, [1] * 64])))
    assert executor.execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]


def test_free_memory_for_the_cache_leaves_out_the_weights(rig: Rig) -> None:
    assert tensorrt_load.free_bytes_beside_weights(make_manifest(), rig.backend) == (8 << 30) - (1 << 20) - RESERVE_BYTES


def test_the_real_libraries_say_that_there_is_no_gpu() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.runtime")
    if read_driver().gpus:
        pytest.skip("there is a GPU")
    manifest = make_manifest(target="tensorrt-rtx", libraries={"tensorrt_rtx": trt.__version__}, plugin_sha256=plugin.sha256())
    with pytest.raises(EngineError, match=r"needs an NVIDIA GPU \(sm80, sm89\) but CUDA finds none"):
        kv_cache_free_bytes(manifest)
    with pytest.raises(ManifestMismatch, match="attention plugin none"):
        kv_cache_free_bytes(dataclasses.replace(manifest, plugin_sha256=""))


def test_missing_library_is_named() -> None:
    with pytest.raises(EngineError, match=r"target tensorrt needs tensorrt 11\.4\.0, which cannot be imported"):
        tensorrt_load.default_backend(make_manifest())


@pytest.mark.parametrize("largest", [48, 64, 512, 700, 8192])
def test_mixed_buckets_are_those_the_builder_made_profiles_for(largest: int) -> None:
    assert tuple(mixed_sizes(largest)) == token_buckets(largest)


def resolved(manifest: Manifest, **options: Any) -> ResolvedConfig:
    return resolve(RuntimeConfig(num_blocks=64, **options), manifest, free_bytes=1 << 30)


def test_targets_choose_the_executor_and_options_must_fit_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr("runtime.executors.tensorrt.TensorRTExecutor", lambda *arguments: made.append(arguments))
    for target in ("tensorrt", "tensorrt-rtx"):
        manifest = make_manifest(target=target)
        load_executor(tmp_path, manifest, resolved(manifest))
        assert made.pop() == (tmp_path, manifest, 64)
    with pytest.raises(ManifestMismatch, match=r"max_num_batched_tokens=101 exceeds the 100 tokens per step"):
        load_executor(tmp_path, manifest, resolved(manifest, max_num_batched_tokens=101))
    longer = make_manifest(max_model_len=256)
    with pytest.raises(ManifestMismatch, match=r"enable_chunked_prefill=false: max_model_len=256 exceeds the 100"):
        load_executor(tmp_path, longer, resolved(longer, enable_chunked_prefill=False))
    with pytest.raises(ManifestMismatch, match=r"target 'abacus' but this runtime runs cpu, tensorrt, tensorrt-rtx"):
        load_executor(tmp_path, make_manifest(target="abacus"), resolved(manifest))


def test_the_cache_is_sized_from_what_is_free_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_load, "free_bytes_beside_weights", lambda manifest: 2 * 10 * BLOCK * 64)
    manifest = make_manifest(kv_cache=KVSpec("f16", "f16", BLOCK, LAYOUT, 64), max_model_len=BLOCK)
    assert resolve(RuntimeConfig(max_num_seqs=8), manifest, kv_cache_free_bytes(manifest)).num_blocks == 8
    assert (
        resolve(RuntimeConfig(), dataclasses.replace(manifest, max_model_len=8), kv_cache_free_bytes(manifest)).num_blocks == 10
    )
    assert kv_cache_free_bytes(dataclasses.replace(manifest, target="cpu")) is None
