"""SmoothQuant: the fp32 function stays, the rounded one gets better, and layers it cannot fold into are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import Sequences, fused, prompt, relative_error

from builder.observe import TensorStats, observe
from builder.quantize import layer_inputs, smoothquant
from builder.quantize.weights import find_weights
from plugins.paged_attention.op import attach_functions
from runtime.errors import BuildError
from runtime.executors.reference import ReferenceExecutor

TOKENS = prompt(60, 7)


def saved(model: ir.Model, path: Path) -> Path:
    ir.save(attach_functions(model), path)
    return path


def logits(path: Path) -> np.ndarray:
    return Sequences(ReferenceExecutor(path, num_blocks=8, num_threads=1)).run([{"a": TOKENS}])["a"]


def statistics(path: Path) -> dict[str, TensorStats]:
    return observe(path, [TOKENS], layer_inputs(ir.load(path), "int8-sq"), num_threads=1)


@pytest.mark.parametrize(("name", "folded"), [("llama", 2 * 4), ("qwen2", 2 * 4), ("olmo2", 2 * 2), ("gpt2", 2 * 3)])
def test_folding_leaves_fp32_logits_as_they_were(name: str, folded: int, exported: Callable[[str], Any], tmp_path: Path) -> None:
    """olmo2 normalizes what a layer gives, not what it takes; gpt2 has a GELU before its last projection."""
    before = saved(fused(exported(name)), tmp_path / "before.onnx")
    model = ir.load(before)
    old = {weight.name: weight.value.const_value.numpy().copy() for weight in find_weights(model.graph)}  # type: ignore[union-attr]
    stats = statistics(before)
    new = smoothquant.smooth(model.graph, stats, static=True, alphas=(0.5,))
    changed = [x for x in stats if not np.array_equal(new[x].channel_amax, stats[x].channel_amax)]
    assert 0 < len(changed) <= folded
    after = saved(model, tmp_path / "after.onnx")
    assert relative_error(logits(after), logits(before)) < 1e-5
    weights = {weight.name: weight.value.const_value.numpy() for weight in find_weights(model.graph)}  # type: ignore[union-attr]
    assert any(not np.array_equal(weights[each], old[each]) for each in old)
    # what was predicted for the divided inputs is what flows now
    measured = statistics(after)
    for x in changed:
        np.testing.assert_allclose(measured[x].channel_amax, new[x].channel_amax, rtol=1e-4)


def test_scaled_statistics_are_those_of_the_scaled_tensor() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((100, 8)).astype(np.float32)
    factors = rng.uniform(0.5, 20, 8).astype(np.float32)
    stats = TensorStats(np.zeros(8, np.float32), hessian=rows.T @ rows / 100)
    stats.add(rows, 100)
    new = smoothquant.scaled(stats, factors)
    np.testing.assert_allclose(new.channel_amax, np.abs(rows / factors).max(0))
    np.testing.assert_allclose(new.sample, rows / factors)
    scaled = rows / factors
    np.testing.assert_allclose(new.hessian, scaled.T @ scaled / 100, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]
    assert new.histogram.sum() == rows.size


def test_it_needs_calibration(exported: Callable[[str], Any]) -> None:
    with pytest.raises(BuildError, match=r"no calibrated range for .*; int8-sq needs calibration on a text"):
        smoothquant.smooth(fused(exported("llama")).graph, {}, static=True)
