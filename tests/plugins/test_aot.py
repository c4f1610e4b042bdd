"""Compiling the kernels without a GPU, and reading them back. Compilation runs in its own process, as a user starts it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import pytest

from plugins.paged_attention import aot, cubins, matrix, resource_table
from plugins.paged_attention.cubins import KernelBinary
from plugins.paged_attention.tuning import max_shared_bytes


def _compile(out, *arguments):
    pytest.importorskip("triton", reason="no kernel compiler for this Python version or platform")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "plugins.paged_attention.aot", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every branch of the sources, for one architecture with hardware E4M3 and WGMMA; what differs elsewhere in a second."""
    out = tmp_path_factory.mktemp("cubins")
    run = _compile(out, "--subset", "representative", "--arch", "sm90")
    assert run.returncode == 0, run.stdout + run.stderr
    run = _compile(out, "--subset", "representative", "--arch", "sm75,sm89,sm120", "--only", "attention_decode_d80")
    assert run.returncode == 0, run.stdout + run.stderr
    return out


def test_every_kernel_compiles_without_spills(compiled):
    names = [spec.name for spec in matrix.for_variants(matrix.representative(), 90)]
    assert len(names) == 4 + 2 + 4 + 4 + 2  # attention, plan, merge, write, sampling
    for name in names:
        binary = cubins.load(compiled, 90, name)
        assert binary.cubin[:4] == b"\x7fELF"
        assert binary.spill_bytes == 0
        assert 16 <= binary.registers <= 255
        assert binary.shared_bytes <= max_shared_bytes(90)
        assert binary.symbol.encode() in binary.cubin
        assert binary.params[-2:] == (("global_scratch", "*i8"), ("profile_scratch", "*i8"))


def test_parameters_are_those_of_the_source(compiled):
    from plugins.paged_attention import kernels

    binary = cubins.load(compiled, 90, "attention_decode_d128_fp16_kfp16_vfp16_b64")
    names = [name for name, _ in binary.params[:-2]] + list(binary.constants)
    assert names == kernels.paged_attention.arg_names
    assert dict(binary.params)["query"] == "*fp16" and dict(binary.params)["scale"] == "fp32"
    assert binary.constants["BLOCK_M"] == 16 and binary.num_warps == 4


@pytest.mark.parametrize("arch, kind", [(75, "fp8soft"), (89, "fp8"), (120, "fp8")])
def test_e4m3_is_read_by_hardware_where_it_exists(compiled, arch, kind):
    binary = cubins.load(compiled, arch, "attention_decode_d80_fp16_kfp8_vint8_b16_softcap")
    assert binary.constants["K_KIND"] == kind
    assert binary.shared_bytes <= max_shared_bytes(arch)


def test_a_second_run_compiles_nothing(compiled):
    files = {path: path.stat().st_mtime_ns for path in compiled.rglob("*.cubin")}
    run = _compile(compiled, "--subset", "representative", "--arch", "sm90")
    assert run.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in compiled.rglob("*.cubin")} == files


@pytest.mark.parametrize("change", ["nothing", "sources", "compiler", "constants", "warps", "stages"])
def test_a_kernel_is_kept_only_while_nothing_changed(tmp_path, monkeypatch, change):
    spec = matrix.plan(64)
    digest = hashlib.sha256(b"x").hexdigest()
    old = KernelBinary(spec.name, 80, "k", (), dict(spec.constants), 4, 0, 16, 0, "triton 3", aot.source_sha256(), digest, b"x")
    monkeypatch.setattr(aot, "compiler", lambda: "triton 3")
    stale: dict = {
        "sources": {"source_sha256": "older"},
        "compiler": {"compiler": "triton 2"},
        "constants": {"constants": {"TILE": 32}},
        "warps": {"num_warps": 8},
        "stages": {"num_stages": 2},
    }
    cubins.save(dataclasses.replace(old, **stale.get(change, {})), tmp_path)
    calls = []
    monkeypatch.setattr(aot, "compile_kernel", lambda *job: calls.append(job) or old)
    aot.build_one(spec, 80, tmp_path)
    assert calls == ([] if change == "nothing" else [(spec, 80)])
    assert cubins.load(tmp_path, 80, spec.name) == old


