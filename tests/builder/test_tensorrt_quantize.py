"""Quantized forms for TensorRT: which weight gets which, one quantizer per input, scales, and what stays 16 bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from builder.calibrate import calibrate
from builder.fuse import fuse
from builder.targets import tensorrt_quantize as tq
from runtime.errors import BuildError


def _model(exported, name="llama"):
    tiny = exported(name)
    model = ir.load(tiny.canonical)
    fuse(model, tiny.spec)
    return model


def _nodes(model, op_type):
    return [node for node in model.graph if node.op_type == op_type]


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_classes_and_bytes(exported, precision):
    model = _model(exported, "llama_tied")
    amax = {name: np.float32(4) for name in tq.activation_names(model)}
    roles = tq.roles(model)
    report = tq.quantize(model, precision, group_size=32, amax=amax)
    assert {name: entry.dtype for name, entry in report.classes.items()} == {
        "attention": precision, "mlp": precision, "embedding": "fp16", "lm_head": "int8", "norms": "fp16",
    }  # fmt: skip
    stored = {name: value.dtype for name, value in model.graph.initializers.items() if name.endswith(".q")}
    want = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}[precision]
    assert {dtype for name, dtype in stored.items() if roles[name.removesuffix(".q")] != "lm_head"} == {want}
    assert [dtype for name, dtype in stored.items() if roles[name.removesuffix(".q")] == "lm_head"] == [ir.DataType.INT8]
    assert len(stored) == 2 * 4 + 1  # qkv, o, gate_up, down of 2 layers; the head beside its table
    attention = report.classes["attention"]
    weights = 2 * (64 * 128 + 64 * 64)
    scales = 2 * (128 + 64) * (2 if precision == "int4" else 1)  # int4: two groups of 32
    assert attention.num_weights == weights
    assert attention.num_bytes == (weights // 2 if precision == "int4" else weights) + 2 * scales


def test_one_quantizer_serves_all_readers_of_an_input(exported):
    model = _model(exported)
    names = tq.activation_names(model)
    assert len(names) == 2 * 4
    tq.quantize(model, "fp8", amax={name: np.float32(2 + index) for index, name in enumerate(names)})
    quantizers = _nodes(model, "QuantizeLinear")
    assert [node.inputs[0].name for node in quantizers] == names
    for index, node in enumerate(quantizers):
        _, scale, zero = node.inputs
        assert float(scale.const_value.numpy()) == pytest.approx((2 + index) / 448)
        assert zero.const_value.dtype == ir.DataType.FLOAT8E4M3FN
    head = next(
        node for node in _nodes(model, "MatMul") if "lm_head" in str(node.inputs[1].name) or "head" in str(node.inputs[1].name)
    )
    assert head.inputs[0].producer().op_type != "DequantizeLinear"


def test_unmerged_layers_share_one_quantizer(exported):
    tiny = exported("llama")
    model = ir.load(tiny.canonical)  # not fused: q, k and v are three products of one input
    names = tq.activation_names(model)
    tq.quantize(model, "fp8", amax=dict.fromkeys(names, np.float32(1)))
    quantizer = _nodes(model, "QuantizeLinear")[0]
    dequantized = quantizer.outputs[0].uses()[0].node.outputs[0]
    assert [use.node.op_type for use in dequantized.uses()] == ["MatMul"] * 3


def test_fp8_rounds_to_e4m3_per_output():
    weight = np.array([[1.0, -0.5, 0.3], [100.0, 7.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    quantized = tq.fp8(weight)
    assert quantized.scale.tolist() == pytest.approx([1 / 448, 100 / 448, 1.0])
    stored = quantized.q.numpy().astype(np.float32)
    assert stored.tolist() == [[448.0, -224.0, 128.0], [448.0, 32.0, 0.0], [0.0, 0.0, 0.0]]  # 134.4 → 128, 31.36 → 32
    assert quantized.q.numpy().dtype == ml_dtypes.float8_e4m3fn


def test_missing_range_is_an_error(exported):
    with pytest.raises(BuildError, match="no calibrated range for"):
        tq.quantize(_model(exported), "fp8", amax={})


def test_calibration_finds_the_largest_magnitudes(exported, tmp_path):
    tiny = exported("llama")
    model = ir.load(tiny.reference)
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    norm_out = next(node for node in model.graph if node.op_type == "MatMul").inputs[0]
    key, value = attention.inputs[1:3]
    ids = [int(token) for token in np.random.default_rng(1).integers(3, 100, 24)]
    names = {str(norm_out.name): None, str(key.name): 1, str(value.name): -2}
    found = calibrate(tiny.reference, ids, names, context=16, num_threads=1)
    assert list(found) == list(names)
    assert found[str(norm_out.name)].shape == () and found[str(key.name)].shape == (2,) and found[str(value.name)].shape == (2,)
    windows = [calibrate(tiny.reference, part, names, context=16, num_threads=1) for part in (ids[:16], ids[16:])]
    for name in names:
        np.testing.assert_array_equal(found[name], np.maximum(windows[0][name], windows[1][name]))
    embedding = tiny.model.get_input_embeddings().weight.detach().numpy()
    weight = tiny.model.model.layers[0].input_layernorm.weight.detach().numpy()
    normed = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True) + tiny.model.config.rms_norm_eps) * weight
    assert found[str(norm_out.name)] == pytest.approx(np.abs(normed[ids]).max(), rel=1e-5)
    below_zero = next(token for token in range(3, 100) if -normed[token].min() > normed[token].max())
    alone = calibrate(tiny.reference, [below_zero], {str(norm_out.name): None}, num_threads=1)
    assert alone[str(norm_out.name)] == pytest.approx(-normed[below_zero].min(), rel=1e-5)
    assert not list(tiny.reference.parent.glob(".observed-*"))


def test_calibration_without_text_is_an_error(exported):
    with pytest.raises(BuildError, match="no tokens to calibrate with"):
        calibrate(exported("llama").reference, [], {})
