"""Writing an engine directory: all of it or nothing, and never over anything but an engine.

Everything goes to a hidden directory beside the output (staging.py), which a rename makes visible at the end; an interrupted or
failed build leaves nothing behind. An existing engine of the same name is replaced by the same rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from builder.staging import LOCK_FILE, check_undisturbed, publish, staging_directory
from runtime.contract import MANIFEST_FILE, PLAN_DIR, REPORT_JSON, TOKENIZER_DIR
from runtime.errors import BuildError, OutOfDisk

REPORT_HTML = "report.html"
WRITTEN = frozenset({MANIFEST_FILE, REPORT_JSON, REPORT_HTML, PLAN_DIR, TOKENIZER_DIR, LOCK_FILE})  # at the top of an engine
_OURS = ("schema_version", "forgeline_version", "plan")  # keys of every manifest
OTHER_OUTPUT = "choose another --output"
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)

# Of numpy's tofile, with no errno.
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written|problem writing element \d+ to file")


@contextlib.contextmanager
def atomic_directory(output: Path, *, replace: bool = False, remedy: str = OTHER_OUTPUT) -> Iterator[Path]:
    """Yield a temporary directory that becomes `output` when the block succeeds. `replace`: whatever is there.

    Raises  BuildError when `output` exists and is no engine or cannot be written, OutOfDisk when the disk fills up.
    """
    output = Path(os.path.abspath(output))
    check = (lambda _: None) if replace else check_replaceable
    check_undisturbed(output, check)
    make_directory(output.parent, remedy)
    with contextlib.ExitStack() as stack:
        with disk_errors(output.parent, remedy):
            staging = stack.enter_context(staging_directory(output.parent, output.name))
        with disk_errors(output.parent, remedy, written=staging):
            yield staging
            staging.chmod(0o755)
            publish(staging, output, check)


def check_replaceable(output: Path) -> None:
    """Raise BuildError unless `output` is free, an empty directory, or an engine with nothing added to it."""
    with disk_errors(output):
        try:
            output.lstat()
        except FileNotFoundError:
            return
        names = {entry.name for entry in output.iterdir()} if output.is_dir() else None
    if names is not None and not names:
        return
    if names is None or not _is_engine(output):
        raise BuildError(f"{output} exists and is not an engine, so it is not overwritten; {OTHER_OUTPUT} or move it away")
    if foreign := sorted(names - WRITTEN):
        raise BuildError(
            f"{output} holds {foreign[0]}{f' and {len(foreign) - 1} more' if foreign[1:] else ''} beside the engine, "
            f"which no build has written, so it is not overwritten; {OTHER_OUTPUT} or move that away"
        )


def _is_engine(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and all(key in manifest for key in _OURS)


def check_apart(output: Path, model: Path) -> None:
    """Raise BuildError when `output` is the model's own directory or one that holds it."""
    place, held = Path(os.path.realpath(output)), Path(os.path.realpath(model))
    if place == held or place in held.parents:
        what = "is the model itself" if place == held else f"holds the model {model}"
        raise BuildError(f"--output {output} {what}, which the engine would replace; {OTHER_OUTPUT}")


def make_directory(directory: Path, remedy: str = OTHER_OUTPUT) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with disk_errors(_existing(directory), remedy):
                raise
        raise BuildError(f"the directory {directory} cannot be made ({error.strerror}); {remedy}") from error


@contextlib.contextmanager
def disk_errors(place: Path, remedy: str = OTHER_OUTPUT, *, written: Path | None = None) -> Iterator[None]:
    """Turn 'no space left' and quota errors into OutOfDisk with the numbers, refused writes into BuildError."""
    try:
        yield
    except OSError as error:
        short = _SHORT_WRITE.fullmatch(str(error))
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if error.errno == errno.EFBIG or (short and limit != resource.RLIM_INFINITY):
            raise OutOfDisk(
                f"a file for {place} is larger than the {limit / 1e6:.1f} MB that this process may write; raise `ulimit -f`"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or short:
            free = shutil.disk_usage(_existing(place)).free
            if written is None:
                how = f" ({free / 1e6:.0f} MB free)"
            else:  # files that could not be finished are gone again, so nothing but the sum is telling
                how = f": more is needed than the {(free + tree_bytes(written)) / 1e6:.1f} MB that there were"
            raise OutOfDisk(f"the disk of {place} is full{how}; free some space or {remedy}") from error
        if error.errno in _UNUSABLE:
            name = str(place)
            raise BuildError(
                f"cannot write to {name if len(name) <= 200 else name[:200] + '…'} ({error.strerror}); {remedy}"
            ) from error
        raise


def require_space(place: Path, need_bytes: int, what: str, remedy: str = OTHER_OUTPUT) -> None:
    """Fail before the work when the disk cannot hold the result."""
    with disk_errors(place, remedy):
        place = _existing(place)
        free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise OutOfDisk(
            f"{what} needs {need_bytes / 1e6:.0f} MB but the disk of {place} has {free / 1e6:.0f} MB free; "
            f"free some space or {remedy}"
        )


def _existing(place: Path) -> Path:
    """`place` or the nearest directory above it that exists."""
    while not os.path.exists(place):
        place = place.parent
    return place


def tree_bytes(root: Path) -> int:
    total = 0
    for file in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting
            total += file.stat().st_size if file.is_file() else 0
    return total
