"""What a row draws: the distribution, the same whatever shares the batch, a function of seed and position."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sampler_steps import make_request, pick, softmax, step

from runtime import logits as ops
from runtime.sampler import Sampler

pytestmark = pytest.mark.usefixtures("both_ways_to_choose")

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def brute_force(values, temperature, top_k, top_p, min_p):
    """(ids, probabilities) best first, by the definition of each filter, in float64."""
    probability = softmax(np.asarray(values, np.float64) / temperature)
    ids = np.argsort(-np.asarray(values, np.float64), kind="stable")
    ids = ids[probability[ids] >= min_p * probability.max() * (1 - 1e-9)]
    if top_k >= 1:
        ids = ids[:top_k]
    kept, share = [], probability[ids] / probability[ids].sum()
    for id, mass in zip(ids, share, strict=True):
        kept.append(id)
        if share[: len(kept)].sum() >= top_p or not share[len(kept) :].any():  # all of it may round to less than 1
            break
        assert mass > 0
    probability = probability[kept]
    return kept, probability / probability.sum()


def critical_chi_square(degrees):
    """99.99 % quantile, by Wilson and Hilferty's cube."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 9, "min_p": 0.05},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.08},
    ],
    ids=lambda params: " ".join(f"{name}={value}" for name, value in params.items()),
)
def test_draws_follow_the_distribution(params):
    vocab, rows, steps = 600, 2000, 10  # more than two of draw()'s groups
    logits = np.random.default_rng(1).permutation(np.linspace(-6, 2, vocab) + 4 * (np.arange(vocab) > vocab - 9))
    logits = logits.astype(np.float32)
    ids, probability = brute_force(
        logits, params["temperature"], params.get("top_k", 0), params.get("top_p", 1), params.get("min_p", 0)
    )
    requests = [make_request(seed=seed, **params) for seed in range(rows)]
    sampler, counts = Sampler(vocab), np.zeros(vocab)
    for _ in range(steps):
        tokens = sampler.sample(step(np.tile(logits, (rows, 1))), requests).token_ids.tolist()
        np.add.at(counts, tokens, 1)
        for request, token in zip(requests, tokens, strict=True):
            request.token_ids.append(token)
    assert counts[ids].sum() == rows * steps  # nothing outside the filters
    expected = probability * rows * steps
    common = expected >= 5
    observed = np.append(counts[ids][common], counts[ids][~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert ((observed - expected) ** 2 / expected).sum() < critical_chi_square(len(expected) - 1)


@settings(UNHURRIED, max_examples=300)
@given(
    values=st.lists(st.sampled_from([-math.inf, -9.0, -3.0, -1.0, -0.5, -0.25, 0.0]), min_size=2, max_size=400),
    top_k=st.integers(-1, 500),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_filters_with_ties_choose_by_inverse_cdf(values, top_k, top_p, min_p, uniform):
    """Best first, ties by id. Without a filter the order is that of the ids."""
    values[len(values) // 2] = 0.0
    shares = np.cumsum(brute_force(values, 1.0, top_k, 1.0, min_p)[1])
    assume(top_p == 1 or np.abs(shares - top_p).min() > 1e-9)  # 0.2 + 0.2 may round to less than 0.4, or not
    ids, probability = brute_force(values, 1.0, top_k, top_p, min_p)
    if not (1 <= top_k < len(values)) and top_p == 1 and min_p == 0:
        probability = probability[np.argsort(ids)]
        ids = np.sort(ids)
    running = np.cumsum(probability)
    expected = int(np.searchsorted(running, uniform, side="right"))
    row = np.array([values], np.float32)
    got = int(ops.choose(row, np.array([top_k]), np.array([top_p]), np.array([min_p]), np.array([uniform]))[0])
    near = {int(ids[i]) for i in (expected - 1, expected, expected + 1) if 0 <= i < len(ids)}
    assert got in (near if np.abs(running - uniform).min() < 1e-5 else {int(ids[expected])})


def test_a_nucleus_draws_a_token_at_the_edge_of_a_histogram_bin():
    """The bin's mass and the running sum of its sorted weights round apart, by more than the distance of these targets."""
    rng = np.random.default_rng(6)
    values = np.concatenate([rng.uniform(-0.12, 0, (200, 50)), rng.uniform(-0.24, -0.13, (200, 50))], axis=1).astype(np.float32)
    values[:, 0] = 0
    weights = np.exp(values).astype(np.float64)
    uniform = weights[:, :50].sum(axis=1) / weights.sum(axis=1) * (1 - 1e-12)
    got = ops.choose(values.copy(), np.zeros(200, np.int64), np.full(200, 1 - 1e-9), np.zeros(200), uniform)
    worst, best = values[:, :50].min(axis=1), values[:, 50:].max(axis=1)
    drawn = values[np.arange(200), got]
    assert ((drawn == worst) | (drawn == best)).all()


def random_params(rng):
    return {
        "temperature": float(rng.choice([0.0, 0.7, 1.0, 1.8])),
        "top_k": int(rng.choice([0, 1, 5, 40, 900])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5])),
        "min_p": float(rng.choice([0.0, 0.05])),
        "repetition_penalty": float(rng.choice([1.0, 1.3])),
        "logprobs": [None, 0, 4][rng.integers(3)],
        "seed": int(rng.integers(2**62)),
    }


@pytest.mark.parametrize("block_bytes", [4 << 20, 12_000])  # all rows at once; three rows at a time
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(monkeypatch, block_bytes):
    monkeypatch.setattr("runtime.sampler._BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(3)
    vocab = 1000
    params = [random_params(rng) for _ in range(40)]
    logits = rng.normal(0, 3, (6, 40, vocab)).astype(np.float32)

    def generate(batch):
        sampler = Sampler(vocab)
        requests = [make_request(**params[i]) for i in batch]
        logprobs = []
        for position in range(6):
            sampled = sampler.sample(step(logits[position, batch]), requests)
            logprobs.append(sampled.logprobs)
            for request, token in zip(requests, sampled.token_ids.tolist(), strict=True):
                request.token_ids.append(token)
        return {
            i: (request.output_token_ids, [row[j] for row in logprobs])
            for j, (i, request) in enumerate(zip(batch, requests, strict=True))
        }

    together = generate(list(range(40)))
    reversed_order = generate(list(range(39, -1, -1)))
    alone = {i: generate([i])[i] for i in range(40)}
    assert together == alone == reversed_order  # logprobs too, bit for bit


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_seed_alone_decides(seed):
    output = step(np.zeros((1, 5000)))
    tokens = {int(Sampler(5000).sample(output, [make_request(temperature=1.0, seed=seed)]).token_ids[0]) for _ in range(5)}
    assert len(tokens) == 1


def test_seeds_and_positions_change_the_draw_and_a_repeat_does_not():
    sampler, output = Sampler(5000), step(np.zeros((1, 5000)))
    request = make_request(temperature=1.0, seed=1)
    first = sampler.sample(output, [request]).token_ids[0]
    assert sampler.sample(output, [request]).token_ids[0] == first  # the same position again: recomputed after preemption
    assert sampler.sample(output, [make_request(temperature=1.0, seed=2)]).token_ids[0] != first
    request.token_ids.append(7)
    assert sampler.sample(output, [request]).token_ids[0] != first


def test_without_a_seed_each_request_draws_its_own_once():
    sampler, output = Sampler(10**6), step(np.zeros((1, 10**6)))
    request, other = make_request(temperature=1.0), make_request(temperature=1.0)
    first = sampler.sample(output, [request]).token_ids[0]
    assert sampler.sample(output, [request]).token_ids[0] == first
    assert sampler.sample(output, [other]).token_ids[0] != first  # fails once in a million runs
    sampler.forget(request)
    assert sampler.sample(output, [request]).token_ids[0] != first


def test_uniforms_are_splitmix64_and_keep_their_meaning():
    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    seeds, positions = [0, 1, 42, 2**64 - 1], [0, 1, 1000, 2**31]
    golden = 0x9E3779B97F4A7C15
    expected = [
        (mix((mix((s + golden) % 2**64) + (p + 1) * golden) % 2**64) >> 11) / 2**53 for s, p in zip(seeds, positions, strict=True)
    ]
    assert ops.uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64)).tolist() == expected


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_uniforms_are_uniform_and_uncorrelated(over):
    n = 100_000
    count, fixed = np.arange(n, dtype=np.uint64), np.full(n, 3, np.uint64)
    values = ops.uniforms(count, fixed) if over == "seeds" else ops.uniforms(fixed, count)
    buckets = np.bincount((values * 100).astype(int), minlength=100)
    assert ((buckets - n / 100) ** 2 / (n / 100)).sum() < critical_chi_square(99)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-300}])
def test_the_narrowest_filters_are_greedy(params):
    params = {"temperature": 1.0, **params}
    for seed in range(20):
        assert pick([1.0, 3.0, 2.999, -math.inf], seed=seed, **params) == 1
    assert pick([1.0, 3.0, 3.0, 3.0], **{**params, "top_k": 1}) == 1  # a tie goes to the lower id


def test_an_extreme_temperature_is_uniform_over_what_is_not_masked():
    tokens = {pick([5.0, 1.0, -math.inf, 0.0], seed=seed, temperature=1e308) for seed in range(50)}
    assert tokens == {0, 1, 3}


def test_top_k_keeps_exactly_k_of_equal_logits():
    assert {pick([1.0] * 90, seed=seed, temperature=1.0, top_k=3) for seed in range(100)} == {0, 1, 2}
