"""Error-compensated rounding: it stays on the grid, and beats plain rounding where inputs are correlated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from builder.quantize import fp8, gptq, weight_only


def problem(width: int = 128, rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and the second moments of strongly correlated inputs."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, width)).astype(np.float32)
    x = (rng.standard_normal((512, width // 4)) @ rng.standard_normal((width // 4, width))).astype(np.float32)
    x += 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    return weight, x.T @ x / len(x)


def loss(error: np.ndarray, hessian: np.ndarray) -> float:
    return float(np.einsum("oi,ij,oj->", error, hessian, error))


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (32, False), (64, False)])
def test_int4_loses_far_less_than_rounding_to_nearest(group: int, symmetric: bool) -> None:
    weight, hessian = problem()
    quantized = gptq.int4(weight, hessian, group, symmetric=symmetric)
    nearest = weight_only.int4(weight, group)
    assert loss(quantized.dense() - weight, hessian) < 0.25 * loss(nearest.dense() - weight, hessian)
    assert quantized.q.dtype == (ir.DataType.INT4 if symmetric else ir.DataType.UINT4)
    assert quantized.scale.shape == (24, 128 // group)
    levels = quantized.q.numpy().astype(int)
    assert levels.min() == (-8 if symmetric else 0) and levels.max() == (7 if symmetric else 15)
    zeros = 0 if symmetric else 24 * (128 // group) // 2  # two to a byte
    assert quantized.num_bytes == 24 * 128 // 2 + 4 * 24 * (128 // group) + zeros


def test_with_uncorrelated_inputs_nothing_is_moved() -> None:
    weight, _ = problem()
    identity = np.eye(128, dtype=np.float32)
    scale, zero = gptq.group_scales(weight, np.ones(128, np.float32), 32)
    groups = weight.reshape(24, 4, 32)
    expected = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, 15).reshape(24, 128)
    np.testing.assert_array_equal(gptq.int4(weight, identity, 32).q.numpy().astype(np.float32), expected)


def test_a_channel_that_was_never_fed_is_rounded_plainly() -> None:
    weight, hessian = problem()
    hessian[5] = hessian[:, 5] = 0
    quantized = gptq.int4(weight, hessian, 32)
    scale, zero = quantized.scale[:, 0], quantized.zero.numpy()[:, 0].astype(np.float32)  # type: ignore[union-attr]
    expected = np.clip(np.rint(weight[:, 5] / scale) + zero, 0, 15)
    np.testing.assert_array_equal(quantized.q.numpy()[:, 5].astype(np.float32), expected)
    assert np.isfinite(quantized.dense()).all()


def test_fp8_codes_beat_nearest_codes() -> None:
    weight, hessian = problem()
    quantized = gptq.e4m3(weight, hessian)
    assert quantized.q.numpy().dtype == ml_dtypes.float8_e4m3fn
    assert loss(quantized.dense() - weight, hessian) < 0.5 * loss(fp8.quantize(weight).dense() - weight, hessian)


def test_a_weight_already_on_a_q4_0_grid_is_kept() -> None:
    """A GGUF's Q4_0: a scale per 32 weights, the largest of them on -8. Rounding finds the very same numbers."""
    rng = np.random.default_rng(0)
    levels = rng.integers(-7, 8, (6, 4, 32)).astype(np.float32)
    levels[..., 9] = -8
    weight = (levels * rng.uniform(0.01, 0.02, (6, 4, 1)).astype(np.float16).astype(np.float32)).reshape(6, 128)
    np.testing.assert_array_equal(weight_only.int4(weight, 32).dense(), weight)
