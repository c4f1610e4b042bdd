"""Which executor runs which target. Implementations are imported when they are needed."""

from __future__ import annotations

import os

from runtime.config import ResolvedConfig
from runtime.contract import Manifest
from runtime.errors import ManifestMismatch
from runtime.executors.base import Executor


def load_executor(engine_dir: str | os.PathLike[str], manifest: Manifest, config: ResolvedConfig) -> Executor:
    """Raises  ManifestMismatch when this installation or machine does not fit the engine."""
    if manifest.target == "cpu":
        from runtime.executors.openvino import OpenVINOExecutor

        return OpenVINOExecutor(engine_dir, manifest, config.num_blocks, config.num_threads)
    raise ManifestMismatch(
        f"the engine was built for target {manifest.target!r} but this runtime runs cpu; rebuild with --target cpu"
    )
