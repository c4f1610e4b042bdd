"""Hidden directories beside a result: filled, published by a rename, swept when the process that filled them is gone.

    .NAME.xxxxxxxx/.forgeline-staging    locked (flock) by its owner for as long as it lives

The lock file is also the mark of what may be deleted: a directory without one, or with one that somebody holds, is left alone.
A process that was killed holds no lock, so the next one removes what it left, and puts back an engine it had moved away.
Where the file system knows no locks nothing is ever swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK_FILE = ".forgeline-staging"
_MOVED = "replaced"  # inside a staging directory: what the published one took the place of
_TARGET = "target"  # beside it: the path it had
_SUFFIX = r"[a-z0-9_]{8}"  # of tempfile.mkdtemp


@contextlib.contextmanager
def staging_directory(place: Path, name: str) -> Iterator[Path]:
    """A fresh PLACE/.NAME.xxxxxxxx, gone at the end unless it was published; stale ones of that name are swept first."""
    sweep(place, name)
    staging, lock = _locked_directory(place, name)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _locked_directory(place: Path, name: str) -> tuple[Path, int]:
    while True:
        staging = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=place))
        try:
            lock = os.open(staging / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        with contextlib.suppress(OSError):  # no locks on this file system: then sweep() cannot lock either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (staging / LOCK_FILE).exists():
            return staging, lock
        os.close(lock)  # swept between its creation and its lock


def sweep(place: Path, name: str | None = None) -> None:
    """Remove the staging directories of dead processes in `place`: those for `name`, or all."""
    middle = ".+" if name is None else re.escape(name)
    pattern = re.compile(rf"\.({middle})\.{_SUFFIX}", re.DOTALL)
    try:
        found = [entry for entry in place.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:
        return
    for stale in found:
        try:
            lock = os.open(stale / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _put_back(stale)
            shutil.rmtree(stale, ignore_errors=True)
        except OSError:  # in use, or no locks here
            pass
        finally:
            os.close(lock)


def publish(staging: Path, target: Path, check: Callable[[Path], None]) -> None:
    """Make `staging` the new `target`; what was there is deleted, or put back when the rename fails.

    One process at a time per directory, so two builds of one output leave one of the two engines, whole. `check` is called
    when nothing can come in between any more, and raises unless `target` may be replaced.
    """
    with _exclusive(target.parent):
        check(target)
        if os.path.lexists(target):
            _replace(staging, target)
        else:
            os.rename(staging, target)
        (target / LOCK_FILE).unlink(missing_ok=True)


def check_undisturbed(target: Path, check: Callable[[Path], None]) -> None:
    """`check(target)`, but not while another process is between the two renames that replace it."""
    with _exclusive(target.parent) if target.parent.is_dir() else contextlib.nullcontext():
        check(target)


def _replace(staging: Path, target: Path) -> None:
    old, lock = _locked_directory(staging.parent, staging.name[1:].rpartition(".")[0])
    try:
        (old / _TARGET).write_text(str(target), encoding="utf-8")
        try:
            os.rename(target, old / _MOVED)
            os.rename(staging, target)
        except BaseException:
            if not os.path.lexists(target):
                os.rename(old / _MOVED, target)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
        os.close(lock)


def _put_back(stale: Path) -> None:
    """The process died between its two renames."""
    if os.path.lexists(stale / _MOVED):
        target = Path((stale / _TARGET).read_text(encoding="utf-8"))
        with _exclusive(target.parent):
            if not os.path.lexists(target):
                os.rename(stale / _MOVED, target)


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Between processes and threads, where the file system can lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
