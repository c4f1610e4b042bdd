"""Perplexity and divergence through the Executor protocol, on a model small enough to be worked out by hand.

`Trigram` predicts from the two latest tokens, which it reads back through slot_mapping and block_table, so a wrong position,
slot, table or row changes the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from builder.accuracy import Window, compare, cut, evaluate, greedy_divergence
from builder.data import calibration_text, heldout_text
from runtime.batch import StepInputs
from runtime.errors import BuildError
from runtime.executors.base import StepOutput

VOCAB = 5
START = VOCAB  # stands for "no token before"


class Trigram:
    def __init__(self, table: npt.NDArray[np.float32], block_size: int = 4, num_blocks: int = 64) -> None:
        self.table = table  # [before, last, V] logits
        self.block_size, self.num_blocks, self.vocab_size = block_size, num_blocks, table.shape[-1]
        self.pool = np.full(num_blocks * block_size, -1, np.int64)
        self.most_rows = self.most_sequences = self.steps = 0
        self.out = np.empty((4096, self.vocab_size), np.float32)  # reused, as the protocol allows

    def execute(self, inputs: StepInputs) -> StepOutput:
        assert len(np.unique(inputs.slot_mapping)) == len(inputs.input_ids)
        assert inputs.block_table.max() < self.num_blocks
        self.pool[inputs.slot_mapping] = inputs.input_ids
        self.steps += 1
        self.most_rows = max(self.most_rows, len(inputs.input_ids))
        self.most_sequences = max(self.most_sequences, len(inputs.seq_lens))
        logits = self.out[: len(inputs.logits_indices)]
        for n, row in enumerate(inputs.logits_indices):
            sequence = int(np.searchsorted(inputs.query_start_loc, row, side="right")) - 1
            position = inputs.seq_lens[sequence] - (inputs.query_start_loc[sequence + 1] - row)
            assert position == inputs.positions[row]
            logits[n] = self.table[self._token(inputs, sequence, position - 1), self._token(inputs, sequence, position)]
        return StepOutput(logits, logits.argmax(-1))

    def _token(self, inputs: StepInputs, sequence: int, position: int) -> int:
        if position < 0:
            return START
        block = inputs.block_table[sequence, position // self.block_size]
        token = int(self.pool[block * self.block_size + position % self.block_size])
        assert token >= 0, "read a slot that was never written"
        return token

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not copies

    def kv_cache_bytes(self) -> int:
        return self.pool.nbytes

    def close(self) -> None:
        pass


def random_table(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(VOCAB + 1, VOCAB + 1, VOCAB)).astype(np.float32)


def distribution(table: npt.NDArray[np.float32], before: int, last: int) -> npt.NDArray[np.float64]:
    weights = np.exp(table[before, last].astype(np.float64))
    return weights / weights.sum()


def contexts(tokens: Sequence[int], context: int) -> list[tuple[int, int, int]]:
    """(before, last, target) of every token but the first, in disjoint windows."""
    found = []
    for n in range(1, len(tokens)):
        at_window_start = (n - 1) % context == 0
        found.append((START if at_window_start else tokens[n - 2], tokens[n - 1], tokens[n]))
    return found


TEXT = np.random.default_rng(7).integers(0, VOCAB, 101).tolist()


@pytest.mark.parametrize(("batch", "rows_per_step", "block_size"), [(1, 256, 4), (3, 8, 4), (8, 1, 32), (4, 7, 1)])
def test_perplexity_is_that_of_the_text(batch: int, rows_per_step: int, block_size: int) -> None:
    table = random_table(1)
    executor = Trigram(table, block_size, num_blocks=256 // block_size)
    expected = [-math.log(distribution(table, before, last)[target]) for before, last, target in contexts(TEXT, 16)]
    result = evaluate(executor, TEXT, context=16, batch=batch, rows_per_step=rows_per_step)
    assert result.num_tokens == 100
    assert result.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-6)  # logits are float32
    assert executor.most_rows <= max(rows_per_step, batch)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    executor = Trigram(np.zeros((VOCAB + 1, VOCAB + 1, VOCAB), np.float32))
    assert evaluate(executor, TEXT, context=16).perplexity == pytest.approx(VOCAB)


def test_windows_score_each_token_once() -> None:
    assert cut(range(7), context=4, stride=4) == [Window((0, 1, 2, 3), (1, 2, 3, 4)), Window((4, 5), (5, 6))]
    assert cut(range(5), context=4, stride=4) == [Window((0, 1, 2, 3), (1, 2, 3, 4))]
    # a smaller stride: context - stride = 2 tokens of left context at least
    assert cut(range(8), context=4, stride=2) == [
        Window((0, 1, 2, 3), (1, 2, 3, 4)),
        Window((2, 3, 4, 5), (5, 6)),
        Window((4, 5, 6), (7,)),
    ]
    # a beginning-of-sequence token before every window makes token 0 predictable and takes one place
    assert cut(range(6), context=4, stride=4, bos_token_id=9) == [
        Window((9, 0, 1, 2), (0, 1, 2, 3)),
        Window((9, 3, 4), (4, 5)),
    ]


def test_stride_and_bos_reach_the_executor() -> None:
    table = random_table(2)
    tokens = [3, 1, 4, 1, 2]
    # windows (bos=0): [0,3,1] scores 3,1,4 then [0,1,4] scores 1 (from 1,4) then [0,4,1] scores 2 (from 4,1)
    wanted = [(START, 0, 3), (0, 3, 1), (3, 1, 4), (1, 4, 1), (4, 1, 2)]
    expected = math.exp(-np.mean([math.log(distribution(table, a, b)[c]) for a, b, c in wanted]))
    result = evaluate(Trigram(table), tokens, context=3, stride=1, bos_token_id=0)
    assert result.num_tokens == 5
    assert result.perplexity == pytest.approx(expected, rel=1e-6)


def test_report_is_the_divergence_of_two_models() -> None:
    left, right = random_table(3), random_table(4)
    divergences, agreed, losses = [], [], []
    for before, last, target in contexts(TEXT, 16):
        p, q = distribution(left, before, last), distribution(right, before, last)
        divergences.append(float((p * np.log(p / q)).sum()))
        agreed.append(p.argmax() == q.argmax())
        losses.append((-math.log(p[target]), -math.log(q[target])))
    seen: list[tuple[int, int]] = []
    report = compare(
        Trigram(left, block_size=4),
        Trigram(right, block_size=8),
        TEXT,
        context=16,
        batch=3,
        rows_per_step=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    reference, candidate = np.exp(np.mean(losses, axis=0))
    assert report.num_tokens == 100
    assert report.reference_perplexity == pytest.approx(reference, rel=1e-6)
    assert report.perplexity == pytest.approx(candidate, rel=1e-6)
    assert report.perplexity_ratio == pytest.approx(candidate / reference, rel=1e-6)
    assert report.mean_kl == pytest.approx(np.mean(divergences), rel=1e-5)
    assert report.p99_kl == pytest.approx(np.percentile(divergences, 99), rel=1e-5)
    assert report.top1_agreement == np.mean(agreed)
    assert seen[-1] == (100, 100)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_equal_models_do_not_diverge() -> None:
    report = compare(Trigram(random_table(5)), Trigram(random_table(5)), TEXT, context=16)
    assert (report.perplexity_ratio, report.mean_kl, report.p99_kl, report.top1_agreement) == (1.0, 0.0, 0.0, 1.0)


def test_rounding_does_not_make_a_divergence_negative() -> None:
    table = random_table(5)
    for scale in (1 - 2**-24, 1 + 2**-23, 1 - 2**-22):  # float32 neighbours
        report = compare(Trigram(table), Trigram(table * np.float32(scale)), TEXT, context=16, batch=1, rows_per_step=1)
        assert 0.0 <= report.mean_kl < 1e-7


def test_large_logits_neither_overflow_nor_hide_a_certain_miss() -> None:
    table = np.zeros((VOCAB + 1, VOCAB + 1, VOCAB), np.float32)
    table[..., 0] = 1000.0
    assert evaluate(Trigram(table), [0, 0, 0], context=4).perplexity == 1.0
    assert evaluate(Trigram(table), [0, 0, 1], context=4).perplexity == pytest.approx(math.exp(500))


def test_batch_shrinks_to_the_smallest_pool() -> None:
    small = Trigram(random_table(1), block_size=4, num_blocks=8)  # two windows of 16
    large = Trigram(random_table(1), block_size=4, num_blocks=64)
    compare(large, small, TEXT, context=16, batch=8)
    assert small.most_sequences == large.most_sequences == 2
    with pytest.raises(BuildError, match="a window of 64 tokens needs 16 KV blocks of 4 but the pool has 8"):
        evaluate(small, TEXT, context=64)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1], {}, "1 tokens in windows of 8 predict nothing"),
        (TEXT, {"context": 1, "bos_token_id": 0}, "101 tokens in windows of 1 predict nothing"),
        (TEXT, {"stride": 9}, r"stride is 9 but must be in \[1, context=8\]"),
        (TEXT, {"stride": -1}, r"stride is -1 but must be in \[1, context=8\]"),
    ],
)
def test_unusable_text_is_refused(tokens: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        evaluate(Trigram(random_table(1)), tokens, **{"context": 8, **options})


def test_models_of_different_vocabulary_are_not_compared() -> None:
    other = Trigram(np.zeros((VOCAB + 1, VOCAB + 1, VOCAB + 1), np.float32))
    with pytest.raises(BuildError, match="vocabulary of 5 but the candidate one of 6"):
        compare(Trigram(random_table(1)), other, TEXT)


def successor_table(steps: dict[int, int]) -> npt.NDArray[np.float32]:
    """last → next, whatever came before; 0 → 1 → 2 → 3 → 4 → 0 unless `steps` says otherwise."""
    table = np.zeros((VOCAB + 1, VOCAB + 1, VOCAB), np.float32)
    for last in range(VOCAB):
        table[:, last, steps.get(last, (last + 1) % VOCAB)] = 1.0
    return table


def test_greedy_divergence_counts_the_tokens_before_the_first_difference() -> None:
    reference, candidate = Trigram(successor_table({})), Trigram(successor_table({3: 0}))
    # from 0: 1 2 3 | 4 against 0;  from 3: at once;  from 4: 0 1 2 3 | 4 against 0
    assert greedy_divergence(reference, candidate, [[0], [1, 2, 3], [0, 1, 2, 3, 4]], num_tokens=6) == (3, 0, 4)
    assert greedy_divergence(reference, candidate, [[4]], num_tokens=3) == (3,)
    assert greedy_divergence(reference, reference, [[0], [1]], num_tokens=9) == (9, 9)


def test_built_in_texts_are_long_enough_and_share_no_paragraph() -> None:
    texts = calibration_text(), heldout_text()
    assert all(100_000 < len(text.encode()) < 200_000 for text in texts)
    left, right = ({line for line in text.split("\n") if len(line) > 40} for text in texts)
    assert left and right
    assert not left & right


# ------------------------------------------------------------------------------------------------------- no such figure


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.nan, "logits that are not numbers"),
        (np.inf, "logits that are not numbers"),
        (-1e9, "a mean loss of .* nats per token"),
    ],
)
def test_a_perplexity_that_is_no_number_is_refused(value: float, what: str) -> None:
    """Token 1 has the broken logit; the text is made of it."""
    good, bad = random_table(1), random_table(1)
    bad[:, :, 1] = value
    text = [1] * 20
    with np.errstate(invalid="ignore"):
        with pytest.raises(BuildError, match=f"the engine gives {what} on the held-out text.*; choose a wider --precision"):
            compare(Trigram(good), Trigram(bad), text, context=16)
        with pytest.raises(BuildError, match=f"the unquantized model gives {what} .*; check the checkpoint's weights"):
            compare(Trigram(bad), Trigram(good), text, context=16)
        with pytest.raises(BuildError, match=f"the model gives {what}"):
            evaluate(Trigram(bad), text, context=16)


def test_an_infinite_divergence_is_refused() -> None:
    """Neither model can predict token 0, which the text lacks: both losses are finite, the divergence is 0 · (∞ − ∞)."""
    table = random_table(1)
    table[:, :, 0] = -np.inf
    message = "the KL divergence of 19 of 19 held-out tokens is not a number"
    with np.errstate(invalid="ignore"), pytest.raises(BuildError, match=message):
        compare(Trigram(table), Trigram(table), [1] * 20, context=16)
