"""What the loop needs of an engine: run one ragged step, copy KV blocks. Knows nothing of requests, scheduling or sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.batch import StepInputs


@dataclass(frozen=True)
class StepOutput:
    """Rows follow `StepInputs.logits_indices`. `logits` is a view that the next `execute` overwrites; copy it to keep it."""

    logits: npt.NDArray[np.float32]  # [R, V]; empty [0, V] when no row was asked for
    next_token: npt.NDArray[np.int64]  # [R], argmax of logits


class Executor(Protocol):
    """Implementations: OpenVINOExecutor (cpu), ReferenceExecutor (ONNX Runtime), and in tests a fake worked out on paper."""

    block_size: int
    num_blocks: int
    vocab_size: int

    def execute(self, inputs: StepInputs) -> StepOutput: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks (source, destination) in every layer, before the step that writes the destinations."""
        ...

    def kv_cache_bytes(self) -> int:
        """Memory held by the pools."""
        ...

    def close(self) -> None: ...
