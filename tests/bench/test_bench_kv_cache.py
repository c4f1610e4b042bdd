"""bench/kv_cache.py on an executor whose clock advances by the tokens it computes, so both curves are known exactly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.batch import StepInputs
from runtime.executors.base import StepOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import kv_cache


class Counting:
    """next = (last + position) % 7; keeps positions in its pool and demands that a step's own past is there."""

    block_size, num_blocks, vocab_size = 4, 34, 7

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = np.full(self.block_size * self.num_blocks, -1)

    def execute(self, inputs: StepInputs) -> StepOutput:
        self.now += len(inputs.input_ids)
        self.pool[inputs.slot_mapping] = inputs.positions
        (length,) = inputs.seq_lens
        slots = (inputs.block_table[0][:, None] * self.block_size + np.arange(self.block_size)).ravel()[:length]
        assert self.pool[slots].tolist() == list(range(length))
        (row,) = inputs.logits_indices
        token = (inputs.input_ids[row] + inputs.positions[row]) % self.vocab_size
        return StepOutput(np.empty((0, self.vocab_size), np.float32), np.array([token]))

    def copy_blocks(self, copies: object) -> None: ...

    def kv_cache_bytes(self) -> int:
        return self.pool.nbytes

    def close(self) -> None: ...


def test_cached_steps_cost_one_token_and_uncached_steps_all_of_them() -> None:
    executor = Counting()
    curves = kv_cache.measure(executor, [3], length=66, every=16, repetitions=2, clock=lambda: executor.now)
    assert curves.lengths.tolist() == [2, 16, 32, 48, 64, 66]
    assert curves.cached.tolist() == [1, 1, 1, 1, 1, 1]
    assert curves.uncached.tolist() == [2, 16, 32, 48, 64, 66]
    assert curves.tokens_agree


def test_cumulative_cost_and_exponents() -> None:
    lengths = np.arange(1, 513)
    curves = kv_cache.Curves(lengths, np.ones(512), lengths.astype(float), True)
    assert curves.cumulative(curves.cached)[-1] == 512
    assert curves.cumulative(curves.uncached)[-1] == 512 * 513 / 2
    assert curves.exponent(curves.cached) == pytest.approx(1)
    assert curves.exponent(curves.uncached) == pytest.approx(2, abs=0.01)  # N(N+1)/2 is not quite N²


def test_tokens_that_depend_on_the_cache_are_reported() -> None:
    class Forgetful(Counting):
        def execute(self, inputs: StepInputs) -> StepOutput:
            output = super().execute(inputs)
            whole = len(inputs.input_ids) == inputs.seq_lens[0]
            return output if whole else StepOutput(output.logits, (output.next_token + 1) % self.vocab_size)

    executor = Forgetful()
    curves = kv_cache.measure(executor, [3], length=16, every=8, repetitions=1, clock=lambda: executor.now)
    assert not curves.tokens_agree


def test_plot_is_written(tmp_path: Path) -> None:
    curves = kv_cache.Curves(np.array([8, 16, 32]), np.ones(3), np.array([8.0, 16.0, 32.0]), True)
    kv_cache.plot(curves, "toy", tmp_path / "out" / "curve.png")
    assert (tmp_path / "out" / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
