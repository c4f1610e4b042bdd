"""Writing an engine directory: all of it or nothing.

Everything goes to a hidden directory beside the output, which a rename makes visible at the end; an interrupted or failed
build leaves nothing behind. An existing engine of the same name is replaced by the same rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.contract import MANIFEST_FILE
from runtime.errors import BuildError, OutOfDisk


@contextlib.contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `output` when the block succeeds.

    Raises  BuildError when `output` exists and is no engine, OutOfDisk when the disk fills up.
    """
    output = Path(os.path.abspath(output))
    if output.exists() and not (output / MANIFEST_FILE).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(f"{output} exists and is not an engine, so it is not overwritten; choose another --output or remove it")
    with disk_errors(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    old: Path | None = None
    try:
        with disk_errors(output.parent):
            yield staging
            staging.chmod(0o755)
            if output.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
                os.rename(output, old / "engine")
            os.rename(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if old is not None:
            if not output.exists():
                os.rename(old / "engine", output)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn 'no space left' and quota errors into OutOfDisk with the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(place).free if place.exists() else 0
            raise OutOfDisk(
                f"the disk of {place} is full ({free / 1e6:.0f} MB free); free some space or choose another --output"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
            raise BuildError(f"cannot write to {place} ({error.strerror}); choose another --output") from error
        raise


def require_space(place: Path, need_bytes: int, what: str) -> None:
    """Fail before the work when the disk cannot hold the result."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise OutOfDisk(
            f"{what} needs {need_bytes / 1e6:.0f} MB but the disk of {place} has {free / 1e6:.0f} MB free; "
            "free some space or choose another place"
        )


def tree_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
