"""Reading a plan back: weights found as stored, in either order, once or twice; a lost one fails the build."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from builder.targets.tensorrt_check import bytes_per_weight, check_plan, read_plan
from runtime.errors import PrecisionLost

ROLES = {"a": "attention", "b": "mlp"}


def _model():
    rng = np.random.default_rng(0)
    arrays = {
        "a.q": rng.integers(-127, 128, (64, 128)).astype(np.int8),
        "a.scale.f16": np.ones(64, np.float16),
        "b.f16": rng.standard_normal((128, 64)).astype(np.float16),
        "small": np.ones((4, 4), np.float32),
    }
    initializers = []
    for name, array in arrays.items():
        tensor = ir.tensor(array, name=name)
        initializers.append(
            ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
        )
    graph = ir.Graph([], [], nodes=[], initializers=initializers, opset_imports={"": 23})
    return ir.Model(graph, ir_version=10), arrays


def _plan(tmp_path, *parts):
    """Parts between stretches of code, at multiples of four bytes."""
    code = np.random.default_rng(1).integers(0, 256, 4004).astype(np.uint8).tobytes()
    path = tmp_path / "sm89.plan"
    path.write_bytes(code + code.join(parts) + code)
    return path


def test_each_weight_is_found_once(tmp_path):
    model, arrays = _model()
    plan = _plan(tmp_path, arrays["a.q"].tobytes(), arrays["b.f16"].tobytes())
    found = check_plan(plan, model, ROLES)
    assert [(each.name, each.role, each.dtype, each.copies) for each in found] == [
        ("a", "attention", ir.DataType.INT8, 1),
        ("b", "mlp", ir.DataType.FLOAT16, 1),
    ]
    assert bytes_per_weight(found[:1]) == (64 * 128 + 2 * 64) / (64 * 128)
    assert bytes_per_weight(found[1:]) == 2.0


def test_transposed_and_second_copies_count(tmp_path):
    model, arrays = _model()
    b = arrays["b.f16"]
    plan = _plan(tmp_path, arrays["a.q"].tobytes(), np.ascontiguousarray(b.T).tobytes(), b.tobytes())
    found = read_plan(plan, model, ROLES)
    assert [each.copies for each in found] == [1, 2]
    assert bytes_per_weight(found[1:]) == 4.0


def test_columns_that_were_split_off_are_still_found(tmp_path):
    """TensorRT stores the halves of a merged projection apart; rows keep their beginnings."""
    model, arrays = _model()
    halves = [np.ascontiguousarray(half).tobytes() for half in np.split(arrays["b.f16"], 2, axis=1)]
    assert [each.copies for each in read_plan(_plan(tmp_path, arrays["a.q"].tobytes(), *halves), model, ROLES)] == [1, 1]


def test_a_widened_weight_fails_the_build(tmp_path):
    model, arrays = _model()
    plan = _plan(tmp_path, arrays["a.q"].astype(np.float16).tobytes(), arrays["b.f16"].tobytes())
    with pytest.raises(PrecisionLost, match=r"sm89.plan does not hold 1 of 1 quantized weights as they were stored \(a\)"):
        check_plan(plan, model, ROLES)


def test_a_wide_weight_that_is_missing_is_only_reported(tmp_path):
    model, arrays = _model()
    assert [each.copies for each in check_plan(_plan(tmp_path, arrays["a.q"].tobytes()), model, ROLES)] == [1, 0]
