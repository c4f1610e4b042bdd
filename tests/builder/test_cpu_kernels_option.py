"""`--cpu-kernels`: what auto chooses, what is refused, how the library is compiled and kept, what loading an engine checks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from builder import build as builder_build
from builder import config as builder_config
from builder.build import build
from builder.cli import main as builder
from builder.config import BuildConfig, code_sha256
from builder.deploy import deploy
from builder.targets import openvino_kernels
from plugins.quantized_matmul import native
from runtime.contract import Manifest, load_manifest
from runtime.errors import BuildError, EngineError, ManifestMismatch
from runtime.executors import openvino as executor
from runtime.executors.openvino import OpenVINOExecutor

TINY = Path(__file__).parent.parent / "models" / "tiny-llama"
NO_COMPILER = "no C++ compiler is installed (g++, c++, clang++)"
# A compiler that writes a line where the library should be.
COMPILER = (
    'if [ "$1" = --version ]; then echo "fake 1"; exit; fi\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.1; echo made > "$2"\n'
)


@pytest.fixture(scope="module")
def engine(cpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("kernels") / "engine"
    build(BuildConfig(str(TINY), output, precision="int8", eval_tokens=0, cpu_kernels="forgeline"), quiet=True)
    return output


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has all they need, whatever this one has."""
    monkeypatch.setattr(native, "missing_cpu_flags", list)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capable: None) -> Callable[[str], Path]:
    """`compiler(body)`: $CXX is a shell script; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FORGELINE_KERNELS")

    def install(body: str) -> Path:
        script = tmp_path / "bin" / "compiler"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{body}")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        native._version.cache_clear()
        return script

    return install


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine, built by an earlier test run, is not copied."""
    monkeypatch.setattr(builder_build, "copied", lambda *_: None)


def names(place: Path) -> list[str]:
    return sorted(str(each.relative_to(place)) for each in place.rglob("*") if each.is_file()) if place.exists() else []


# -------------------------------------------------------------------------------------------------------- what is chosen


def test_auto_takes_forgelines_kernels_where_it_can(engine: Path, cpu_kernels: Path, tmp_path: Path) -> None:
    manifest = load_manifest(engine)
    assert manifest.plan["kernels"] == "plan/kernels.so"
    assert manifest.precision.details["kernels"] == "forgeline"
    assert "plan/kernels.so" in manifest.checksums
    assert (engine / "plan/kernels.so").read_bytes() == cpu_kernels.read_bytes()
    assert openvino_kernels.choose("auto", "f32") == (cpu_kernels, "")


def test_openvinos_kernels_on_request(anew: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BuildConfig(str(TINY), tmp_path / "engine", precision="int8", eval_tokens=0, cpu_kernels="openvino")
    build(config)
    manifest = load_manifest(config.output)
    assert "kernels" not in manifest.plan and manifest.precision.details["kernels"] == "openvino"
    assert not (config.output / "plan" / "kernels.so").exists()
    assert "forgeline's own" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["compiler", "flags"])
def test_auto_falls_back_and_says_why(
    missing: str, anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if missing == "compiler":
        monkeypatch.setattr(native, "missing_cpu_flags", list)
        monkeypatch.setattr(native, "compiler", lambda: None)
    else:
        monkeypatch.setattr(native, "missing_cpu_flags", lambda: ["avx512vl", "avx512_vnni"])
    reason = NO_COMPILER if missing == "compiler" else "this CPU lacks avx512vl, avx512_vnni"
    config = BuildConfig(str(TINY), tmp_path / "engine", precision="int8", eval_tokens=0)
    build(config)
    assert f"OpenVINO's kernels, not forgeline's own: {reason}" in capsys.readouterr().err
    manifest = load_manifest(config.output)
    assert "kernels" not in manifest.plan and manifest.precision.details["kernels"] == "openvino"


def test_reasons_not_to_have_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capable: None) -> None:
    assert openvino_kernels.choose("auto", "bf16") == (None, "they compute in f32, not in bf16")
    monkeypatch.setattr(native, "compiler", lambda: ("/bin/cc",))
    monkeypatch.setattr(native, "_openvino", lambda: tmp_path)
    assert native.why_not() == "this installation of openvino brings no headers"
    monkeypatch.undo()
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    assert native.missing_cpu_flags() == list(native.CPU_FLAGS)


