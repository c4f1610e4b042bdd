"""Outputs, staging directories and processes that die: nothing of the user's is lost, nothing half-written stays or is loaded."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builder import build as builder_build
from builder.bundle import atomic_directory
from builder.cli import main as builder
from builder.config import BuildConfig
from builder.report import write_report
from builder.staging import LOCK_FILE, staging_directory, sweep
from runtime.errors import BuildError

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"
MANIFEST = '{"schema_version": 1, "forgeline_version": "0", "plan": {}}'


def names(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir())


def engine_at(place: Path, text: str = MANIFEST) -> Path:
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(text)
    return place


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert builder([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


# ------------------------------------------------------------------------------------------- what may be overwritten


@pytest.mark.parametrize("text", ["{}", "[]", "null", "not json", '{"name": "my web app", "schema_version": 1}'])
def test_a_manifest_of_something_else_protects_its_directory(text: str, tmp_path: Path) -> None:
    web = engine_at(tmp_path / "web", text)
    with pytest.raises(BuildError, match="web exists and is not an engine, so it is not overwritten"), atomic_directory(web):
        pass
    assert (web / "manifest.json").read_text() == text and names(tmp_path) == ["web"]


def test_a_file_added_to_an_engine_protects_it(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "engine")
    (engine / "notes.txt").write_text("dear")
    (engine / "more.txt").write_text("")
    message = "holds more.txt and 1 more beside the engine, which no build has written, so it is not overwritten"
    with pytest.raises(BuildError, match=message), atomic_directory(engine):
        pass
    assert names(engine) == ["manifest.json", "more.txt", "notes.txt"]
    for name in ("notes.txt", "more.txt"):
        (engine / name).unlink()
    for name in ("report.json", "report.html"):
        (engine / name).write_text("old")
    for name in ("plan", "tokenizer"):
        (engine / name).mkdir()
    with atomic_directory(engine) as staging:
        (staging / "manifest.json").write_text("new")
    assert names(engine) == ["manifest.json"]


def test_a_directory_filled_during_the_build_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(BuildError, match="not an engine"), atomic_directory(output):
        (output / "thesis.tex").write_text("dear")
    assert names(tmp_path) == ["out"] and names(output) == ["thesis.tex"]


def test_replace_needs_no_manifest(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    (entry / "model.onnx").write_text("old")
    with atomic_directory(entry, replace=True) as staging:
        (staging / "model.onnx").write_text("new")
    assert (entry / "model.onnx").read_text() == "new" and names(tmp_path) == ["entry"]


def test_the_model_is_never_the_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "zoo" / "model"))
    for place in (model, model.parent):
        (place / "manifest.json").write_text(MANIFEST)
    (tmp_path / "link").symlink_to(model)
    before = names(model)
    assert "model is the model itself, which the engine would replace" in refused(capsys, "build", model, "--output", model)
    assert "link is the model itself" in refused(capsys, "build", model, "--output", tmp_path / "link")
    assert "zoo holds the model" in refused(capsys, "build", model, "--output", model.parent)
    assert names(model) == before


# ------------------------------------------------------------------------------------------------- staging directories


def test_stale_directories_are_swept_and_others_kept(tmp_path: Path) -> None:
    for name in (".engine.abcdefgh", ".engine2.abcdefgh", ".engine.tooshort1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK_FILE).touch()
    (tmp_path / ".engine.settings").mkdir()  # looks like one, but without the mark
    with staging_directory(tmp_path, "engine") as alive:
        sweep(tmp_path, "engine")
        assert names(tmp_path) == sorted([".engine.settings", ".engine.tooshort1", ".engine2.abcdefgh", alive.name])
        sweep(tmp_path)
        assert names(tmp_path) == sorted([".engine.settings", ".engine.tooshort1", alive.name])
    assert names(tmp_path) == [".engine.settings", ".engine.tooshort1"]


KILLED = """
import os, sys
from pathlib import Path
from builder import bundle, staging

def die(*_):
    os._exit(9)

rename = os.rename
renames = []
def counted(source, target):
    renames.append(target)
    if len(renames) == 2:
        die()
    rename(source, target)
os.rename = counted
with bundle.atomic_directory(Path(sys.argv[1])) as place:
    (place / "manifest.json").write_text("new")
