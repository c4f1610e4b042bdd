"""What the loop needs of an engine: run one ragged step, copy KV blocks. Knows nothing of requests, scheduling or sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from runtime.batch import StepInputs

Numbers = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]


class Choose(Protocol):
    """What `runtime.logits.choose` does, as compiled code."""

    def __call__(
        self,
        values: npt.NDArray[np.float32],
        rows: Ints,
        best: Numbers,
        temperature: Numbers,
        top_k: Ints,
        top_p: Numbers,
        min_p: Numbers,
        uniform: npt.NDArray[np.float64],
    ) -> Ints:
        """Token ids of some rows of `values` [R, V], whose largest values `best` are finite; the others are [N], as `rows`."""
        ...


@dataclass(frozen=True)
class StepOutput:
    """Rows follow `StepInputs.logits_indices`. `logits` is a view that the next `execute` overwrites; copy it to keep it."""

    logits: npt.NDArray[np.float32]  # [R, V]; empty [0, V] when no row was asked for
    next_token: npt.NDArray[np.int64]  # [R], argmax of logits
    choose: Choose | None = None  # where the executor has a kernel for it
    logits_at_hand: ClassVar[bool] = (
        True  # False: reading `logits` fetches them from a device, so do it only for rows that need it
    )


class Executor(Protocol):
    """Implementations: OpenVINOExecutor (cpu), TensorRTExecutor (tensorrt, tensorrt-rtx), ReferenceExecutor (ONNX Runtime), and
    in tests a fake worked out on paper."""

    block_size: int
    num_blocks: int
    vocab_size: int
    min_prefill_tokens: int  # a prompt in parts of at least this many tokens has the result of the whole prompt

    def execute(self, inputs: StepInputs) -> StepOutput: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks (source, destination) in every layer, before the step that writes the destinations."""
        ...

    def kv_cache_bytes(self) -> int:
        """Memory held by the pools."""
        ...

    def close(self) -> None: ...


class PipelinedExecutor(Executor, Protocol):
    """An executor whose next step may start before the host has seen the tokens of the one before: TensorRTExecutor.

    `execute(inputs)` is `submit(inputs)` then `collect()`. At most two steps are under way; `logits` of a step can be read until
    the next `submit`.
    """

    def submit(self, inputs: StepInputs, feedback: Sequence[tuple[int, int]] = ()) -> None:
        """Start a step. Each (index, row) of `feedback` replaces `inputs.input_ids[index]`, whatever the host put there, by the
        `next_token` of that row of the step submitted before."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step not yet collected."""
        ...
