"""The CPU's sampling kernel against the definition in float64, against itself in other batches, and at the edges."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from plugins.sampling.native.choose import Choose

LAST = 1 - 2**-53  # the largest uniform number


@pytest.fixture(scope="module")
def choose(cpu_kernels: Path) -> Choose:
    made = Choose.of(cpu_kernels, 2)
    assert made is not None
    return made


def token(
    choose: Choose,
    values: list[float],
    uniform: float,
    temperature: float = 1.0,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    row = np.array([values], np.float32)
    parameters = (np.array([each]) for each in (temperature, top_k, top_p, min_p, uniform))
    return int(choose(row, np.array([0]), row.max(1), *parameters)[0])


def defined(values: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """By the definition of each filter: ids in order of the draw, sums of their weights, and where the uniform number falls."""
    distances = (np.float32(values.max()) - values) * np.float32(1 / temperature)
    weights = np.exp(-distances.astype(np.float64))
    unfiltered = not 0 < top_k < len(values) and top_p == 1 and min_p == 0
    ids = np.arange(len(values)) if unfiltered else np.lexsort((np.arange(len(values)), distances))
    if min_p > 0:
        ids = ids[distances[ids] <= -np.log(min_p).astype(np.float32)]
    if 0 < top_k < len(values):
        ids = ids[:top_k]
    running = np.cumsum(weights[ids])
    if top_p < 1:
        ids = ids[: np.searchsorted(running, top_p * running[-1]) + 1]
        running = running[: len(ids)]
    return int(ids[np.searchsorted(running, uniform * running[-1], side="right")])


CASES = list(
    itertools.product(
        (1, 2, 15, 16, 17, 255, 256, 257, 5000),  # vocabulary
        ("smooth", "ties", "masked", "flat", "peaked"),
        ((0, 1.0, 0.0), (-1, 0.9, 0.0), (5, 1.0, 0.0), (40, 0.7, 0.0), (0, 1.0, 0.05), (0, 0.6, 0.01), (300, 0.95, 1e-4)),
    )
)


def logits(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal((rows, vocab)).astype(np.float32) * (0 if kind == "flat" else 3)
    if kind == "ties":
        values = np.round(values)
    if kind == "masked":
        values[:, rng.random(vocab) < 0.7] = -np.inf
        values[:, vocab // 2] = 1
    if kind == "peaked":
        values[:, vocab // 3] += 90
    return values


def test_tokens_are_those_of_the_definition(choose: Choose) -> None:
    rng = np.random.default_rng(0)
    for vocab, kind, (top_k, top_p, min_p) in CASES:
        values = logits(kind, 4, vocab, rng)
        temperature, uniform = rng.choice([0.3, 1.0, 1.7], 4), rng.random(4)
        every = (np.full(4, each) for each in (top_k, top_p, min_p))
        got = choose(values, np.arange(4), values.max(1), temperature, *every, uniform)
        for row, chosen in enumerate(got.tolist()):

            def near(p: float, u: float, row: int = row) -> int:
                return defined(values[row], temperature[row], top_k, p, min_p, u)  # noqa: B023

            ends = (-3e-6, 0.0, 3e-6)  # sums of float32 weights are exact to about 1e-6
            allowed = {
                near(min(top_p + dp, 1.0) if top_p < 1 else 1.0, min(max(uniform[row] + du, 0), LAST))
                for dp in ends
                for du in ends
            }
            assert chosen in allowed, (vocab, kind, top_k, top_p, min_p, row)


def test_a_row_has_the_same_token_in_any_batch_and_with_any_threads(cpu_kernels: Path) -> None:
    rng = np.random.default_rng(1)
    rows, vocab = 24, 3000
    values = logits("smooth", rows, vocab, rng)
    parameters = (
        rng.choice([0.5, 1.0, 1.5], rows), rng.choice([0, 7, 400], rows), rng.choice([1.0, 0.9, 0.4], rows),
        rng.choice([0.0, 0.02], rows), rng.random(rows),
    )  # fmt: skip

    def run(threads: int, order: np.ndarray) -> list[int]:
        made = Choose.of(cpu_kernels, threads)
        assert made is not None
        return made(values, order, values.max(1)[order], *(each[order] for each in parameters)).tolist()

    expected = run(1, np.arange(rows))
    for threads in (1, 2, 7):
        assert run(threads, np.arange(rows)) == expected
        assert run(threads, np.arange(rows)[::-1]) == expected[::-1]
        assert [run(threads, np.array([row]))[0] for row in range(rows)] == expected


@pytest.mark.parametrize(
    ("filters", "first", "last"),
    [
        ({}, 1, 5),  # by id
        ({"min_p": 0.01}, 3, 5),  # likeliest first
        ({"top_p": 0.9}, 3, 1),  # 1/2 + 1/4 + 1/8 is less
        ({"top_k": 3}, 3, 2),
        ({"top_k": 3, "top_p": 0.9}, 3, 2),  # 1/2 + 1/4 is less than 0.9 of 7/8
        ({"top_k": 3, "top_p": 0.8}, 3, 4),
    ],
)
def test_the_ends_of_the_uniform_number_draw_the_ends_of_what_is_kept(
    choose: Choose, filters: dict[str, float], first: int, last: int
) -> None:
    values = [float("-inf"), *np.log([1 / 16, 1 / 8, 1 / 2, 1 / 4, 1 / 16]), float("-inf")]
    assert token(choose, values, 0.0, **filters) == first
    assert token(choose, values, LAST, **filters) == last


def test_zeros_of_both_signs_are_equal_and_the_lower_id_comes_first(choose: Choose) -> None:
    for values in ([-0.0, 0.0, -0.0], [0.0, -0.0, 0.0]):
        for best in (0.0, -0.0):
            row, one = np.array([values], np.float32), np.array([1.0])
            got = choose(row, np.array([0]), np.array([best]), one, np.array([1]), one, 0 * one, np.array([LAST]))
            assert got.tolist() == [0]


def test_the_smallest_nucleus_holds_one_token(choose: Choose) -> None:
    values = [0.0, 0.1, 3.0, 0.2]
    assert {token(choose, values, uniform, top_p=1e-12) for uniform in (0.0, 0.5, LAST)} == {2}
    assert {token(choose, values, uniform, temperature=1e-5) for uniform in (0.0, 0.5, LAST)} == {2}
    assert [token(choose, values, (i + 0.5) / 4, temperature=1e30) for i in range(4)] == [0, 1, 2, 3]


def test_a_library_without_the_kernel_is_no_error() -> None:
    (library, *_) = (Path(ov.__file__).parent / "libs").glob("libtbb.so.*")
    assert Choose.of(library, 2) is None


def test_rows_that_are_not_there_are_refused(choose: Choose) -> None:
    row, one = np.zeros((1, 4), np.float32), np.array([1.0])
    for wrong in (1, -1):
        with pytest.raises(AssertionError):
            choose(row, np.array([wrong]), one, one, one, one, one, one)
