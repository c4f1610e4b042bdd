from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_triton import make_manifest

import builder.bundle
from builder.deploy import HEADER, deploy
from builder.staging import LOCK_FILE
from runtime.errors import BuildError, EngineNotFound, InvalidRequest, OutOfDisk
from runtime.serving.tensors import INPUTS, OUTPUTS


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    directory = tmp_path / 'engine "1"'
    directory.mkdir()
    (directory / "manifest.json").write_text(make_manifest().to_json())
    return directory


def read_config(model: Path) -> dict[str, Any]:
    """config.pbtxt parsed by the protobuf library, as Triton does."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    config = text_format.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    return json.loads(json_format.MessageToJson(config, preserving_proto_field_name=True))


def test_the_configuration_follows_from_tensors_and_options(engine: Path, tmp_path: Path) -> None:
    model = deploy(engine, tmp_path / "repository", "llm", options={"max_queue_size": "9"})
    assert model == tmp_path / "repository" / "llm"
    config = read_config(model)
    assert config["name"] == "llm" and config["backend"] == "python" and config["max_batch_size"] == 1
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"] == [{"kind": "KIND_CPU", "count": 1}]
    assert config["parameters"] == {"engine_dir": {"string_value": str(engine)}, "max_queue_size": {"string_value": "9"}}
    for specs, tensors in ((INPUTS, config["input"]), (OUTPUTS, config["output"])):
        found = [
            (t["name"], t["data_type"].removeprefix("TYPE_"), tuple(map(int, t["dims"])), t.get("optional", False))
            for t in tensors
        ]
        is_input = specs is INPUTS
        assert found == [(spec.name, spec.data_type, spec.dims, is_input and spec.optional) for spec in specs]
    assert [spec.name for spec in INPUTS if not spec.optional] == ["text_input", "max_tokens"]


def test_a_model_that_answers_once(engine: Path, tmp_path: Path) -> None:
    options = {"decoupled_mode": "false", "triton_max_batch_size": "0"}
    config = read_config(deploy(engine, tmp_path, "llm", options=options))
    assert config.get("max_batch_size", 0) == 0 and config["model_transaction_policy"] == {}


def test_the_model_file_is_thin_and_imports_the_runtime(engine: Path, tmp_path: Path) -> None:
    model = deploy(engine, tmp_path, "llm")
    source = (model / "1" / "model.py").read_text()
    assert "from runtime.serving.triton import TritonPythonModel\n" in source
    compile(source, "model.py", "exec")
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt"]


def test_a_copy_travels_with_the_model(engine: Path, tmp_path: Path) -> None:
    model = deploy(engine, tmp_path, "llm", copy=True)
    assert (model / "1" / "engine" / "manifest.json").read_bytes() == (engine / "manifest.json").read_bytes()
    assert read_config(model)["parameters"]["engine_dir"] == {"string_value": "engine"}


EXAMPLE = Path(__file__).parents[2] / "model_repository" / "example.pbtxt"


def test_the_committed_example_is_what_deploy_writes(tiny_engine: Callable[[str], Path], tmp_path: Path) -> None:
    written = deploy(tiny_engine("fp32"), tmp_path, "ensemble", copy=True) / "config.pbtxt"
    assert written.read_text() == EXAMPLE.read_text(), f"cp {written} {EXAMPLE}"


def test_deploying_again_replaces_the_model(engine: Path, tmp_path: Path) -> None:
    deploy(engine, tmp_path, "llm", copy=True)
    model = deploy(engine, tmp_path, "llm")
    assert not (model / "1" / "engine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['engine "1"', "llm"]


def test_what_somebody_else_wrote_is_kept(engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "llm"
    other.mkdir()
    (other / "config.pbtxt").write_text('name: "llm"\n')
    with pytest.raises(BuildError, match="exists and was not written by `builder deploy`; choose another --name or remove it"):
        deploy(engine, tmp_path, "llm")
    assert (other / "config.pbtxt").read_text() == 'name: "llm"\n'


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "a b", "../x"])
def test_bad_names(engine: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be made of letters, digits"):
        deploy(engine, tmp_path, name)


def test_bad_engine_or_option_writes_nothing(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineNotFound):
        deploy(tmp_path / "nowhere", tmp_path / "repository", "llm")
    with pytest.raises(InvalidRequest, match="max_beam_width=4 cannot be honoured: there is no beam search; leave it empty or 1"):
        deploy(engine, tmp_path / "repository", "llm", options={"max_beam_width": "4"})
    with pytest.raises(InvalidRequest, match="engine_dir is not an option"):
        deploy(engine, tmp_path / "repository", "llm", options={"engine_dir": "x"})
    assert not (tmp_path / "repository").exists()


def test_a_failed_rename_brings_the_old_model_back(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deploy(engine, tmp_path, "llm")
    rename, calls = os.rename, []

    def fail_second(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(builder.deploy.os, "rename", fail_second)
    with pytest.raises(OSError, match="Input/output error"):
        deploy(engine, tmp_path, "llm", copy=True)
    assert not (model / "1" / "engine").exists() and (model / "config.pbtxt").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['engine "1"', "llm"]


def test_a_full_disk_leaves_the_old_model_in_place(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deploy(engine, tmp_path, "llm")

    def copytree(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builder.deploy.shutil, "copytree", copytree)
    with pytest.raises(OutOfDisk, match="is full"):
        deploy(engine, tmp_path, "llm", copy=True)
    assert (model / "config.pbtxt").read_text().startswith(HEADER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['engine "1"', "llm"]


def test_nothing_half_written_is_ever_inside_the_repository(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes any directory of the repository for a model and refuses to start when it is none."""
    seen: list[list[str]] = []

    def copytree(source: Path, target: Path) -> None:
        seen.append(sorted(path.name for path in (tmp_path / "repository").iterdir()))
        assert target.parent.parent.parent == tmp_path
        target.mkdir()

    monkeypatch.setattr(builder.deploy.shutil, "copytree", copytree)
    for _ in range(2):
        deploy(engine, tmp_path / "repository", "llm", copy=True)
    assert seen == [[], ["llm"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ['engine "1"', "repository"]
    assert sorted(path.name for path in (tmp_path / "repository" / "llm").iterdir()) == ["1", "config.pbtxt"]


def test_leftovers_of_killed_deployments_are_swept(engine: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    deploy(engine, repository, "llm")
    shutil.copytree(repository / "llm", repository / ".llm.0123_abc")  # as earlier versions left it
    shutil.copytree(repository / "llm", repository / ".llm.0123_abc.old")
    for place in (repository / ".llm.abcdefgh", tmp_path / ".repository.llm.abcdefgh"):
        place.mkdir()
        (place / LOCK_FILE).touch()
    (repository / ".llm.settings").mkdir()  # somebody else's
    (tmp_path / ".repository.other.abcdefgh").mkdir()
    (tmp_path / ".repository.other.abcdefgh" / LOCK_FILE).touch()
    deploy(engine, repository, "llm")
    assert sorted(path.name for path in repository.iterdir()) == [".llm.settings", "llm"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".repository.other.abcdefgh", 'engine "1"', "repository"]


def test_a_repository_that_is_a_mount_of_its_own(engine: Path, tmp_path: Path) -> None:
    """A rename cannot cross file systems: the directory is then made inside."""
    repository = tmp_path / "repository"
    repository.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(repository)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    try:
        deploy(engine, repository, "llm")
        model = deploy(engine, repository, "llm", copy=True)
        assert (model / "1" / "engine" / "manifest.json").is_file()
        assert [path.name for path in repository.iterdir()] == ["llm"]
    finally:
        subprocess.run(["umount", str(repository)], check=True)


def test_a_repository_that_is_a_file(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"the directory .*file cannot be made \(File exists\); choose another --repository"):
        deploy(engine, tmp_path / "file", "llm")
