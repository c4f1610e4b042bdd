"""The kernels of an engine: compiled once into the cache, then copied, whichever model and directory the next build has."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from builder.targets import tensorrt_kernels
from plugins.paged_attention import aot, cubins, matrix
from plugins.paged_attention.cubins import KernelBinary
from plugins.paged_attention.matrix import KernelSpec
from runtime.errors import BuildError

WANTED = matrix.for_layers([64, 128], "fp16", "fp16", "int8", 64)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that only counts, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(aot, "compiler", lambda: "triton 3")
    names: list[str] = []

    def compile_kernel(spec: KernelSpec, arch: int) -> KernelBinary:
        names.append(spec.name)
        cubin = spec.name.encode()
        digest = hashlib.sha256(cubin).hexdigest()
        facts = spec.params, dict(spec.constants), spec.num_warps
        return KernelBinary(
            spec.name, arch, "k", *facts, 16384, 128, 0, "triton 3", aot.source_sha256(), digest, cubin, spec.num_stages
        )

    monkeypatch.setattr(aot, "compile_kernel", compile_kernel)
    return names


def test_the_second_build_compiles_nothing(compiled: list[str], tmp_path: Path) -> None:
    first = tensorrt_kernels.compile_kernels(WANTED, "sm89", tmp_path / "one")
    names = [kernel.name for kernel in matrix.for_variants(WANTED, 89)]
    assert compiled == names and len(set(names)) == 4 + 1 + 4 + 2 + 2  # attention, plan, merge, write, sampling
    (place,) = (tmp_path / "cache" / "forgeline" / "kernels").iterdir()
    assert sorted(path.stem for path in (place / "sm89").glob("*.cubin")) == sorted(names)
    assert tensorrt_kernels.compile_kernels(WANTED, "sm89", tmp_path / "two") == first
    assert compiled == names
    for name in names:
        assert cubins.load(tmp_path / "two", 89, name).cubin == name.encode()
    tensorrt_kernels.compile_kernels(WANTED[:2], "sm120", tmp_path / "three")
    assert len(compiled) == len(names) + len(matrix.for_variants(WANTED[:2], 120))


def test_occupancy_is_that_of_the_kernels(compiled: list[str], tmp_path: Path) -> None:
    """128 registers and 16 KiB: four blocks of 4 warps fit the registers, two of 8."""
    found = tensorrt_kernels.compile_kernels(WANTED, "sm89", tmp_path)
    assert found == {("decode", 64): 4, ("prefill", 64): 2, ("decode", 128): 4, ("prefill", 128): 2}
    assert tensorrt_kernels.attributes(found, 128) == {"decode_blocks_per_sm": 4, "prefill_blocks_per_sm": 2}


def test_a_rejected_kernel_fails_the_build(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = aot.compile_kernel
    monkeypatch.setattr(aot, "compile_kernel", lambda *job: dataclasses.replace(good(*job), spill_bytes=8))
    with pytest.raises(
        BuildError, match=r"a kernel for sm89 was rejected: attention_decode_d64_.* spills 8 bytes at 128 registers"
    ):
        tensorrt_kernels.compile_kernels(WANTED, "sm89", tmp_path / "out")
    assert not list(tmp_path.rglob("*.cubin"))