"""


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    """The old engine is then in a staging directory; the next build puts it back before it starts."""
    engine = engine_at(tmp_path / "engine")
    assert subprocess.run([sys.executable, "-c", KILLED, str(engine)], check=False).returncode == 9
    assert not engine.exists() and len(names(tmp_path)) == 2
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(engine):
        assert (engine / "manifest.json").read_text() == MANIFEST
        raise RuntimeError("half way")
    assert (engine / "manifest.json").read_text() == MANIFEST and names(tmp_path) == ["engine"]


def test_two_builds_race_to_the_same_output(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    failures: list[BaseException] = []
    rounds = 50
    start = threading.Barrier(6)

    def build(writer: int) -> None:
        try:
            start.wait()
            for _ in range(rounds):
                with atomic_directory(engine) as staging:
                    (staging / "plan").mkdir()
                    (staging / "plan" / "writer").write_text(str(writer))
                    (staging / "manifest.json").write_text(MANIFEST)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(tmp_path) == ["engine"] and names(engine) == ["manifest.json", "plan"]
    assert (engine / "plan" / "writer").read_text() in "012345"


# ------------------------------------------------------------------------------------------- places that cannot be used


def test_output_below_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "engine", tmp_path / "file" / "more" / "engine"):
        text = refused(capsys, "build", TINY, "--output", output)
        assert "(Not a directory); choose another --output" in text and str(output) in text


@pytest.mark.parametrize("length", [250, 300])
def test_output_of_a_long_name(length: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = refused(capsys, "build", TINY, "--output", tmp_path / ("x" * length))
    assert "(File name too long); choose another --output" in text
    assert names(tmp_path) == []


def test_cache_that_cannot_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        text = refused(capsys, "build", TINY, "--output", tmp_path / "engine")
        assert "set XDG_CACHE_HOME to another place, or build with --no-cache" in text and "--output" not in text
        assert str(place)[:100] in text
    assert names(tmp_path) == ["file"]


def test_limits_of_the_model_are_checked_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def export(*_: object) -> Path:
        raise AssertionError("the export has begun")

    monkeypatch.setattr(builder_build, "_export", export)
    config = BuildConfig(str(TINY), tmp_path / "engine", max_model_len=2049, use_cache=False)
    with pytest.raises(BuildError, match=r"--max-model-len 2049 exceeds the 2048 positions .*tiny-llama was trained for"):
        builder_build.build(config, quiet=True)
    whole = dataclasses.replace(config, max_model_len=2048)
    with pytest.raises(AssertionError, match="has begun"):
        builder_build.build(whole, quiet=True)
    with pytest.raises(BuildError, match=r"the cpu target.* cannot store the KV cache as bf16:f8"):
        builder_build.build(dataclasses.replace(whole, kv_cache_dtype="bf16:f8"), quiet=True)
    for options, message in (
        ({"target_arch": ("sm90",)}, "--target tensorrt-rtx does not build for sm90"),
        ({"kv_cache_dtype": "bf16"}, "attention computes in fp16, so 16-bit keys and values are f16, not bf16"),
        ({"activation_scales": "dynamic"}, "--activation-scales dynamic is not available"),
    ):
        gpu = dataclasses.replace(whole, target="tensorrt-rtx", precision="fp16", **options)  # type: ignore[arg-type]
        with pytest.raises(BuildError, match=message):
            builder_build.build(gpu, quiet=True)


# ------------------------------------------------------------------------------------------------------------- SIGTERM

TERMINATED = """
import signal, sys
import builder.build
from builder.cli import main

def export(source, place):
    place.mkdir(exist_ok=True)
    (place / "model.onnx").write_text("half")
    signal.raise_signal(signal.SIGTERM)

builder.build._export = export
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [[], ["--no-cache"]])
def test_sigterm_leaves_nothing(options: list[str], tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out" / "engine"
    command = [sys.executable, "-c", TERMINATED, "build", str(TINY), "--output", str(output), *options]
    done = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert names(output.parent) == []
    assert [path for path in (cache / "forgeline").rglob("*") if path.is_file()] == []  # other libraries keep files there too


def test_the_handler_of_sigterm_is_restored_and_threads_set_none(capsys: pytest.CaptureFixture[str]) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert builder(["inspect", "nowhere"]) == 2
        assert signal.getsignal(signal.SIGTERM) is mine
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(builder, ["inspect", "nowhere"]).result() == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_leftovers_in_the_cache_are_swept_by_any_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "forgeline" / "canonical"
    stale = place / ".0123456789abcdef.abcdefgh"  # another model's
    stale.mkdir(parents=True)
    (stale / LOCK_FILE).touch()

    def export(source: str, entry: Path) -> Path:
        assert names(place) == [entry.name]
        raise BuildError("enough")

    monkeypatch.setattr(builder_build, "_export", export)
    with pytest.raises(BuildError, match="enough"):
        builder_build.build(BuildConfig(str(TINY), tmp_path / "engine"), quiet=True)
    assert names(place) == []


# ---------------------------------------------------------------------------------------------------------- the report


def test_a_report_with_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    report = {"weights": {"classes": [{"bits": 1.0}, {"bits": float("inf")}]}}
    with pytest.raises(BuildError, match=r"weights\.classes\.1\.bits of the build report is not a finite number"):
        write_report(tmp_path, report)
    assert names(tmp_path) == []
