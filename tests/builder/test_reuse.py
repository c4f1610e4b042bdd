"""A build of inputs that were built before: copied from where the engine lies, if it is whole and as it was written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from builder import cache
from builder.build import build
from builder.config import BuildConfig
from runtime.contract import load_manifest

TINY_LLAMA = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"


def test_the_same_engine_elsewhere_is_a_copy_while_the_first_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = BuildConfig(str(TINY_LLAMA), tmp_path / "engine", precision="fp32", eval_tokens=0)
    first = build(config, quiet=True)
    assert not first.up_to_date and first.copied_from is None
    second = build(dataclasses.replace(config, output=tmp_path / "second"), quiet=True)
    assert second.up_to_date and second.copied_from == tmp_path / "engine"
    assert second.report == json.loads(json.dumps(first.report))
    weights = [tmp_path / name / "plan" / "weights.bin" for name in ("engine", "second")]
    assert not os.path.samefile(*weights)  # what is written into one does not reach the other
    assert {each.name for each in (tmp_path / "second").iterdir()} == {each.name for each in (tmp_path / "engine").iterdir()}
    assert not build(dataclasses.replace(config, output=tmp_path / "third", use_cache=False), quiet=True).up_to_date
    weights[1].write_bytes(weights[0].read_bytes()[:-1] + b"?")  # the last one written is damaged
    assert not build(dataclasses.replace(config, output=tmp_path / "fourth"), quiet=True).up_to_date
    shutil.rmtree(tmp_path / "fourth")  # gone
    assert not build(dataclasses.replace(config, output=tmp_path / "fifth"), quiet=True).up_to_date
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


@pytest.mark.parametrize("name", ["manifest.json", "report.json", "report.html"])
def test_an_engine_that_was_edited_is_not_handed_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = BuildConfig(str(TINY_LLAMA), tmp_path / "engine", precision="fp32", eval_tokens=0, max_num_seqs=7)
    build(config, quiet=True)
    place = tmp_path / "engine" / name
    edited = place.read_text(encoding="utf-8").replace('"max_num_seqs": 7', '"max_num_seqs": 9') + " "
    place.write_text(edited, encoding="utf-8")
    assert build(config, quiet=True).up_to_date  # the user's own, and as it is
    second = build(dataclasses.replace(config, output=tmp_path / "second"), quiet=True)
    assert not second.up_to_date
    assert load_manifest(tmp_path / "second").max_num_seqs == 7


def test_an_engine_where_nobody_may_look_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = BuildConfig(str(TINY_LLAMA), tmp_path / "engine", precision="fp32", eval_tokens=0)
    build(config, quiet=True)
    read_bytes = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent == tmp_path / "engine":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert not build(dataclasses.replace(config, output=tmp_path / "second"), quiet=True).up_to_date


def test_as_many_engines_are_remembered_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "MAX_ENGINES", 2)
    for number in range(3):
        cache.keep_engine(f"key{number}", Path(f"/e{number}"), "digest")
        os.utime(cache.cache_root() / "engines" / f"key{number}", (number, number))
    assert [cache.engine_with(f"key{number}") for number in range(3)] == [None, (Path("/e1"), "digest"), (Path("/e2"), "digest")]
