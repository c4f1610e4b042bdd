"""Kernels that TensorRT-RTX compiled at one start are there at the next, on the fake of test_tensorrt_loading."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import FakeRuntimeConfig, Rig, step

from runtime.executors.tensorrt_jit import CompiledKernels, cache_place

CHECKSUM = "0123456789abcdef" * 4


class Cache:
    """An IRuntimeCache: holds `entries`, accepts what the same GPU wrote."""

    gpu = b"paper:"

    def __init__(self) -> None:
        self.entries: set[bytes] = set()

    def deserialize(self, blob: bytes) -> bool:
        if not bytes(blob).startswith(self.gpu):
            return False
        self.entries = set(bytes(blob)[len(self.gpu) :].split(b","))
        return True

    def serialize(self) -> bytes:
        return self.gpu + b",".join(sorted(self.entries))


class RtxConfig(FakeRuntimeConfig):
    """What tensorrt_rtx's IRuntimeConfig has beside tensorrt's; a context made of it compiles one kernel."""

    cuda_graph_strategy = "default"
    dynamic_shapes_kernel_specialization_strategy = "LAZY"

    def __init__(self, made: list[RtxConfig]) -> None:
        self.cache: Cache | None = None
        self.compiled = 0
        made.append(self)

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        kernel = b"kernel"
        self.compiled = int(kernel not in cache.entries)
        cache.entries.add(kernel)
        return True


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forgeline" / "jit"


def start(directory: Path, **facts: Any) -> list[RtxConfig]:
    """Load the engine as RTX would, run a step, close; the configurations its contexts were made of."""
    made: list[RtxConfig] = []
    directory.mkdir(exist_ok=True)
    place = directory / str(len(list(directory.iterdir())))
    place.mkdir()
    rig = Rig(place)
    rig.engine.create_runtime_config = lambda: RtxConfig(made)
    rig.trt.CudaGraphStrategy = type("CudaGraphStrategy", (), {"DISABLED": "DISABLED"})
    rig.trt.DynamicShapesKernelSpecializationStrategy = type("Strategy", (), {"EAGER": "EAGER"})
    executor = rig.executor(checksums={"plan/model.plan": CHECKSUM}, **facts)
    assert executor.execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]
    executor.close()
    return made


def test_the_second_start_compiles_nothing(tmp_path: Path, cache_home: Path) -> None:
    first = start(tmp_path / "engines")
    assert len(first) == 6 and [config.compiled for config in first] == [1, 0, 0, 0, 0, 0]  # one cache for all contexts
    assert {(c.cuda_graph_strategy, c.dynamic_shapes_kernel_specialization_strategy) for c in first} == {("DISABLED", "EAGER")}
    (file,) = cache_home.iterdir()
    assert file == cache_place(CHECKSUM) and file.read_bytes() == b"paper:kernel"
    os.utime(file, (1, 1))
    second = start(tmp_path / "engines")
    assert [config.compiled for config in second] == [0] * 6
    assert file.stat().st_mtime == 1, "an unchanged cache was written again"


def test_a_cache_of_another_gpu_is_replaced(tmp_path: Path, cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_home.mkdir(parents=True)
    (cache_home / CHECKSUM[:32]).write_bytes(b"other:kernel")
    caplog.set_level(logging.INFO, "forgeline.tensorrt")
    assert start(tmp_path / "engines")[0].compiled == 1
    assert "of another GPU, driver or TensorRT-RTX" in caplog.text
    assert (cache_home / CHECKSUM[:32]).read_bytes() == b"paper:kernel"


def test_a_cache_that_cannot_be_kept_costs_a_warning(tmp_path: Path, cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_home.parent.mkdir(parents=True)
    cache_home.write_text("a file where the directory should be")
    start(tmp_path / "engines")
    assert "cannot be kept" in caplog.text


def test_tensorrt_and_plans_without_a_checksum_have_no_cache(tmp_path: Path, cache_home: Path) -> None:
    kernels = CompiledKernels(cache_place(CHECKSUM))
    kernels.attach(FakeRuntimeConfig())
    kernels.save()
    assert cache_place("") is None
    unnamed, made = CompiledKernels(None), []
    unnamed.attach(RtxConfig(made))
    unnamed.save()
    assert made[0].cache is None and not cache_home.exists()


def test_the_fake_has_the_real_names() -> None:
    rtx = pytest.importorskip("tensorrt_rtx")
    for name in (
        "create_runtime_cache",
        "set_runtime_cache",
        "cuda_graph_strategy",
        "dynamic_shapes_kernel_specialization_strategy",
    ):
        assert hasattr(rtx.IRuntimeConfig, name), name
    assert hasattr(rtx.CudaGraphStrategy, "DISABLED") and hasattr(rtx.DynamicShapesKernelSpecializationStrategy, "EAGER")
    assert hasattr(rtx.IRuntimeCache, "serialize") and hasattr(rtx.IRuntimeCache, "deserialize")
