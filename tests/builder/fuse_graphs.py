"""A few lines of ONNX text → model; run it; compare it with itself after a fusion. Shared by the tests of builder.fuse.

Constants are given by keyword and may be called layers__0__q_proj__weight for layers.0.q_proj.weight. T tokens are fed as 3 rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort

from builder.fuse import functions
from plugins.paged_attention.op import attach_functions

TOKENS = 3
# Fused and unfused differ by the order of a few float32 operations: a handful of units in the last place.
RELATIVE = 2e-6


def parse(text: str, **constants: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23, "forgeline": 1]>\n{text}')
    for name, array in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        value.name = value.name.replace("__", ".")
    return model


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    """Random, no value equal to 0 or 1, so that a dropped or swapped weight shows."""
    return np.random.default_rng([seed, *shape]).uniform(0.2, 0.9, shape).astype(np.float32)


def feeds(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    result = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None and value.name is not None
        shape = [dim if isinstance(dim, int) else TOKENS for dim in value.shape]
        whole = value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
        data = np.arange(np.prod(shape)).reshape(shape) if whole else rng.standard_normal(shape)
        result[value.name] = data.astype(value.dtype.numpy())
    return result


def run(model: ir.Model, inputs: dict[str, np.ndarray] | None = None) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    functions.attach(attach_functions(model))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = feeds(model) if inputs is None else inputs
    return session.run(None, {value.name: given[value.name] for value in session.get_inputs()})


def relative_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def ops(model: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph))


def fire(run_pass: Callable, model: ir.Model, inputs: dict[str, np.ndarray] | None = None) -> tuple[int, list[str]]:
    """Apply one pass: its count and the reasons it gave. The outputs must stay what they were."""
    before = run(model, inputs)
    model.functions.clear()
    reasons: list[str] = []
    count = run_pass(model, reasons.append)
    model.graph.sort()
    assert relative_error(run(model, inputs), before) <= RELATIVE
    return count, reasons
