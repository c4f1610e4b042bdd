"""The cache of exported graphs: an entry that is not as it was written is made anew, whatever happened to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import build as builder_build
from builder.build import build
from builder.cache import CHECKSUMS_FILE, is_whole
from builder.config import BuildConfig
from runtime.errors import BuildError

TINY = Path(__file__).parents[1] / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds tiny-llama."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        build(BuildConfig(str(TINY), cache / "engine", eval_tokens=0), quiet=True)
    return cache


@pytest.fixture
def entry(exported_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only entry of a cache of this test's own."""
    shutil.copytree(exported_once, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (found,) = (tmp_path / "cache" / "forgeline" / "canonical").iterdir()
    return found


def cut_short(file: Path) -> None:
    os.truncate(file, 100)


def change_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer/tokenizer.json", cut_short),
        ("spec.json", cut_short),
        ("fusion.json", Path.unlink),
        ("model.onnx", cut_short),
        ("weights.bin", change_a_bit),
        (CHECKSUMS_FILE, cut_short),
        (CHECKSUMS_FILE, Path.unlink),
    ],
)
def test_a_damaged_entry_is_made_anew(
    name: str, damage: Callable[[Path], None], entry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(entry / name)
    assert not is_whole(entry)
    build(BuildConfig(str(TINY), tmp_path / "engine", max_model_len=1000, eval_tokens=0))
    assert f"{entry} is not as it was written; the model is exported again" in capsys.readouterr().err
    assert is_whole(entry)


def test_a_whole_entry_is_used(entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: object) -> Path:
        raise BuildError("exported again")

    monkeypatch.setattr(builder_build, "_export", export)
    (entry / "notes.txt").write_text("somebody's")  # does no harm
    build(BuildConfig(str(TINY), tmp_path / "engine", max_model_len=1000, eval_tokens=0), quiet=True)
    with pytest.raises(BuildError, match="exported again"):
        build(BuildConfig(str(TINY), tmp_path / "other", max_model_len=1001, eval_tokens=0, use_cache=False), quiet=True)
