"""Engines that are there already: at the output, or elsewhere and copied from there.

Whole ones only: checksums of plan and tokenizer are verified, and manifest and reports must be those that the build wrote, so an
engine that was tuned or edited since is not handed on. The copy shares nothing with its source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.bundle import REPORT_HTML, atomic_directory
from builder.cache import engine_with, keep_engine
from runtime.contract import MANIFEST_FILE, REPORT_JSON, load_manifest
from runtime.errors import EngineError

_UNSUMMED = (MANIFEST_FILE, REPORT_JSON, REPORT_HTML)
_PART = 1 << 20  # bytes


def engine_at(output: Path, key: str) -> dict[str, Any] | None:
    """The report of the engine at `output` when it is whole and was built from the inputs that `key` names."""
    try:
        if load_manifest(output).build.get("key") == key:
            return dict(json.loads((output / REPORT_JSON).read_text(encoding="utf-8")))
    except (EngineError, OSError, ValueError):
        pass
    return None


def remember(key: str, engine: Path) -> None:
    """`engine` has just been written from the inputs that `key` names."""
    keep_engine(key, engine, _digest(engine))


def copied(output: Path, key: str) -> tuple[Path, dict[str, Any]] | None:
    """Where the engine of that key was last written, and its report: copied to `output`, if it is still whole."""
    known = engine_with(key)
    if known is None:
        return None
    engine, digest = known
    try:
        if _digest(engine) != digest:
            return None
        names = [*_UNSUMMED, *load_manifest(engine, verify_checksums=False).checksums]
    except (EngineError, OSError):
        return None
    try:
        with atomic_directory(output) as staging:
            for name in names:
                _copy(engine / name, staging / name)
            report = engine_at(staging, key)  # what was copied is what is checked
            if report is None or _digest(staging) != digest:
                raise _NotWhole
    except _NotWhole:
        return None
    remember(key, output)
    return engine, report


class _NotWhole(Exception):
    """The engine that was to be copied is damaged, or another by now."""


def _digest(engine: Path) -> str:
    """Of what no checksum of the manifest covers."""
    return hashlib.sha256(b"".join(hashlib.sha256((engine / name).read_bytes()).digest() for name in _UNSUMMED)).hexdigest()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        for part in _parts(source):
            file.write(part)


def _parts(source: Path) -> Iterator[bytes]:
    """Raises _NotWhole where the source cannot be read, so that other errors are the target's."""
    try:
        if not source.is_file():
            raise _NotWhole
        with source.open("rb") as file:
            while part := file.read(_PART):
                yield part
    except OSError as error:
        raise _NotWhole from error
