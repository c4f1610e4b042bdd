"""What a user sees of `builder` and `runtime generate` when something is wrong: one sentence, status 2, nothing half-written."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.cli import main as builder
from runtime.cli import main as runtime
from runtime.contract import MANIFEST_FILE

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny Llama to damage."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def engine(tiny_engine: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of an engine to damage."""
    return Path(shutil.copytree(tiny_engine("fp32"), tmp_path / "engine"))


def sentence(captured: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    out, err = captured.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and err.endswith(lines[0] + "\n"), err
    assert "Traceback" not in out + err
    return lines[0].removeprefix("error: ")


def refuse_build(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: object, *options: str) -> str:
    output = tmp_path / "out" / "engine"
    assert builder(["build", str(source), "--output", str(output), *options]) == 2
    assert not output.parent.exists() or list(output.parent.iterdir()) == []
    return sentence(capsys)


def edit_json(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def test_no_such_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = refuse_build(capsys, tmp_path, tmp_path / "nowhere")
    assert "nowhere does not exist; give a Hugging Face model directory, a .gguf file, a hub id or one of smollm2-135m" in text


def test_not_a_causal_lm(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    edit_json(model / "config.json", architectures=["BertForMaskedLM"], model_type="bert")
    text = refuse_build(capsys, tmp_path, model)
    assert "BertForMaskedLM is not a causal language model; give a model with one of the architectures Cohere" in text


def test_unsupported_architecture_lists_what_is_supported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    edit_json(model / "config.json", architectures=["FalconForCausalLM"], model_type="falcon")
    text = refuse_build(capsys, tmp_path, model)
    assert "falcon" in text.lower()
    for family in ("LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "StableLmForCausalLM"):
        assert family in text


def test_truncated_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1000)
    text = refuse_build(capsys, tmp_path, model)
    assert str(size - 1000) in text and str(size) in text


def test_corrupted_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"\x00" * 40)
    assert "model.safetensors" in refuse_build(capsys, tmp_path, model)


def test_options_out_of_range(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = refuse_build(capsys, tmp_path, TINY, "--max-model-len", "4096")
    assert "--max-model-len 4096 exceeds the 2048 positions" in text
    assert "--max-model-len is 1 but must be at least 2" in refuse_build(capsys, tmp_path, TINY, "--max-model-len", "1")
    assert "--eval-tokens is 1 but must be 0 (no evaluation) or at least 2" in refuse_build(
        capsys, tmp_path, TINY, "--eval-tokens", "1"
    )
    for limit in (["--fallback"], ["--max-kl", "0.1"]):
        assert f"{limit[0]} needs a measurement" in refuse_build(capsys, tmp_path, TINY, "--eval-tokens", "0", *limit)
    assert "--max-num-seqs is 0 but must be at least 1" in refuse_build(capsys, tmp_path, TINY, "--max-num-seqs", "0")
    assert "--group-size 64 is for --precision int4, not int8" in refuse_build(
        capsys, tmp_path, TINY, "--precision", "int8", "--group-size", "64"
    )
    for precision in ("fp32", "bf16", "int8-wo"):
        text = refuse_build(capsys, tmp_path, TINY, "--precision", precision, "--activation-scales", "static")
        assert f"--activation-scales static has no meaning for --precision {precision}" in text
        assert text.endswith("choose one of int8, int8-sq, int4, fp8")
    unit = ("--kv-cache-scales", "unit")
    text = refuse_build(capsys, tmp_path, TINY, "--kv-cache-dtype", "u8", *unit)
    assert "--kv-cache-scales unit is not available for --target cpu" in text
    for dtype in ("auto", "f16", "f8:i8"):
        text = refuse_build(capsys, tmp_path, TINY, "--target", "tensorrt-rtx", "--kv-cache-dtype", dtype, *unit)
        assert f"is for keys or values stored as f8, not for --kv-cache-dtype {dtype}" in text
    text = refuse_build(capsys, tmp_path, TINY, "--max-num-batched-tokens", "8")
    assert "--max-num-batched-tokens 8 is smaller than --max-num-seqs 32" in text


def test_unknown_option_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--frobnicate"], ["--precision", "fp7"], ["--kv-cache-dtype", "f99"]):
        with pytest.raises(SystemExit) as stop:
            builder(["build", str(TINY), "--output", "x", *arguments])
        assert stop.value.code == 2
        assert arguments[-1] in capsys.readouterr().err


def test_without_the_build_extra(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    monkeypatch.delitem(sys.modules, "builder.build", raising=False)
    assert "needs onnx_ir, which is not installed; pip install 'forgeline[build]'" in refuse_build(capsys, tmp_path, TINY)


def test_output_that_is_no_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("dear")
    assert builder(["build", str(TINY), "--output", str(tmp_path / "thesis")]) == 2
    assert "is not an engine, so it is not overwritten" in sentence(capsys)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "dear"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_too_small(capsys: pytest.CaptureFixture[str], small_disk: Path) -> None:
    """3.5 M weights: refused before the work where 4 bytes each do not fit."""
    assert builder(["build", str(TINY), "--output", str(small_disk / "engine")]) == 2
    assert "the engine needs 14 MB but the disk of" in sentence(capsys)
    assert list(small_disk.iterdir()) == []


def test_full_disk(capsys: pytest.CaptureFixture[str], small_disk: Path) -> None:
    """The estimate for int4, 1.7 MB, fits the 2 MB; the engine does not. The model itself, 7 MB, plays no part."""
    options = ["--precision", "int4", "--calibration-samples", "0", "--eval-tokens", "0"]
    assert builder(["build", str(TINY), "--output", str(small_disk / "engine"), *options]) == 2
    assert re.search(r"is full: more is needed than the 2\.\d MB that there were; free some space", sentence(capsys))
    assert list(small_disk.iterdir()) == []


def test_errors_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert builder(["build", str(tmp_path / "nowhere"), "--output", str(tmp_path / "engine"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ModelNotFound" and "does not exist" in error["message"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_may_not_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    weights = model / "model.safetensors"

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("builder.source.check_safetensors", refuse)
    expected = f"{weights} may not be opened by this user (Permission denied); change its permissions or give another path"
    if not as_json:
        assert refuse_build(capsys, tmp_path, model) == expected
        return
    assert builder(["build", str(model), "--output", str(tmp_path / "engine"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == {"type": "PermissionError", "message": expected}


def test_build_inspect_and_build_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_engine: Callable[[str], Path]
) -> None:
    output = tmp_path / "engine"
    arguments = ["build", str(TINY), "--output", str(output), "--precision", "int8", "--eval-tokens", "64", "--json"]
    assert builder([*arguments, "--no-cache"]) == 0  # an earlier run of this test may have left the same engine
    first = json.loads(capsys.readouterr().out)
    assert not first["up_to_date"]
    assert first["report"]["weights"]["bytes_per_weight"] <= 1.1
    assert first["report"]["accuracy"]["num_tokens"] == 63
    assert first["report"]["fusion"]["counts"]["qkv_merge"] == 4
    assert first["report"]["build"]["peak_rss_bytes"] > first["report"]["weights"]["total_bytes"]
    before = (output / MANIFEST_FILE).stat().st_mtime_ns
    assert builder(arguments) == 0
    assert json.loads(capsys.readouterr().out)["up_to_date"]
    assert (output / MANIFEST_FILE).stat().st_mtime_ns == before
    assert builder(["inspect", str(output)]) == 0
    assert "3.5 M parameters" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ damaged engines


def refuse_generate(capsys: pytest.CaptureFixture[str], engine: Path, *options: str) -> str:
    assert runtime(["generate", str(engine), "--prompt", "In", *options]) == 2
    return sentence(capsys)


def test_engine_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is not an engine: it has no manifest.json; build one with" in refuse_generate(capsys, tmp_path)


def test_engine_file_missing(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    (engine / "plan" / "weights.bin").unlink()
    assert "plan/weights.bin is missing; rebuild the engine" in refuse_generate(capsys, engine)


def test_engine_file_altered(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    with (engine / "plan" / "weights.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x07")
    assert "plan/weights.bin was altered" in refuse_generate(capsys, engine)
    assert builder(["inspect", str(engine)]) == 2
    assert "plan/weights.bin was altered" in sentence(capsys)


def test_engine_of_another_library_version(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    edit_json(engine / MANIFEST_FILE, libraries={"openvino": "2025.1.0"})
    text = refuse_generate(capsys, engine)
    assert "built with openvino 2025.1.0 but 2026.4.1 is installed; install openvino==2025.1.0 or rebuild the engine" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h200", "--precision", "fp32"], "--precision fp32 is not available on a GPU; choose one of fp16, bf16"),
        (["--gpu", "h200", "--precision", "int8-wo"], "--precision int8-wo is not available on a GPU"),
        (
            ["--gpu", "h200", "--kv-cache-dtype", "u8:u4"],
            "the TensorRT targets cannot store the KV cache as u8:u4; choose from f16",
        ),
        (["--parameters", "inf"], "--parameters is inf but must be at most 1e18"),
    ],
)
def test_a_plan_of_what_no_target_builds(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert builder(["plan", str(TINY), *arguments]) == 2
    assert message in sentence(capsys)


def test_damaged_manifest(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    edit_json(engine / MANIFEST_FILE, schema_version=99)
    assert "schema_version is 99 but this runtime reads 1" in refuse_generate(capsys, engine)
    edit_json(engine / MANIFEST_FILE, schema_version=1, max_model_len="x")
    assert "manifest.json is damaged (TypeError: max_model_len is 'x'); rebuild" in refuse_generate(capsys, engine)
    (engine / MANIFEST_FILE).write_text('{"schema_version": 1, "model"')
    assert "manifest.json is damaged" in refuse_generate(capsys, engine)


def test_runtime_options(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    assert "unknown runtime option 'max_seqs'" in refuse_generate(capsys, engine, "--set", "max_seqs=3")
    assert "max_num_seqs=64 exceeds the 32 the engine was built for" in refuse_generate(
        capsys, engine, "--set", "max_num_seqs=64"
    )
    text = refuse_generate(capsys, engine, "--set", "num_blocks=10")
    assert "10 blocks" in text and "needs 64" in text and "max_model_len=320 or less" in text
    assert "temperature is nan but must be a finite number" in refuse_generate(capsys, engine, "--temperature", "nan")
    assert "max_tokens is 0 but must be at least 1" in refuse_generate(capsys, engine, "--max-tokens", "0")
    assert "top_p is 1.5 but must be in (0, 1]" in refuse_generate(capsys, engine, "--top-p", "1.5")
