"""Engines that are there already: at the output, or elsewhere and copied from there. Whole ones only: checksums are verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from builder.bundle import WRITTEN, atomic_directory
from builder.cache import engine_with, link_or_copy, remember_engine
from builder.staging import LOCK_FILE
from runtime.contract import MANIFEST_FILE, REPORT_JSON, load_manifest
from runtime.errors import EngineError


def engine_at(output: Path, key: str) -> dict[str, Any] | None:
    """The report of the engine at `output` when it is whole and was built from the inputs that `key` names."""
    try:
        if load_manifest(output).build.get("key") == key:
            return dict(json.loads((output / REPORT_JSON).read_text(encoding="utf-8")))
    except (EngineError, OSError, ValueError):
        pass
    return None


def copied(output: Path, key: str) -> tuple[Path, dict[str, Any]] | None:
    """Where the engine of that key was last written, and its report: linked or copied to `output`, if it is still whole."""
    engine = engine_with(key)
    if engine is None or not (engine / MANIFEST_FILE).is_file():
        return None
    try:
        with atomic_directory(output) as staging:
            for name in sorted(WRITTEN - {LOCK_FILE}):
                if (engine / name).is_dir():
                    shutil.copytree(engine / name, staging / name, copy_function=link_or_copy)
                else:
                    link_or_copy(str(engine / name), str(staging / name))
            report = engine_at(staging, key)  # what was copied is what is checked
            if report is None:
                raise _NotWhole
    except (_NotWhole, FileNotFoundError, shutil.Error):
        return None
    remember_engine(key, output)
    return engine, report


class _NotWhole(Exception):
    """The engine that was to be copied is damaged, or another by now."""
