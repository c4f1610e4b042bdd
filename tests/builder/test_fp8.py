"""E4M3 rounding on the CPU: bit for bit ml_dtypes.float8_e4m3fn, saturating, on both executors; builds call it emulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import openvino as ov
import pytest
from cpu_engines import fused

from builder.quantize import activations, fp8, layer_inputs, quantize
from builder.quantize.ops import attach
from builder.targets.openvino_build import NodeBuilder
from builder.targets.openvino_quantize import e4m3, lower_rounding
from runtime.errors import BuildError

CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FINITE = np.unique(CODES[np.isfinite(CODES)])
TIES = (FINITE[1:] + FINITE[:-1]) / 2


def cases() -> np.ndarray:
    """All codes, every tie and its two neighbours, zeros of both signs, subnormals, values beyond the range, random ones."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(20_000) * np.exp(3 * rng.standard_normal(20_000))
    edges = [0.0, -0.0, 448.0, 463.9, 464.0, 480.0, 1e30, -1e30, np.inf, -np.inf, 2.0**-10, 1.5 * 2.0**-10, 1e-30]
    near = [np.nextafter(TIES, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    return np.concatenate([FINITE, TIES, *near, spread, edges]).astype(np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_numpy_rounds_and_saturates() -> None:
    same_bits(fp8.to_e4m3(cases()).astype(np.float32), expected(cases()))
    assert np.isnan(fp8.to_e4m3(np.array([np.nan], np.float32)).astype(np.float32)).all()


def openvino_e4m3(tmp_path: Path, x: np.ndarray) -> np.ndarray:
    graph_input = ir.Value(name="x", shape=ir.Shape(["n"]), type=ir.TensorType(ir.DataType.FLOAT))
    seed = ir.node("Identity", [graph_input])
    graph = ir.Graph([graph_input], [], nodes=[seed], opset_imports={"": 23})
    out = e4m3(NodeBuilder(graph, anchor=seed), graph_input)
    out.name, out.dtype, out.shape = "y", ir.DataType.FLOAT, ir.Shape(["n"])
    graph.outputs.append(out)
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "e4m3.onnx")
    core = ov.Core()
    model = core.compile_model(core.read_model(tmp_path / "e4m3.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return model(x)[0].copy()


def test_openvino_rounds_every_code_tie_and_edge_alike(tmp_path: Path) -> None:
    found = openvino_e4m3(tmp_path, cases())
    wanted = expected(cases())
    np.testing.assert_array_equal(found, wanted)
    nonzero = wanted != 0
    same_bits(found[nonzero], wanted[nonzero])
    assert np.isnan(openvino_e4m3(tmp_path, np.array([np.nan, 1.0], np.float32))[0])


def run_inserted(tmp_path: Path, x: np.ndarray, *, lowered: bool, **how: float) -> np.ndarray:
    """x through the quantizer that a layer's input gets, on ONNX Runtime or, lowered, on OpenVINO."""
    value = ir.Value(name="x", shape=ir.Shape(["t", x.shape[1]]), type=ir.TensorType(ir.DataType.FLOAT))
    reader = ir.node("Identity", [value])
    reader.outputs[0].name, reader.outputs[0].dtype = "y", ir.DataType.FLOAT
    reader.outputs[0].shape = value.shape
    graph = ir.Graph([value], [reader.outputs[0]], nodes=[reader], opset_imports={"": 23})
    model = ir.Model(graph, ir_version=10)
    activations.insert(graph, value, [reader], "fp8", **how)  # type: ignore[arg-type]
    path = tmp_path / "inserted.onnx"
    if lowered:
        assert lower_rounding(model).emulated == "fp8"
        ir.save(model, path)
        core = ov.Core()
        return core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0].copy()
    ir.save(attach(model), path)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("how", [{"limit": 3.5}, {"block_size": 48}])
@pytest.mark.parametrize("lowered", [False, True])
def test_inputs_are_rounded_alike_by_both_executors(how: dict[str, float], lowered: bool, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((7, 48)).astype(np.float32) * 2
    x[3] = 0
    found = run_inserted(tmp_path, x, lowered=lowered, **how)
    # OpenVINO divides by a constant as a product with its inverse: the last bit of code · scale may differ, no code does.
    wanted = activations.rounded(x, "fp8", **how)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, wanted, rtol=3e-7 if lowered else 0)
    assert len(np.unique(found)) < x.size


def test_static_scales_need_calibration(exported: Callable[[str], Any]) -> None:
    with pytest.raises(BuildError, match=r"no calibrated range for .*; static scales need calibration on a text"):
        quantize(fused(exported("llama")), "fp8")


def test_one_quantizer_serves_all_readers_of_a_tensor(exported: Callable[[str], Any]) -> None:
    model = fused(exported("llama"))
    names = layer_inputs(model, "fp8")
    assert len(names) == 2 * 4  # per layer: what q, k and v read, o, what gate and up read, down; the head is not quantized
    quantize(model, "fp8", static_activations=False)
    assert sum(node.op_type == "DynamicE4M3" for node in model.graph) == len(names)


def test_a_build_says_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from builder.cli import main

    model = Path(__file__).parents[1] / "models" / "tiny-llama"
    command = ["build", str(model), "--output", str(tmp_path / "e"), "--precision", "fp8", "--eval-tokens", "64"]
    assert main([*command, "--calibration-samples", "2", "--max-ppl-increase", "50"]) == 0
    out, err = capsys.readouterr()
    assert "emulated" in err and "emulated" in out
    precision = json.loads((tmp_path / "e" / "manifest.json").read_text())["precision"]
    assert (precision["emulated"], precision["weights"], precision["activations"]) == (True, "fp8", "fp8")
    assert json.loads((tmp_path / "e" / "report.json").read_text())["compiled"]["emulated"] is True
    weights = ir.load(tmp_path / "e" / "plan" / "model.onnx").graph.initializers.values()
    stored = [value for value in weights if value.const_value.dtype == ir.DataType.FLOAT8E4M3FN]  # type: ignore[union-attr]
    assert len(stored) == 4 * 4
