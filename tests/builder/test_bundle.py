"""An engine directory appears whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.bundle import atomic_directory, disk_errors, require_space, tree_bytes
from builder.cache import prune
from runtime.errors import BuildError, OutOfDisk

OLD = '{"schema_version": 1, "forgeline_version": "0", "plan": {}}'


def names(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir())


def test_output_appears_with_its_content(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "a" / "engine") as staging:
        (staging / "manifest.json").write_text("{}")
        assert names(tmp_path / "a") == [staging.name]
    assert names(tmp_path / "a") == ["engine"]
    assert (tmp_path / "a" / "engine" / "manifest.json").read_text() == "{}"


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(tmp_path / "engine") as staging:
        (staging / "plan.bin").write_bytes(b"x" * 100)
        raise RuntimeError("half way")
    assert names(tmp_path) == []


def test_failure_keeps_the_engine_that_was_there(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "manifest.json").write_text(OLD)
    with pytest.raises(KeyboardInterrupt), atomic_directory(engine):
        raise KeyboardInterrupt
    assert (engine / "manifest.json").read_text() == OLD
    with atomic_directory(engine) as staging:
        (staging / "manifest.json").write_text("new")
    assert (engine / "manifest.json").read_text() == "new"
    assert names(tmp_path) == ["engine"]


def test_a_directory_that_is_no_engine_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    for manifest in (None, "5", '{"name": "an extension", "plan": {}}'):  # others have a manifest.json too
        if manifest is not None:
            (tmp_path / "photos" / "manifest.json").write_text(manifest)
        with pytest.raises(BuildError, match="is not an engine, so it is not overwritten"), atomic_directory(tmp_path / "photos"):
            pass
    assert names(tmp_path / "photos") == ["cat.png", "manifest.json"]


def test_disk_errors_translates_only_disk_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfDisk, match="is full"), disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutOfDisk, match="is full"), disk_errors(tmp_path):
        raise OSError("180224 requested and 151552 written")  # numpy
    with monkeypatch.context() as patch:
        patch.setattr("resource.getrlimit", lambda _: (2_000_000, 2_000_000))
        for error in (OSError(errno.EFBIG, "File too large"), OSError("problem writing element 8192 to file")):
            with pytest.raises(OutOfDisk, match=r"larger than the 2.0 MB that this process may write"), disk_errors(tmp_path):
                raise error
    with pytest.raises(BuildError, match="cannot write"), disk_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")


def test_require_space_names_both_numbers(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1, "a byte")
    with pytest.raises(OutOfDisk, match=r"the engine needs 1000000000000 MB but the disk of .* has \d+ MB free"):
        require_space(tmp_path / "not" / "yet", 10**18, "the engine")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(small_disk: Path) -> None:
    with (
        pytest.raises(OutOfDisk, match=r"is full: more is needed than the 1\.0 MB that there were; free some space"),
        atomic_directory(small_disk / "engine") as staging,
    ):
        (staging / "weights.bin").write_bytes(b"x" * (2 << 20))
    assert names(small_disk) == []


def test_prune_drops_the_least_recently_used(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    assert tree_bytes(tmp_path) == 300
    assert prune(tmp_path, keep=tmp_path / "old", max_bytes=250) == [tmp_path / "middle"]
    assert names(tmp_path) == ["new", "old"]
