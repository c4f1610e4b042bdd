"""The lowered TensorRT graph computes what the canonical graph computes, and leaves between projection and pages what it must."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models

from builder.accuracy import Chunk, step_inputs
from builder.fuse import fuse
from builder.targets.tensorrt_lower import lower
from builder.targets.tensorrt_reference import to_reference
from builder.targets.tensorrt_types import narrow
from plugins.paged_attention import tensorrt_op
from plugins.paged_attention.op import attach_functions
from runtime.errors import UnsupportedModel
from runtime.executors.reference import ReferenceExecutor

BLOCK_SIZE, BLOCKS = 16, 4
# rotary embedding, q/k norm and the split of one fused projection that the attention node takes over, of 2 layers
ABSORBED = {
    "cohere": (2, 0, 2),
    "gemma2": (2, 0, 2),
    "gemma3_text": (2, 2, 2),
    "gpt2": (0, 0, 2),
    "gpt_neox": (0, 0, 0),  # q, k and v alternate head by head in its projection
    "gptj": (2, 0, 2),
    "granite": (2, 0, 2),
    "llama": (2, 0, 2),
    "llama_rope_scaled": (2, 0, 2),
    "llama_tied": (2, 0, 2),
    "mistral": (2, 0, 2),
    "mixtral": (2, 0, 2),
    "olmo2": (2, 0, 0),  # its q/k norm spans all heads and stays outside
    "opt": (0, 0, 0),  # scales q after the split
    "phi3": (2, 0, 2),
    "qwen2": (2, 0, 2),
    "qwen3": (2, 2, 2),
    "qwen3_moe": (2, 2, 2),
    "smollm3": (1, 0, 2),  # every second layer has no rotary embedding
    "stablelm": (0, 0, 0),  # a LayerNorm per head leaves heads before tokens
}


def _fused(exported, name):
    tiny = exported(name)
    model = ir.load(tiny.canonical)
    fuse(model, tiny.spec)
    return tiny, model


def _lower(model, kind="fp16"):
    return lower(model, key_kind=kind, value_kind=kind, block_size=BLOCK_SIZE, any_head_dim=True)


def _logits(path):
    """A ragged prefill, then a chunk beside a decode; free pages hold NaN."""
    ids = [int(token) for token in np.random.default_rng(0).integers(3, tiny_models.VOCAB_SIZE, 40)]
    executor = ReferenceExecutor(path, BLOCKS * 2, BLOCK_SIZE, num_threads=1, pool_fill=np.nan)
    first = executor.execute(step_inputs([Chunk(0, 0, ids[:7]), Chunk(1, 0, ids[7:20])], range(20), BLOCK_SIZE, BLOCKS))
    logits = [first.logits.copy()]
    steps = [Chunk(0, 7, ids[20:21]), Chunk(1, 13, ids[21:27])]
    second = executor.execute(step_inputs(steps, range(7), BLOCK_SIZE, BLOCKS))
    logits.append(second.logits.copy())
    executor.close()
    return np.concatenate(logits)


def _relative_error(found, wanted):
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_lowered_equals_canonical(exported, tmp_path, name):
    tiny, model = _fused(exported, name)
    wanted = _logits(tiny.reference)
    facts = _lower(model)
    assert (facts.rotary_absorbed, facts.norms_absorbed, facts.packed) == ABSORBED[name]
    assert [spec.layer for spec in facts.attention] == [0, 1]
    ir.save(to_reference(model.clone()), tmp_path / "wide.onnx")
    assert _relative_error(_logits(tmp_path / "wide.onnx"), wanted) < 1e-5  # the same arithmetic in another order

    narrow(model, ir.DataType.FLOAT16)
    ir.save(to_reference(model), tmp_path / "narrow.onnx")
    error = _relative_error(_logits(tmp_path / "narrow.onnx"), wanted)
    assert 0 < error < 2e-2  # 16-bit rounding, and it does round


def test_q_and_k_that_are_treated_differently_stay_outside(exported, tmp_path):
    """The kernel has one epsilon: a layer whose q and k norms differ keeps both, and its rotary embedding, in the graph."""
    _, model = _fused(exported, "qwen3")
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    value = attention.inputs[1]
    while value.producer().op_type != "RMSNormalization":
        value = value.producer().inputs[0]
    value.producer().attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    ir.save(attach_functions(model.clone()), tmp_path / "canonical.onnx")
    wanted = _logits(tmp_path / "canonical.onnx")
    facts = _lower(model)
    assert [(spec.has_norm, spec.rotary_dim) for spec in facts.attention] == [(0, 0), (1, 32)]
    ir.save(to_reference(model), tmp_path / "lowered.onnx")
    assert _relative_error(_logits(tmp_path / "lowered.onnx"), wanted) < 1e-5


def test_parts_in_another_order_are_put_together_again(exported, tmp_path):
    _, model = _fused(exported, "gpt2")
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    key, value = attention.inputs[1:3]
    attention.replace_input_with(1, value)
    attention.replace_input_with(2, key)
    ir.save(attach_functions(model.clone()), tmp_path / "canonical.onnx")
    assert _lower(model).packed == 1  # the other layer
    ir.save(to_reference(model), tmp_path / "lowered.onnx")
    assert _relative_error(_logits(tmp_path / "lowered.onnx"), _logits(tmp_path / "canonical.onnx")) < 1e-5


def test_graph_as_the_parser_sees_it(exported):
    _, model = _fused(exported, "qwen3")
    _lower(model)
    assert [value.name for value in model.graph.inputs] == [
        "input_ids", "positions", "slot_mapping", "block_table", "query_start_loc", "seq_lens", "logits_indices", "kv_pointers",
    ]  # fmt: skip
    assert [value.name for value in model.graph.outputs] == ["logits", "next_token"]
    assert not model.functions and {node.domain for node in model.graph} == {"", tensorrt_op.NODE_DOMAIN}
    table = model.graph.inputs[-1]
    assert (table.dtype, list(table.shape)) == (ir.DataType.INT64, [2, 2])
    node = next(node for node in model.graph if node.domain == tensorrt_op.NODE_DOMAIN)
    assert node.name == "layers.0.attention" and node.op_type == "PagedAttention"
    assert (node.attributes["plugin_namespace"].value, node.attributes["plugin_version"].value) == ("forgeline", "1")
    assert [value.name for value in node.inputs[1:7]] == [
        "token_rows",
        *(each.name for each in model.graph.inputs[2:6]),
        "kv_pointers",
    ]
    remaining = [node.op_type for node in model.graph]
    assert remaining.count("RotaryEmbedding") == 0 and remaining.count("Transpose") == 0 and remaining.count("Split") == 2
    assert remaining.count("RMSNormalization") == 2 * 2 + 1


def test_fp16_keeps_norms_angles_and_logits_wide(exported):
    _, model = _fused(exported, "gemma2")  # its logits are capped after the head
    _lower(model)
    narrow(model, ir.DataType.FLOAT16)
    graph = model.graph
    dtypes = {(node.op_type, value.dtype) for node in graph for value in node.outputs if value.dtype is not None}
    for op in ("RMSNormalization", "Cos", "Sin", "Tanh"):
        assert {dtype for kind, dtype in dtypes if kind == op} == {ir.DataType.FLOAT}, op
    assert {dtype for kind, dtype in dtypes if kind == "MatMul"} == {ir.DataType.FLOAT16}
    assert graph.outputs[0].name == "logits" and graph.outputs[0].dtype == ir.DataType.FLOAT
    matrices = [v for v in graph.initializers.values() if len(v.shape) == 2 and v.const_value.size > 100]
    assert matrices and {value.dtype for value in matrices} == {ir.DataType.FLOAT16}
    node = next(node for node in graph if node.domain == tensorrt_op.NODE_DOMAIN)
    assert [value.dtype for value in node.inputs[7:]] == [ir.DataType.FLOAT] * 2  # cos, sin
    assert node.inputs[0].dtype == ir.DataType.FLOAT16


def test_values_that_share_a_type_object_are_narrowed_apart():
    """onnx_ir's dtype setter writes into the type, which fusions hand from value to value."""
    shared = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape([2, 4]), type=shared)
    norm = ir.node("RMSNormalization", [x, _initializer("w", np.ones(4, np.float32))], attributes={"axis": -1})
    twice = ir.node("MatMul", [norm.outputs[0], _initializer("m", np.ones((4, 4), np.float32))])
    for node in (norm, twice):
        node.outputs[0].type = shared
    twice.outputs[0].name = "y"
    inits = [norm.inputs[1], twice.inputs[1]]
    graph = ir.Graph([x], [twice.outputs[0]], nodes=[norm, twice], initializers=inits, opset_imports={"": 23})
    narrow(ir.Model(graph, ir_version=10), ir.DataType.FLOAT16)
    assert norm.outputs[0].dtype == ir.DataType.FLOAT and twice.outputs[0].dtype == ir.DataType.FLOAT16


def _initializer(name, array):
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))


def test_heads_without_kernels_are_refused(exported):
    _, model = _fused(exported, "llama")
    with pytest.raises(UnsupportedModel, match=r"layer 0 has heads of 16 elements .* 64, 80, 96, 128, 256; use --target cpu"):
        lower(model, key_kind="fp16", value_kind="fp16", block_size=64)
