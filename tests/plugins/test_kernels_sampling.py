"""The sampling kernel, interpreted, against runtime/sampler.py's arithmetic.

Both draw the same uniform number for (seed, step). Without filters they also walk the vocabulary in the same order, so they must
choose the same token; with filters the CPU walks from the likeliest, so the kernel is compared with a walk in order of id.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import run_sample

from runtime import logits as cpu

VOCAB = 300


def _logits(rows, seed=0, spread=2.0):
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * spread).astype(np.float32)


def _seeds(rows):
    return np.random.default_rng(99).integers(0, 2**63, rows) * 2 + 1  # int64 bits of unsigned seeds, some beyond 2^63


def _kept_weights(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Weights after min_p, top_k and top_p, written out for one row; lower id first among equals."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    weights = np.exp(scaled.astype(np.float64))
    order = np.argsort(-scaled, kind="stable")
    order = order[weights[order] >= min_p]
    order = order[: top_k or len(order)]
    before = np.cumsum(weights[order]) - weights[order]
    order = order[(before < top_p * weights[order].sum()) | (np.arange(len(order)) == 0)]
    kept = np.zeros(len(logits))
    kept[order] = weights[order]
    return kept


def _walk(kept, uniform):
    running = np.cumsum(kept)
    return int((running <= uniform * running[-1]).sum())


def test_greedy_takes_the_first_of_equal_maxima_and_counts_the_step(interpreter):
    logits = _logits(3)
    logits[1, [40, 250]] = 50.0
    tokens, logprobs, _, steps = interpreter.call(run_sample, logits, {"slots": np.array([2, 0, 1])})
    assert tokens.tolist() == [logits[0].argmax(), 40, logits[2].argmax()]
    assert steps.tolist() == [1, 1, 1]
    wanted = logits[np.arange(3), tokens] - cpu.log_normalizer(logits)
    assert np.allclose(logprobs, wanted, atol=1e-5)


def test_without_filters_the_cpu_sampler_chooses_the_same_token(interpreter):
    rows = 12
    logits, seeds = _logits(rows), _seeds(rows)
    temperature = np.linspace(0.3, 3, rows).astype(np.float32)
    state = {"slots": np.arange(rows), "temperature": temperature, "seeds": seeds, "steps": np.arange(rows)}
    tokens, _, _, steps = interpreter.call(run_sample, logits, state)
    scaled = (logits - logits.max(1, keepdims=True)) / temperature[:, None]
    uniforms = cpu.uniforms(seeds.view(np.uint64), np.arange(rows).astype(np.uint64))
    off = np.zeros(rows)
    assert tokens.tolist() == cpu.choose(scaled, off.astype(np.int64), off + 1, off, uniforms).tolist()
    assert steps.tolist() == list(range(1, rows + 1))


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 9},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 299, "top_p": 0.999},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_filters_keep_what_the_definition_keeps(interpreter, filters):
    rows = 4
    logits, seeds = _logits(rows, seed=5), _seeds(rows)
    temperature = np.array([0.5, 0.8, 1.0, 1.7], np.float32)
    state = {"slots": np.arange(rows), "temperature": temperature, "seeds": seeds, **filters}
    tokens, *_ = interpreter.call(run_sample, logits, state)
    uniforms = cpu.uniforms(seeds.view(np.uint64), np.zeros(rows, np.uint64))
    wanted = [_walk(_kept_weights(logits[i], temperature[i], **filters), uniforms[i]) for i in range(rows)]
    assert tokens.tolist() == wanted


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.65}], ids=str)
def test_ties_at_the_limit_are_kept_by_id(interpreter, filters):
    rows = 8
    logits = np.full((rows, VOCAB), -30.0, np.float32)
    logits[:, [7, 100, 150, 200, 250, 299]] = 1.0  # equal, so the limit falls among them
    logits[:, 60] = 1.5
    seeds = _seeds(rows)
    state = {"slots": np.arange(rows), "temperature": 1.0, "seeds": seeds, **filters}
    tokens, *_ = interpreter.call(run_sample, logits, state)
    uniforms = cpu.uniforms(seeds.view(np.uint64), np.zeros(rows, np.uint64))
    kept = _kept_weights(logits[0], **filters)
    assert tokens.tolist() == [_walk(kept, u) for u in uniforms]
    assert set(tokens) <= set(np.flatnonzero(kept))


def test_distribution_agrees_with_the_cpu_sampler(interpreter):
    """Chi-square of 160 draws against the CPU's probabilities, and against as many CPU draws from other seeds."""
    rows = 160
    logits = np.repeat(_logits(1, seed=4, spread=1.0)[:, :24], rows, axis=0)
    filters = {"top_k": 8, "top_p": 0.9}
    seeds = np.arange(rows)
    state = {"slots": np.arange(rows), "temperature": 1.3, "seeds": seeds, **filters}
    tokens, *_ = interpreter.call(run_sample, logits, state)
    kept = _kept_weights(logits[0], 1.3, **filters)
    ids = np.flatnonzero(kept)
    assert set(tokens) <= set(ids)
    expected = rows * kept[ids] / kept.sum()
    assert len(ids) == 7 and expected.min() > 10
    found = np.array([(tokens == id).sum() for id in ids])
    assert ((found - expected) ** 2 / expected).sum() < 22.46  # 99.9 % of chi-square with 6 degrees of freedom
    scaled = (logits - logits.max(1, keepdims=True)) / np.float32(1.3)
    uniforms = cpu.uniforms((seeds + 10**6).astype(np.uint64), np.zeros(rows, np.uint64))
    draws = cpu.choose(scaled, np.full(rows, 8), np.full(rows, 0.9), np.zeros(rows), uniforms)
    other = np.array([(draws == id).sum() for id in ids])
    assert other.sum() == rows
    assert ((found - other) ** 2 / (found + other)).sum() < 22.46