def test_asking_for_what_cannot_be_had_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "compiler", lambda: None)
    arguments = ["build", str(TINY), "--precision", "int8", "--output", str(tmp_path / "engine"), "--cpu-kernels", "forgeline"]
    assert builder(arguments) == 2
    error = capsys.readouterr().err
    expected = (
        f"error: --cpu-kernels forgeline is not available: {NO_COMPILER}; install g++ on a CPU with AVX512-VNNI and leave "
        "--compute-dtype at f32, or choose --cpu-kernels openvino"
    )
    assert expected in error and "Traceback" not in error
    assert not (tmp_path / "engine").exists()
    with pytest.raises(BuildError, match="not available: they compute in f32, not in bf16; install"):
        openvino_kernels.require("forgeline", "bf16")
    openvino_kernels.require("auto", "bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_kernels": "mine"}, "unknown --cpu-kernels 'mine'; choose one of auto, forgeline, openvino"),
        (
            {"cpu_kernels": "forgeline", "target": "tensorrt", "precision": "fp16"},
            "forgeline is for --target cpu, not for --target",
        ),
        ({"cpu_kernels": "openvino", "target": "tensorrt-rtx", "precision": "fp16"}, "openvino is for --target cpu, not for"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        BuildConfig("model", Path("engine"), **options)
    BuildConfig("model", Path("engine"), **{**options, "cpu_kernels": "auto"})


# ------------------------------------------------------------------------------------------------------------- compiling


FAILING = (
    "if [ \"$1\" = --version ]; then exit; fi\necho 'In file included' >&2\necho 'k.cpp:1: error: no such thing' >&2\nexit 3\n"
)


def test_a_compiler_that_fails_is_quoted_and_nothing_stays(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    script = compiler(FAILING)
    config = BuildConfig(str(TINY), tmp_path / "out" / "engine", precision="int8", eval_tokens=0, cpu_kernels="forgeline")
    with pytest.raises(
        BuildError,
        match=rf"^the CPU kernels cannot be compiled \({script} ended with status 3: k.cpp:1: error: no such thing\); build with "
        "--cpu-kernels openvino$",
    ):
        build(config, quiet=True)
    assert names(tmp_path / "out") == [] and names(tmp_path / "cache/forgeline/kernels") == []
    assert list((tmp_path / "out").iterdir()) == []


def test_auto_builds_without_a_compiler_that_works(
    compiler: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = compiler(FAILING)
    config = BuildConfig(str(TINY), tmp_path / "engine", precision="int8", eval_tokens=0)
    build(config)
    note = f"forgeline's own: they cannot be compiled ({script} ended with status 3: k.cpp:1: error: no such thing)"
    assert note in capsys.readouterr().err
    assert "kernels" not in load_manifest(config.output).plan


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[ \"$1\" = --version ] && exit; echo 'out of memory' >&2; exit 1", "ended with status 1: out of memory"),
        ('[ "$1" = --version ] && exit; exit 4', "ended with status 4: nothing"),
    ],
)
def test_what_a_compiler_says(body: str, message: str, compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler(body)
    with pytest.raises(native.CompilerError, match=message):
        native.compile_library(tmp_path / "made" / "k.so")
    assert list((tmp_path / "made").iterdir()) == []


def test_nothing_of_a_compiler_that_is_given_up_goes_on(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_TIMEOUT_S", 0.5)
    script = compiler('[ "$1" = --version ] && exit; touch "$TMPDIR/half.s"; sleep 600 & echo $! > "${0%/*}/child"; wait')
    with pytest.raises(native.CompilerError, match=r"took more than 0.5 s"):
        native.compile_library(tmp_path / "made" / "k.so")
    assert list((tmp_path / "made").iterdir()) == []
    child = int((script.parent / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    for _ in range(1000):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX":  # ended, whoever inherits it
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    pytest.fail("what the compiler started goes on")


def test_what_a_killed_compilation_left_is_removed_once_nobody_can_be_at_it(
    compiler: Callable[[str], Path], tmp_path: Path
) -> None:
    compiler('[ "$1" = --version ] || exit 1')
    old, young = tmp_path / ".compiling-old", tmp_path / ".compiling-young"
    for each in (old, young):
        each.mkdir()
        (each / "k.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    with pytest.raises(native.CompilerError):
        native.compile_library(tmp_path / "k.so")
    assert list(tmp_path.glob(".compiling-*")) == [young]


def test_a_compiler_that_cannot_be_run_counts_as_one_that_fails(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    script = compiler("")
    script.write_bytes(b"\x7fELF of another machine")
    library, reason = openvino_kernels.choose("auto", "f32")
    assert library is None and "cannot be compiled" in reason
    assert BuildConfig("model", Path("engine")).key("source")
    with pytest.raises(BuildError, match=r"cannot be compiled .*; build with --cpu-kernels openvino"):
        openvino_kernels.choose("forgeline", "f32")


def test_the_library_is_compiled_once_and_kept(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    """Also by two builds at a time, each of which writes a whole file."""
    compiler(f"echo run >> {tmp_path}/runs\n{COMPILER}")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: openvino_kernels.library(), range(2)))
    kept = tmp_path / "cache" / "forgeline" / "kernels"
    assert both[0] == both[1] and both[0].parent == kept and both[0].read_bytes().startswith(b"made\n")
    assert list(kept.iterdir()) == [both[0]]
    (tmp_path / "runs").unlink()
    assert openvino_kernels.library() == both[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("why", ["--no-cache", "no home", "read-only"])
def test_without_a_cache_the_library_is_compiled_for_this_process(
    why: str, compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f"# {why}, as part of the version\n{COMPILER.replace('fake 1', why)}")
    if why == "no home":

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(openvino_kernels, "cache_root", no_home)
    elif why == "read-only":
        (tmp_path / "cache").write_text("no directory")  # whoever runs the tests cannot write here
    library = openvino_kernels.library(use_cache=why != "--no-cache")
    assert library.read_bytes().startswith(b"made\n") and tmp_path not in library.parents
    assert names(tmp_path / "cache") == []


# ----------------------------------------------------------------------------------------------------------- build cache


def test_the_key_follows_option_compiler_and_sources(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(option: str = "auto") -> str:
        return BuildConfig("model", Path("engine"), precision="int8", cpu_kernels=option).key("source")

    compiler(COMPILER)
    found = [key("openvino"), key(), key("forgeline")]
    compiler(COMPILER.replace("fake 1", "fake 2"))
    assert key("openvino") == found[0]
    found.append(key())
    edited = tmp_path / "kernels.cpp"
    edited.write_text(native.SOURCES[0].read_text() + "// another")
    monkeypatch.setattr(native, "SOURCES", (edited, *native.SOURCES[1:]))
    found.append(key())
    monkeypatch.setattr(native, "missing_cpu_flags", lambda: ["avx512_vnni"])
    found.append(key())
    assert len(set(found)) == 6


def test_the_code_hash_covers_cpp_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_config, "__file__", str(tmp_path / "builder" / "config.py"))
    place = tmp_path / "plugins" / "deep"
    place.mkdir(parents=True)
    found = []
    for name in ("a.py", "a.cpp", "a.h", "a.txt"):
        (place / name).write_text("")
        found.append(code_sha256("plugins"))
        (place / name).write_text("edited")
        found.append(code_sha256("plugins"))
    assert len(set(found)) == 6 and found[5] == found[6] == found[7]


# --------------------------------------------------------------------------------------------------- copies, and loading


def loaded(engine: Path, manifest: Manifest) -> None:
    OpenVINOExecutor(engine, manifest, 2, 1).close()


def test_copies_of_an_engine_have_the_kernels(engine: Path, tmp_path: Path) -> None:
    second = build(
        BuildConfig(str(TINY), tmp_path / "second", precision="int8", eval_tokens=0, cpu_kernels="forgeline"), quiet=True
    )
    assert second.copied_from is not None
    place = deploy(engine, tmp_path / "repository", "tiny", copy=True)
    for copy in (second.engine, place / "1" / "engine"):
        assert (copy / "plan/kernels.so").read_bytes() == (engine / "plan/kernels.so").read_bytes()
        loaded(copy, load_manifest(copy))


def test_a_cpu_that_lacks_the_instructions_refuses_the_engine(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(engine)
    loaded(engine, manifest)
    monkeypatch.setattr(executor, "missing_cpu_flags", lambda: ["avx512_vnni"])
    message = (
        "^the engine's kernels need avx512_vnni, which this CPU lacks; run it on a CPU with AVX512-VNNI, or rebuild it with "
        "--cpu-kernels openvino$"
    )
    with pytest.raises(ManifestMismatch, match=message):
        loaded(engine, manifest)


@pytest.mark.parametrize("fault", ["missing", "damaged", "another library"])
def test_kernels_that_cannot_be_loaded(fault: str, engine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    library = copy / "plan" / "kernels.so"
    library.unlink()
    if fault == "damaged":
        library.write_bytes(b"\x7fELF and no more")
    elif fault == "another library":
        shutil.copy(next((Path(ov.__file__).parent / "libs").glob("libtbb.so.*")), library)
    with pytest.raises(EngineError, match=rf"^{library} cannot be loaded \(.+\); rebuild the engine on this machine$"):
        loaded(copy, load_manifest(engine))
    with pytest.raises(EngineError, match=r"kernels\.so"):
        load_manifest(copy)


def test_an_engine_without_kernels_needs_no_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(str(TINY), tmp_path / "engine", precision="int8", eval_tokens=0, cpu_kernels="openvino")
    build(dataclasses.replace(config), quiet=True)
    monkeypatch.setattr(executor, "missing_cpu_flags", lambda: ["avx512_vnni"])
    loaded(config.output, load_manifest(config.output))


def test_a_damaged_library_in_the_cache_is_compiled_again(
    cpu_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGELINE_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setattr(native, "compile_library", lambda path: shutil.copyfile(cpu_kernels, path))
    kept = tmp_path / "kernels" / f"{native.identity()[:32]}.so"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(cpu_kernels.read_bytes()[:1000])  # a disk that was full
    assert openvino_kernels.choose("auto", "f32") == (kept, "")
    assert kept.read_bytes() == cpu_kernels.read_bytes() and native.is_whole(kept)
    assert not native.is_whole(tmp_path / "missing")


def test_a_compiler_may_have_arguments(capable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/sh -c 'exit 1'")
    assert native.compiler() == ("/bin/sh", "-c", "exit 1")
    with pytest.raises(native.CompilerError, match=r"^/bin/sh -c 'exit 1' ended with status 1"):
        native.compile_library(tmp_path / "k.so")
    monkeypatch.setenv("CXX", "nowhere++ -O1")
    assert native.why_not() == "$CXX is 'nowhere++ -O1', which is not found"
