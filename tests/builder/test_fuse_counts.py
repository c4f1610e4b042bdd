"""Every family, exported and fused: counts worked out by hand, the unfused graph's numbers, and a miss that stops the build."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
from fuse_graphs import relative_error, run

import builder.fuse
from builder.fuse import PASSES, expectations, fuse, inline_forgeline_ops
from runtime import contract
from runtime.errors import FusionMismatch, UnsupportedModel

# Two layers each. "Norms": RMSNormalization or LayerNormalization made; "sums": those merged with a residual add.
LLAMA = {"rms_norm": 5, "rotary": 4, "swiglu": 2, "qkv_merge": 2, "gate_up_merge": 2, "add_rms_norm": 4}
GPT = {"layer_norm": 5, "gelu": 2, "add_layer_norm": 5}  # the first norm reads embedding + positions, a sum too
COUNTS = {
    "cohere": {"layer_norm": 3, "rotary": 4, "swiglu": 2, "qkv_merge": 2, "gate_up_merge": 2, "add_layer_norm": 2},
    "gemma2": {"rms_norm": 9, "rotary": 4, "geglu": 2, "qkv_merge": 2, "gate_up_merge": 2, "add_rms_norm": 4},
    "gemma3_text": {"rms_norm": 13, "rotary": 4, "geglu": 2, "qkv_merge": 2, "gate_up_merge": 2, "add_rms_norm": 4},
    "gpt2": GPT,
    "gpt_neox": {"layer_norm": 5, "rotary": 4, "gelu": 2, "add_layer_norm": 2},
    "gptj": {"layer_norm": 3, "rotary": 4, "gelu": 2, "qkv_merge": 2, "add_layer_norm": 2},
    "granite": LLAMA,
    "llama": LLAMA,
    "llama_rope_scaled": LLAMA,
    "llama_tied": LLAMA,
    "mistral": LLAMA,
    "mixtral": {"rms_norm": 5, "rotary": 4, "qkv_merge": 2, "add_rms_norm": 4},
    "olmo2": {**LLAMA, "rms_norm": 9, "add_rms_norm": 1},
    "opt": {"layer_norm": 5, "qkv_merge": 2, "add_layer_norm": 5},
    "phi3": {"rms_norm": 5, "rotary": 4, "swiglu": 2, "add_rms_norm": 4},
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "rms_norm": 9},
    "qwen3_moe": {"rms_norm": 9, "rotary": 4, "qkv_merge": 2, "add_rms_norm": 4},
    "smollm3": {**LLAMA, "rotary": 2},  # the second layer has no rotary embedding
    # A norm per head of q and k: 2 × (4 + 2) more than the 5 of the residual stream.
    "stablelm": {"layer_norm": 17, "rotary": 4, "swiglu": 2, "qkv_merge": 2, "gate_up_merge": 2, "add_layer_norm": 4},
}
# Shapes of a family that tiny_models does not cover: name → (family, changes to its configuration, counts)
VARIANTS = {
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}, {**COUNTS["gpt_neox"], "add_layer_norm": 4}),
    "stablelm parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": False},
        {**COUNTS["stablelm"], "layer_norm": 3, "add_layer_norm": 2},
    ),
    "opt after norm": (
        "opt",
        {"do_layer_norm_before": False, "activation_function": "gelu"},
        {"layer_norm": 4, "gelu": 2, "qkv_merge": 2, "add_layer_norm": 4},
    ),
    "cohere head norms": ("cohere", {"use_qk_norm": True}, {**COUNTS["cohere"], "rms_norm": 4}),
    "qwen3_moe first layer dense": (
        "qwen3_moe",
        {"mlp_only_layers": [0]},
        {**COUNTS["qwen3_moe"], "swiglu": 1, "gate_up_merge": 1},
    ),
    "llama yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}},
        LLAMA,
    ),
}


def ragged_step(spec: contract.ModelSpec) -> dict[str, np.ndarray]:
    """(cached, new) tokens of three sequences, blocks of 4 in random order, random contents in the pools."""
    rng = np.random.default_rng(0)
    block_size, free = 4, list(rng.permutation(12))
    table = np.zeros((3, 4), np.int32)
    positions, slots, lens, starts = [], [], [], [0]
    for row, (past, new) in enumerate(((0, 5), (9, 1), (4, 7))):
        for index in range(-(-(past + new) // block_size)):
            table[row, index] = free.pop()
        at = np.arange(past, past + new)
        positions.append(at)
        slots.append(table[row, at // block_size] * block_size + at % block_size)
        lens.append(past + new)
        starts.append(starts[-1] + new)
    step = {
        contract.INPUT_IDS: rng.integers(3, spec.vocab_size, starts[-1]),
        contract.POSITIONS: np.concatenate(positions),
        contract.SLOT_MAPPING: np.concatenate(slots).astype(np.int32),
        contract.BLOCK_TABLE: table,
        contract.QUERY_START_LOC: np.array(starts, np.int32),
        contract.SEQ_LENS: np.array(lens, np.int32),
        contract.LOGITS_INDICES: np.arange(starts[-1]),
    }
    for index, layer in enumerate(spec.layers):
        shape = (12, block_size, layer.num_kv_heads, layer.head_dim)
        step[contract.k_pool(index)] = rng.standard_normal(shape).astype(np.float32)
        step[contract.v_pool(index)] = rng.standard_normal(shape).astype(np.float32)
    return step


def check(model: ir.Model, spec: contract.ModelSpec, counts: dict[str, int]) -> None:
    step = ragged_step(spec)
    before = run(model, step)
    report = fuse(model, spec)
    assert {name: count for name, count in report.counts.items() if name in report.expected and count} == counts
    assert list(report.counts) == list(PASSES)
    assert report.nodes_after == len(model.graph) < report.nodes_before
    assert report.ops == dict(Counter(node.op_type for node in model.graph))
    # A relative 1e-5 allows float32 sums in another order through two layers; measured 4e-7 at most.
    assert relative_error(run(model, step), before) <= 1e-5
    inline_forgeline_ops(model)
    assert {node.op_type for node in model.graph if node.domain} <= {"PagedAttention", "MoEExperts"}
    assert relative_error(run(model, step), before) <= 1e-5


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_fused_family_has_its_counts_and_the_unfused_logits(exported, name):
    given = exported(name)
    check(ir.load(given.canonical), given.spec, COUNTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_of_a_family_has_its_own_counts(monkeypatch, name):
    from builder.checkpoint import model_spec
    from builder.export import export_model

    family, changes, counts = VARIANTS[name]
    config = tiny_models._configs()[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    monkeypatch.setattr(tiny_models, "_configs", lambda: {family: lambda: config})
    model = tiny_models.build(family)
    spec = model_spec(model, name)
    check(export_model(model, spec), spec, counts)


def test_weights_keep_meaningful_names(exported):
    given = exported("llama")
    model = ir.load(given.canonical)
    fuse(model, given.spec)
    assert {name for name in model.graph.initializers if name.startswith("model.layers.1.") and name.endswith(".weight")} == {
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }


# One family in which each checked pass has work to do.
NEEDS = {
    "layer_norm": "gpt2", "rms_norm": "llama", "rotary": "llama", "gelu": "gpt2", "swiglu": "llama", "geglu": "gemma2",
    "qkv_merge": "qwen2", "gate_up_merge": "llama", "add_rms_norm": "llama", "add_layer_norm": "gpt2",
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS)
def test_pass_that_does_nothing_stops_the_build(exported, monkeypatch, name):
    given = exported(NEEDS[name])
    wanted = COUNTS[NEEDS[name]][name]
    monkeypatch.setitem(builder.fuse.PASSES, name, lambda model, decline: 0)
    with pytest.raises(FusionMismatch, match=rf"{name} fired 0 times instead of {wanted}\b.* for 2 layers of tiny-"):
        fuse(ir.load(given.canonical), given.spec)


def test_family_that_is_made_of_something_else_stops_the_build(exported, monkeypatch):
    given = exported("llama")
    shape = dataclasses.replace(expectations.FAMILIES["llama"][0], qkv_merge=False)
    monkeypatch.setattr(expectations, "FAMILIES", {"llama": (shape,)})
    with pytest.raises(FusionMismatch, match=r"^qkv_merge fired 2 times instead of 0 for 2 layers"):
        fuse(ir.load(given.canonical), given.spec)


def test_mismatch_quotes_why_a_match_was_declined(exported):
    given = exported("llama")
    model = ir.load(given.canonical)
    product = next(node for node in model.graph if node.op_type == "MatMul")  # q of layer 0
    product.replace_input_with(1, _computed(model.graph, product))
    with pytest.raises(FusionMismatch, match="qkv_merge declined: layer 0: q does not come from a MatMul with a constant weight"):
        fuse(model, given.spec)


def _computed(graph: ir.Graph, before: ir.Node) -> ir.Value:
    """The weight of `before` times an input-dependent one, so that it is no constant."""
    weight, ids = before.inputs[1], graph.inputs[0]
    cast = ir.node("Cast", [ids], attributes={"to": ir.DataType.FLOAT})
    least = ir.node("ReduceMin", cast.outputs, attributes={"keepdims": 0})
    scaled = ir.node("Mul", [weight, least.outputs[0]])
    graph.insert_before(before, [cast, least, scaled])
    return scaled.outputs[0]


def test_unknown_family_is_refused_by_name(exported):
    given = exported("llama")
    spec = dataclasses.replace(given.spec, model_type="bloom")
    with pytest.raises(UnsupportedModel, match="no fusion counts are known for model_type 'bloom'; known are cohere, gemma2"):
        fuse(ir.load(given.canonical), spec)


def test_every_family_that_can_be_built_has_counts():
    from builder.families import FAMILIES

    assert set(FAMILIES.values()) <= set(expectations.FAMILIES)
