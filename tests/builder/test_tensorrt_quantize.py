"""Quantized forms for TensorRT: which weight gets which, one quantizer per input, scales, and what stays 16 bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from builder.calibrate import calibrate
from builder.fuse import fuse
from builder.observe import TensorStats, observe
from builder.targets import tensorrt_quantize as tq
from plugins.paged_attention.op import attach_functions
from runtime.errors import BuildError


def _model(exported, name="llama"):
    tiny = exported(name)
    model = ir.load(tiny.canonical)
    fuse(model, tiny.spec)
    return model


def _nodes(model, op_type):
    return [node for node in model.graph if node.op_type == op_type]


def _stats(*amax):
    """Ranges alone: what was largest in a tensor of one channel."""
    return [TensorStats(np.array([each], np.float32)) for each in amax]


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_classes_and_bytes(exported, precision):
    model = _model(exported, "llama_tied")
    stats = dict.fromkeys(tq.activation_names(model), _stats(4)[0])
    roles = tq.roles(model)
    report = tq.quantize(model, precision, group_size=32, stats=stats)
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
    tq.quantize(model, "fp8", stats=dict(zip(names, _stats(*range(2, 10)), strict=True)))
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
    tq.quantize(model, "fp8", stats=dict.fromkeys(names, _stats(1)[0]))
    quantizer = _nodes(model, "QuantizeLinear")[0]
    dequantized = quantizer.outputs[0].uses()[0].node.outputs[0]
    assert [use.node.op_type for use in dequantized.uses()] == ["MatMul"] * 3


def test_missing_range_is_an_error(exported):
    with pytest.raises(BuildError, match="no calibrated range for"):
        tq.quantize(_model(exported), "fp8")


@pytest.fixture(scope="module")
def observed(exported, tmp_path_factory):
    """The fused graph and what flows into its layers, with second moments."""
    path = tmp_path_factory.mktemp("observed") / "model.onnx"
    ir.save(attach_functions(_model(exported)), path)
    ids = [int(token) for token in np.random.default_rng(5).integers(3, 100, 200)]
    return path, observe(path, [ids], tq.activation_names(ir.load(path)), hessians=True, num_threads=1)


@pytest.mark.parametrize(("precision", "levels"), [("int4", 7), ("fp8", 448)])
def test_second_moments_round_better_than_the_nearest(observed, precision, levels):
    """GPTQ, on groups without a zero point; each layer's output stands further above its error."""
    path, stats = observed
    with_moments, model = {}, ir.load(path)
    for name, each in stats.items():
        with_moments[name] = dataclasses.replace(each)
    report = tq.quantize(model, precision, group_size=32, stats=with_moments)
    plain = {name: dataclasses.replace(each, hessian=None) for name, each in stats.items()}
    nearest = tq.quantize(ir.load(path), precision, group_size=32, stats=plain)
    assert set(report.rounding.values()) == {"gptq"} and set(nearest.rounding.values()) == {"nearest"}
    assert len(report.layers) == 2 * 4
    gains = [layer.weights_db - nearest.layers[name].weights_db for name, layer in report.layers.items()]
    assert np.mean(gains) > 0.3
    stored = [v for name, v in model.graph.initializers.items() if name.endswith(".q") and "head" not in name]
    assert max(int(np.abs(v.const_value.numpy().astype(np.float32)).max()) for v in stored) >= levels
    assert not [name for name in model.graph.initializers if name.endswith(".zero")]


def test_smoothquant_folds_and_rounds_inputs_to_int8(observed, tmp_path):
    path, stats = observed
    model = ir.load(path)
    report = tq.quantize(model, "int8-sq", stats=stats)
    assert {report.classes[role].dtype for role in ("attention", "mlp", "lm_head")} == {"int8"}
    quantizers = _nodes(model, "QuantizeLinear")
    assert len(quantizers) == 2 * 4 and {node.outputs[0].dtype for node in quantizers} == {ir.DataType.INT8}
    limits = [float(node.inputs[1].const_value.numpy()) * 127 for node in quantizers]
    before = [stats[str(node.inputs[0].name)].amax for node in quantizers]
    assert any(abs(new / old - 1) > 0.01 for new, old in zip(limits, before, strict=True))  # of the divided inputs
    kept = ir.load(path)
    tq.quantize(kept, "int8-sq", stats=stats, keep_values=True)
    of_attention = [node for node in _nodes(kept, "QuantizeLinear") if node.inputs[0].producer().op_type == "Reshape"]
    assert len(of_attention) == 2
    for node in of_attention:
        assert float(node.inputs[1].const_value.numpy()) * 127 == pytest.approx(stats[str(node.inputs[0].name)].amax)


def test_smoothquant_leaves_routers_alone(exported, tmp_path):
    path = tmp_path / "model.onnx"
    ir.save(attach_functions(_model(exported, "mixtral")), path)
    model = ir.load(path)
    names = tq.activation_names(model)
    stats = observe(path, [[int(token) for token in np.random.default_rng(5).integers(3, 100, 60)]], names, num_threads=1)
    report = tq.quantize(model, "int8-sq", stats=stats)
    assert report.classes["attention"].dtype == "int8" and report.classes["mlp"].dtype == "fp16"  # experts have no kernel
    assert len(_nodes(model, "QuantizeLinear")) == len(names) == 2 * 2
    assert sum("a router decides" in reason for reason in report.skipped.values()) == 2


def test_layers_that_were_raised_keep_their_width_and_their_input(observed):
    path, stats = observed
    model = ir.load(path)
    names = [name for name, role in tq.roles(model).items() if role in ("attention", "mlp")]
    overrides = {names[0]: "fp16", names[1]: "int8"}
    report = tq.quantize(model, "int4", group_size=32, overrides=overrides)
    stored = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert stored[names[0]] == ir.DataType.FLOAT and f"{names[0]}.q" not in stored
    assert stored[f"{names[1]}.q"] == ir.DataType.INT8
    assert {stored[f"{name}.q"] for name in names[2:]} == {ir.DataType.INT4}
    assert len(report.groups) == len(names) - 2
    model = ir.load(path)
    tq.quantize(model, "fp8", stats=stats, overrides={names[0]: "fp16"})
    assert len(_nodes(model, "QuantizeLinear")) == 2 * 4 - 1


@pytest.mark.parametrize(
    ("precision", "head", "dtype"), [("int8", None, "int8"), ("int8", False, "fp16"), ("fp16", True, "int8")]
)
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_head_is_quantized_or_not(exported, name, precision, head, dtype):
    report = tq.quantize(_model(exported, name), precision, head=head)
    assert report.dtype_of("lm_head") == dtype and report.tied == (dtype == "fp16" and name == "llama_tied")
    assert report.classes["mlp"].dtype == precision


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
