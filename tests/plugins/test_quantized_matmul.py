"""The CPU kernels against numpy. Most cases are exact: integers and powers of two as scales, so that no float is ever rounded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from plugins.quantized_matmul.openvino import Library, Shape

# group, input_group; a row's inputs have a scale for as many weights as a group has, or for several groups.
GROUPS = [(32, 32), (32, 64), (32, 128), (64, 64), (64, 128), (128, 128)]
ROWS = [1, 2, 4, 5, 12, 13, 30]  # tiles of up to 4 rows, of up to 12, of several
WIDTHS = [32, 96, 160, 256, 576]  # the last group of 128 has 32, 96, 32, 128, 64 columns
EPSILON = 0.25
OUTPUTS = [18, 32, 80, 160]  # panels of 32: part of one, one, two and a half, five


@pytest.fixture(scope="module")
def library(cpu_kernels: Path) -> Library:
    return Library(cpu_kernels)


def shape_of(outputs: int, width: int, bits: int, group: int, input_group: int, gated: bool = False) -> Shape:
    values = {"outputs": outputs, "width": width, "bits": bits, "group": group, "input_group": input_group}
    return Shape(**values, epsilon=EPSILON, gated=gated)


def weights(rng: np.random.Generator, outputs: int, width: int, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers, both extremes among them, and scales that are powers of two: per group with 4 bits, per row with 8."""
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    q = rng.integers(low, high, (outputs, width)).astype(np.int8)
    q[0, 0], q[-1, -1] = low, high - 1
    shape = (outputs, -(-width // group)) if bits == 4 else (outputs,)
    return q, np.exp2(rng.integers(-13, -10, shape) + 8 - bits).astype(np.float32)


def stored(q: np.ndarray, bits: int) -> np.ndarray:
    """As ONNX stores them."""
    return ((q[:, 0::2] & 15) | (q[:, 1::2] << 4)).astype(np.uint8) if bits == 4 else q


def exact_inputs(rng: np.random.Generator, rows: int, width: int, input_group: int) -> np.ndarray:
    """Each group is 127 · 2ⁿ at its largest, so its scale is 2ⁿ and no value is rounded."""
    x = rng.integers(-127, 128, (rows, width)).astype(np.float32)
    for begin in range(0, width, input_group):
        part = x[:, begin : begin + input_group]
        part[np.arange(rows), rng.integers(0, part.shape[1], rows)] = rng.choice([-127, 127], rows)
        part *= np.exp2(rng.integers(-2, 3, (rows, 1)))
    return x


def per_column(scale: np.ndarray, width: int, group: int) -> np.ndarray:
    return np.repeat(scale, group, axis=1)[:, :width] if scale.ndim == 2 else scale[:, None]


def gate(y: np.ndarray) -> np.ndarray:
    first, second = np.split(y, 2, axis=1)
    return first / (1 + np.exp(-first)) * second


def rounded(x: np.ndarray, input_group: int) -> np.ndarray:
    """What x is worth once it is 8 bits: the rounding in f32, as the kernel does it, the rest in f64."""
    out = np.empty(x.shape)
    for begin in range(0, x.shape[1], input_group):
        part = x[:, begin : begin + input_group]
        scale = np.abs(part).max(1, keepdims=True) / np.float32(127)
        codes = np.rint(part / np.where(scale > 0, scale, np.float32(1)))
        out[:, begin : begin + input_group] = codes.astype(np.float64) * scale
    return out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("group", "input_group"), GROUPS)
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_integers_are_exact(bits: int, group: int, input_group: int, gated: bool, library: Library) -> None:
    rng = np.random.default_rng(bits * group + input_group)
    for outputs in OUTPUTS:
        for width in WIDTHS:
            q, scale = weights(rng, outputs, width, bits, group)
            shape = shape_of(outputs, width, bits, group, input_group, gated)
            packed = library.pack(shape, stored(q, bits), scale)
            dense = q * per_column(scale, width, group).astype(np.float64)
            for rows in ROWS:
                x = exact_inputs(rng, rows, width, input_group)
                found, expected = library.multiply(shape, packed, x), x.astype(np.float64) @ dense.T
                if gated:  # its exponential is exact to 2e-7
                    np.testing.assert_allclose(found, gate(expected), rtol=1e-6, atol=1e-30, err_msg=f"{outputs, width, rows}")
                else:
                    assert np.array_equal(found, expected), (outputs, width, rows)


@pytest.mark.parametrize("group", [32, 64])
def test_a_scale_may_serve_several_groups(group: int, library: Library) -> None:
    """Weights in groups of 128 under inputs in smaller ones."""
    rng = np.random.default_rng(group)
    q, scale = weights(rng, 96, 384, 4, 128)
    shape = shape_of(96, 384, 4, group, group)
    x = exact_inputs(rng, 5, 384, group)
    expected = x.astype(np.float64) @ (q * per_column(scale, 384, 128).astype(np.float64)).T
    assert np.array_equal(library.multiply(shape, library.pack(shape, stored(q, 4), scale), x), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_are_rounded_in_groups(bits: int, gated: bool, library: Library) -> None:
    """Any scales, any inputs. Tolerance: at most 18 groups are added in f32, each off by 6e-8 of the sum."""
    rng = np.random.default_rng(bits)
    for group, input_group in GROUPS:
        q, scale = weights(rng, 96, 576, bits, group)
        scale = (scale * rng.uniform(0.5, 1.5, scale.shape)).astype(np.float32)
        shape = shape_of(96, 576, bits, group, input_group, gated)
        x = (rng.standard_normal((7, 576)) * np.exp(rng.standard_normal((7, 576)))).astype(np.float32)
        dense = q * per_column(scale, 576, group).astype(np.float64)
        expected, unrounded = rounded(x, input_group) @ dense.T, x @ dense.T
        if gated:
            expected, unrounded = gate(expected), gate(unrounded)
        found = library.multiply(shape, library.pack(shape, stored(q, bits), scale), x)
        assert np.abs(found - expected).max() / np.abs(expected).max() < 3e-6, (group, input_group)
        assert np.abs(unrounded - expected).max() / np.abs(expected).max() > 1e-3  # rounding shows


def test_inputs_round_to_nearest_and_ties_to_even(library: Library) -> None:
    """Weights of one column each show the codes of the inputs."""
    shape = shape_of(32, 32, 8, 32, 32)
    packed = library.pack(shape, np.eye(32, dtype=np.int8), np.ones(32, np.float32))
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 2.4999, -2.51, -127]
    codes = [127, 0, 2, 2, 0, -2, 2, -3, -127]
    assert library.multiply(shape, packed, x)[0].tolist() == codes + [0] * 23
    assert library.multiply(shape, packed, x / 8)[0].tolist() == [code / 8 for code in codes] + [0] * 23


@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_belongs_to_its_group_and_row(bits: int, library: Library) -> None:
    """Values of any size beside each other in one row, and rows of zeros; each weight reads one column."""
    shape = shape_of(64, 64, bits, 32, 32)
    packed = library.pack(shape, stored(np.eye(64, dtype=np.int8), bits), np.ones(64, np.float32))
    x = np.zeros((6, 64), np.float32)
    x[0, :32], x[0, 32:] = 3e38, 1e-30
    x[1, 3], x[1, 40] = -1e-37, -3e38
    x[3, 0] = 5.0
    x[5, 63] = 1e-45  # its 127th is no f32
    found = library.multiply(shape, packed, x)
    np.testing.assert_allclose(found[:5], x[:5], rtol=1e-6, atol=0)
    assert not found[5].any()
    every = np.full((64, 64), 7, np.int8)
    assert not library.multiply(shape, library.pack(shape, stored(every, bits), np.ones(64, np.float32)), x * 0).any()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int, gated: bool, library: Library) -> None:
    """To the last bit: alone, in every number of rows a tile takes, in several tiles, among other rows, at another place."""
    rng = np.random.default_rng(bits)
    q, scale = weights(rng, 144, 576, bits, 64)
    scale = (scale * rng.uniform(0.5, 1.5, scale.shape)).astype(np.float32)
    shape = shape_of(144, 576, bits, 64, 128, gated)
    packed = library.pack(shape, stored(q, bits), scale)
    x = rng.standard_normal((800, 576)).astype(np.float32)  # more than a block of inputs holds
    all_rows = library.multiply(shape, packed, x)
    for begin in (0, 400):
        for rows in (*range(1, 15), 30):
            assert np.array_equal(library.multiply(shape, packed, x[begin : begin + rows]), all_rows[begin : begin + rows]), rows
    assert np.array_equal(library.multiply(shape, packed, x[::-1]), all_rows[::-1])
    x[1:] = 1e30
    assert np.array_equal(library.multiply(shape, packed, x[:5])[0], all_rows[0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("outputs", [18, 32, 80])
def test_nothing_is_written_beyond_the_results(outputs: int, gated: bool, cpu_kernels: Path) -> None:
    library = ctypes.CDLL(str(cpu_kernels))
    library.forgeline_packed_bytes.restype = ctypes.c_size_t
    none = ctypes.c_void_p()
    written = outputs // 2 if gated else outputs
    for bits in (4, 8):
        shape = shape_of(outputs, 160, bits, 64, 128, gated)
        size = library.forgeline_packed_bytes(ctypes.byref(shape))
        scales = 3 if bits == 4 else 1
        assert size == -(-outputs // 32) * 32 * (scales * 4 + 160 * bits // 8)  # panels of 32 rows
        packed = np.full(size + 64, 0xA5, np.uint8)
        q, scale = np.full((outputs, 160 * bits // 8), 0x11, np.uint8), np.ones((outputs, scales), np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (q, scale, packed)]
        library.forgeline_pack(ctypes.byref(shape), *pointers[:2], none, ctypes.c_int64(scales), pointers[2])
        assert (packed[size:] == 0xA5).all()
        for rows in ROWS:
            x, y = np.ones((rows, 160), np.float32), np.full((rows + 2, written), -7, np.float32)
            ends = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, y[1:])]
            library.forgeline_multiply(ctypes.byref(shape), pointers[2], ends[0], none, none, ctypes.c_int64(rows), ends[1])
            assert (y[0] == -7).all() and (y[-1] == -7).all(), rows
            assert (y[1:-1] > 0).all(), rows


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_residual_is_added_to_the_result(bits: int, gated: bool, library: Library) -> None:
    rng = np.random.default_rng(bits)
    for outputs in OUTPUTS:
        q, scale = weights(rng, outputs, 96, bits, 32)
        shape = shape_of(outputs, 96, bits, 32, 64, gated)
        packed = library.pack(shape, stored(q, bits), scale)
        for rows in ROWS:
            x = rng.standard_normal((rows, 96)).astype(np.float32)
            plain = library.multiply(shape, packed, x)
            residual = rng.standard_normal(plain.shape).astype(np.float32)
            assert np.array_equal(library.multiply(shape, packed, x, residual=residual), plain + residual), (outputs, rows)


@pytest.mark.parametrize("rows", [1, 6, 30])
@pytest.mark.parametrize("width", [32, 160, 576])
def test_inputs_go_through_a_norm_first(width: int, rows: int, library: Library) -> None:
    """Weights of one column each show the rounded inputs; a sum in another order may turn a code that is close to a tie."""
    rng = np.random.default_rng(width)
    shape = shape_of(width, width, 8, 32, 64)
    packed = library.pack(shape, np.eye(width, dtype=np.int8), np.ones(width, np.float32))
    x = (rng.standard_normal((rows, width)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)
    norm = rng.uniform(-2, 2, width).astype(np.float32)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + EPSILON) * norm
    found = library.multiply(shape, packed, x, norm=norm)
    expected = rounded(normed.astype(np.float32), 64)
    assert np.isclose(found, expected, rtol=1e-5, atol=0).mean() > 0.999
    assert np.abs(found - expected).max() < 1.01 * np.abs(normed).max() / 127
    alone = [library.multiply(shape, packed, row[None], norm=norm)[0] for row in x]
    assert np.array_equal(found, alone)
    residual = rng.standard_normal(found.shape).astype(np.float32)
    assert np.array_equal(library.multiply(shape, packed, x, norm=norm, residual=residual), found + residual)


def test_no_rows_are_no_work(library: Library) -> None:
    shape = shape_of(32, 32, 8, 32, 32)
    packed = library.pack(shape, np.ones((32, 32), np.int8), np.ones(32, np.float32))
    assert library.multiply(shape, packed, np.empty((0, 32), np.float32)).shape == (0, 32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("group", "input_group"), [(32, 32), (32, 128), (64, 128), (128, 128)])
def test_zero_points_are_taken_off(group: int, input_group: int, rows: int, library: Library) -> None:
    rng = np.random.default_rng(group + input_group + rows)
    outputs, width = 80, 256
    q = rng.integers(0, 16, (outputs, width)).astype(np.uint8)
    zero = rng.integers(0, 16, (outputs, width // group)).astype(np.uint8)
    zero[0], zero[1], q[0], q[1] = 15, 0, 0, 15  # the extremes of a difference
    scale = np.exp2(rng.integers(-9, -6, zero.shape)).astype(np.float32)
    shape = shape_of(outputs, width, 4, group, input_group)
    shape.zero_points = True
    x = exact_inputs(rng, rows, width, input_group)
    found = library.multiply(shape, library.pack(shape, (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8), scale, zero), x)
    weight = (q.astype(np.float64) - np.repeat(zero, group, 1)) * np.repeat(scale, group, 1)
    assert np.array_equal(found, x.astype(np.float64) @ weight.T)


def test_a_nan_spoils_its_row_and_no_other(library: Library) -> None:
    rng = np.random.default_rng(0)
    shape = shape_of(32, 256, 8, 128, 128)
    packed = library.pack(shape, *weights(rng, 32, 256, 8, 128))
    x = rng.standard_normal((3, 256)).astype(np.float32)
    clean = library.multiply(shape, packed, x)
    x[1, 200] = np.nan
    found = library.multiply(shape, packed, x)
    assert np.isnan(found[1]).all() and np.array_equal(found[[0, 2]], clean[[0, 2]])
