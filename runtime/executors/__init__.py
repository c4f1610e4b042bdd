"""Which executor runs which target. Implementations are imported when they are needed."""

from __future__ import annotations

import os

from runtime.config import ResolvedConfig
from runtime.contract import Manifest
from runtime.errors import ManifestMismatch
from runtime.executors.base import Executor

TARGETS = ("cpu", "tensorrt", "tensorrt-rtx")


def load_executor(engine_dir: str | os.PathLike[str], manifest: Manifest, config: ResolvedConfig) -> Executor:
    """Raises  EngineError, ManifestMismatch when this installation or machine does not fit the engine."""
    if manifest.target == "cpu":
        from runtime.executors.openvino import OpenVINOExecutor

        return OpenVINOExecutor(engine_dir, manifest, config.num_blocks, config.num_threads)
    if manifest.target in ("tensorrt", "tensorrt-rtx"):
        from runtime.executors.tensorrt import TensorRTExecutor

        _check_step_size(manifest, config)
        return TensorRTExecutor(engine_dir, manifest, config.num_blocks)
    raise ManifestMismatch(
        f"the engine was built for target {manifest.target!r} but this runtime runs {', '.join(TARGETS)}; "
        "rebuild with --target cpu"
    )


def _check_step_size(manifest: Manifest, config: ResolvedConfig) -> None:
    """A plan takes steps of a largest size, fixed when it was built."""
    built = manifest.max_num_batched_tokens
    for option, asked in (
        ("max_num_batched_tokens", config.max_num_batched_tokens),
        ("enable_chunked_prefill=false: max_model_len", 0 if config.enable_chunked_prefill else config.max_model_len),
    ):
        if asked > built:
            raise ManifestMismatch(
                f"{option}={asked} exceeds the {built} tokens per step the engine was built for; rebuild with "
                f"--max-num-batched-tokens {asked}, or set it to {built} or less"
            )


def kv_cache_free_bytes(manifest: Manifest) -> int | None:
    """What is free, beside the weights, of the memory that will hold the KV cache; None: this machine's main memory.

    Raises  EngineError when the engine needs a GPU and there is none.
    """
    if manifest.target not in ("tensorrt", "tensorrt-rtx"):
        return None
    from runtime.executors.tensorrt_load import free_bytes_beside_weights

    return free_bytes_beside_weights(manifest)