def test_an_altered_or_missing_cubin_is_refused(compiled, tmp_path):
    binary = cubins.load(compiled, 90, "plan_t64")
    cubins.save(binary, tmp_path)
    assert cubins.load(tmp_path, 90, "plan_t64") == binary
    (tmp_path / "sm90" / "plan_t64.cubin").write_bytes(binary.cubin[:-1] + b"\0\0")
    with pytest.raises(ValueError, match="was altered, sha256"):
        cubins.load(tmp_path, 90, "plan_t64")
    with pytest.raises(FileNotFoundError, match="--arch sm89"):
        cubins.load(tmp_path, 89, "plan_t64")


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    """Builds that run at the same time share the cache."""
    binary = KernelBinary("k", 90, "k", (), {}, 4, 0, 16, 0, "", "", hashlib.sha256(b"x").hexdigest(), b"x")
    cubins.save(binary, tmp_path)
    seen = []

    def replace(source, target):
        seen.append((os.path.basename(target), cubins.load(tmp_path, 90, "k").cubin))
        return os.rename(source, target)

    monkeypatch.setattr(cubins.os, "replace", replace)
    cubins.save(binary, tmp_path)
    assert seen == [("k.cubin", b"x"), ("k.json", b"x")]
    assert sorted(path.name for path in (tmp_path / "sm90").iterdir()) == ["k.cubin", "k.json"]


def test_another_format_is_refused(tmp_path):
    binary = KernelBinary("k", 90, "k", (), {}, 4, 0, 16, 0, "triton 0", "", hashlib.sha256(b"x").hexdigest(), b"x")
    path = cubins.save(binary, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ValueError, match="has format 2 but this version reads 1"):
        cubins.load(tmp_path, 90, "k")


def test_a_spilling_kernel_fails_the_build(tmp_path, monkeypatch):
    """Far too many rows for one warp: the real compiler spills, and nothing is written."""
    pytest.importorskip("triton", reason="no kernel compiler for this Python version or platform")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = matrix.write(64, "fp16", "fp16", "fp16")
    constants = tuple((name, 64 if name == "HEADS" else value) for name, value in spec.constants)
    failures = aot.build([(dataclasses.replace(spec, constants=constants, num_warps=1), 80)], tmp_path)
    assert len(failures) == 1
    assert "write_d64_fp16_kfp16_vfp16 for sm80 spills" in failures[0] and "choose smaller tiles" in failures[0]
    assert not list(tmp_path.rglob("*.cubin"))


def test_too_much_shared_memory_is_refused():
    binary = KernelBinary("k", 89, "k", (), {}, 4, 102400, 64, 0, "", "", "")
    with pytest.raises(aot.KernelRejected, match="needs 102400 bytes of shared memory of 101376"):
        aot.check(binary)
    aot.check(dataclasses.replace(binary, shared_bytes=101376))


def test_compiler_report_is_read():
    log = (
        "  8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nptxas info    : Used 168 registers, used 1 barriers"
    )
    assert aot.parse_report(log) == (168, 32)
    with pytest.raises(aot.KernelRejected, match="0 kernels instead of one"):
        aot.parse_report("nothing")


@pytest.mark.parametrize("capability, arch", [(75, 75), (80, 80), (86, 86), (87, 86), (89, 89), (90, 90), (120, 120)])
def test_the_closest_architecture_that_runs_is_chosen(capability, arch):
    assert cubins.arch_for(capability) == arch


@pytest.mark.parametrize("capability", [70, 103, 121])
def test_an_architecture_nothing_was_compiled_for_is_refused(capability):
    with pytest.raises(ValueError, match=f"no kernels for sm{capability}"):
        cubins.arch_for(capability)


def test_what_the_wheel_ships():
    names = {spec.name for spec in matrix.for_variants(matrix.shipped(), 90)}
    assert len([name for name in names if name.startswith("attention")]) == 2 * 5 * 5 * 2 + 8
    assert {"plan_t64", "plan_t32", "sample", "load_history"} <= names
    turing = {spec.name for spec in matrix.for_variants(matrix.shipped(), 75)}
    assert not any("bf16" in name for name in turing) and "attention_decode_d64_fp16_kint8_vint8_b64" in turing


def test_unknown_architectures_are_named(capsys, tmp_path):
    with pytest.raises(SystemExit):
        aot.main(["--out", str(tmp_path), "--arch", "sm70"])
    assert "sm70 is not one of sm75, sm80" in capsys.readouterr().err


def test_resource_table(tmp_path):
    binary = KernelBinary("plan", 90, "k", (), {}, 4, 38916, 154, 0, "", "", hashlib.sha256(b"x").hexdigest(), b"x")
    cubins.save(binary, tmp_path)
    cubins.save(dataclasses.replace(binary, arch=75, registers=40, shared_bytes=0, spill_bytes=8), tmp_path)
    assert resource_table.table(tmp_path).splitlines() == [
        "| kernel | sm75 | sm90 |",
        "|---|---|---|",
        "| `plan` | 40 / 0 / 8 / 8 B spilled | 154 / 38 / 3 |",
    ]