def test_penalties_use_prompt_and_output_and_count_what_is_chosen(interpreter):
    logits = np.full((4, VOCAB), -9.0, np.float32)
    logits[:2, :4] = [4.0, 3.9, 3.0, -1.0]
    logits[2, :3] = [-1.0, -1.5, -3.0]
    logits[3, :2] = [4.0, 3.8]
    state = {
        "slots": np.arange(4),
        "repetition": np.array([2.0, 1.0, 2.0, 1.0]),
        "presence": np.array([0.0, 0.5, 0.0, 0.5]),
        "frequency": np.array([0.0, 0.3, 0.0, 0.0]),
    }
    # Slot 0: token 0 in the prompt, halved to 2; token 1 wins with 3.9, then halves to 1.95; token 2 wins.
    # Slot 1: the prompt does not count; token 0 was produced twice: 4 - 0.6 - 0.5 = 2.9; token 1 wins, then has 3.1 and wins.
    # Slot 2: negative logits are doubled, not halved: token 0 falls to -2 and token 1 wins, then has -3 and token 0 wins.
    # Slot 3: token 0 is in the prompt only, which presence ignores; produced once it has 3.5.
    history = {0: ([0, 0], 2), 1: ([2, 0, 0], 1), 2: ([0], 1), 3: ([0], 1)}
    tokens, _, counts, _ = interpreter.call(run_sample, logits, dict(state), history=history)
    assert tokens.tolist() == [1, 1, 1, 0]
    in_prompt = 1 << 30
    assert counts[0, :4].tolist() == [in_prompt, 1, 0, 0]
    assert counts[1, :4].tolist() == [2, 1, in_prompt, 0]
    assert counts[3, :4].tolist() == [in_prompt + 1, 0, 0, 0]
    tokens, _, counts, _ = interpreter.call(run_sample, logits, dict(state), history=history, steps=2)
    assert tokens.tolist() == [2, 1, 0, 1]
    assert counts[1, :4].tolist() == [2, 2, in_prompt, 0]


def test_masked_tokens_are_never_chosen_and_keep_their_logprob(interpreter):
    logits = _logits(2)
    order = np.argsort(-logits, axis=1)
    masks = np.full((2, -(-VOCAB // 32)), -1, np.int32)
    for row in range(2):
        for id in order[row, :3]:
            masks[row, id // 32] &= np.int32(~np.uint32(1 << (id % 32)).view(np.int32))
    state = {"slots": np.arange(2), "masks": masks, "temperature": np.array([0, 1]), "top_k": 1}
    tokens, logprobs, *_ = interpreter.call(run_sample, logits, state)
    assert tokens.tolist() == order[:, 3].tolist()
    assert np.allclose(logprobs, logits[[0, 1], tokens] - cpu.log_normalizer(logits), atol=1e-5)


def test_broken_and_padded_rows(interpreter):
    logits = _logits(5)
    logits[0, 17] = np.nan
    logits[1, 200] = np.inf
    logits[2] = -np.inf
    tokens, logprobs, _, steps = interpreter.call(run_sample, logits, {"slots": np.array([0, 1, 2, -1, 3])})
    assert tokens.tolist() == [-1, -1, -1, 0, logits[4].argmax()]
    assert np.isnan(logprobs[:3]).all() and logprobs[3] == 0
    assert steps.tolist() == [0, 0, 0, 1]


def test_a_row_draws_the_same_alone_and_in_a_batch(interpreter):
    logits, seeds = _logits(3, seed=8), _seeds(3)
    state = {"temperature": 1.0, "top_p": 0.95}
    batch, *_ = interpreter.call(run_sample, logits, {"slots": np.array([2, 0, 1]), "seeds": seeds, **state})
    alone, *_ = interpreter.call(run_sample, logits[1:2], {"slots": np.array([0]), "seeds": seeds[:1], **state})
    assert batch[1] == alone[0]


def test_vocabulary_larger_than_a_pass(interpreter):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 2500)).astype(np.float32)
    logits[2, [37, 37 + 1024, 2400]] = 9.0  # equal maxima, two of them a pass apart
    seeds = _seeds(4)
    state = {"slots": np.arange(4), "temperature": [1.0, 1.0, 0.0, 1.5], "seeds": seeds, "top_k": [1500, 20, 0, 0], "top_p": 0.97}
    tokens, *_ = interpreter.call(run_sample, logits, state)
    uniforms = cpu.uniforms(seeds.view(np.uint64), np.zeros(4, np.uint64))
    wanted = [
        _walk(_kept_weights(logits[0], 1.0, 1500, 0.97), uniforms[0]),
        _walk(_kept_weights(logits[1], 1.0, 20, 0.97), uniforms[1]),
        37,
        _walk(_kept_weights(logits[3], 1.5, 0, 0.97), uniforms[3]),
    ]
    assert tokens.tolist() == wanted
