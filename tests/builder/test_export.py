"""The form of the canonical graph. Its numbers are checked in tests/runtime/test_reference_executor.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models

from builder.checkpoint import model_spec
from runtime import contract


def graph_of(model: Any) -> ir.Graph:
    return ir.load(model.canonical).graph


def ops(graph: ir.Graph) -> Counter[str]:
    return Counter(node.op_type for node in graph)


def test_inputs_and_outputs_are_those_of_the_contract(exported: Callable[[str], Any]) -> None:
    graph = graph_of(exported("llama"))
    pools = [contract.k_pool(0), contract.k_pool(1), contract.v_pool(0), contract.v_pool(1)]
    assert [value.name for value in graph.inputs] == [*contract.STEP_INPUTS, *pools]
    dtypes = {name: ir.DataType[dtype.upper()] for name, dtype in contract.INPUT_DTYPES.items()}
    assert {value.name: value.dtype for value in graph.inputs} == dtypes | dict.fromkeys(pools, ir.DataType.FLOAT)
    shapes = {value.name: [str(dim) for dim in value.shape or ()] for value in [*graph.inputs, *graph.outputs]}
    pool = ["num_blocks", "block_size", "2", "16"]
    assert shapes == {
        "input_ids": ["num_tokens"],
        "positions": ["num_tokens"],
        "slot_mapping": ["num_tokens"],
        "block_table": ["num_seqs", "max_blocks"],
        "query_start_loc": ["num_seqs_plus_1"],
        "seq_lens": ["num_seqs"],
        "logits_indices": ["num_logits"],
        "logits": ["num_logits", "128"],
        "next_token": ["num_logits"],
        **{f"{kind}_pool{out}.{layer}": pool for kind in "kv" for out in ("", "_out") for layer in (0, 1)},
    }
    outputs = ["logits", "next_token", "k_pool_out.0", "k_pool_out.1", "v_pool_out.0", "v_pool_out.1"]
    assert [value.name for value in graph.outputs] == outputs


def test_a_llama_is_two_dozen_nodes_a_layer(exported: Callable[[str], Any]) -> None:
    """What fusions and lowerings rely on: linear layers, norms, rotary embedding and attention are one node each."""
    counts = ops(graph_of(exported("llama")))
    assert counts["PagedAttention"] == 2
    assert counts["RMSNormalization"] == 2 * 2 + 1
    assert counts["RotaryEmbedding"] == 2 * 2
    assert counts["MatMul"] == 2 * 7 + 1
    assert (counts["Cos"], counts["Sin"]) == (1, 1)
    assert counts["Constant"] == counts["Gemm"] == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "qwen3_moe"])
def test_weights_keep_their_names(name: str, exported: Callable[[str], Any]) -> None:
    """Linear weights are transposed to [in, out] (gpt2 has them so), Gemma's norms hold 1 + weight, the rest is unchanged."""
    model = exported(name)
    state = {key: value.numpy() for key, value in model.model.state_dict().items()}
    graph = graph_of(model)
    found = {key: value.const_value.numpy() for key, value in graph.initializers.items() if value.const_value is not None}
    assert set(state) <= set(found)
    matrices = {node.inputs[1].name for node in graph if node.op_type == "MatMul" and node.inputs[1] is not None}
    for key, weight in state.items():
        if (key in matrices and name != "gpt2") or key == "lm_head.weight":
            weight = weight.T
        if name == "gemma2" and key.endswith("norm.weight"):
            weight = weight + 1
        np.testing.assert_array_equal(found[key], weight, err_msg=key)
    unnamed = {key: value.size for key, value in found.items() if key not in state and "inv_freq" not in key}
    assert max(unnamed.values()) <= 8, unnamed  # shapes, axes, scalars


def test_a_tied_head_has_its_own_initializer(exported: Callable[[str], Any]) -> None:
    initializers = graph_of(exported("llama_tied")).initializers
    embedding, head = (initializers[name].const_value for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert embedding is not None and head is not None
    assert embedding.numpy().shape == (128, 64)
    np.testing.assert_array_equal(head.numpy(), embedding.numpy().T)


def test_attention_attributes_are_what_the_layer_was_given(exported: Callable[[str], Any]) -> None:
    nodes = [node for node in graph_of(exported("gemma2")) if node.op_type == "PagedAttention"]
    attributes = [{name: attribute.value for name, attribute in node.attributes.items()} for node in nodes]
    common = {"softcap": 1.0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "scale": pytest.approx(24**-0.5)}
    assert attributes == [common | {"layer": 0, "sliding_window": 6}, common | {"layer": 1, "sliding_window": 0}]
    assert {node.domain for node in nodes} == {"forgeline"}


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_windows_in_the_spec(name: str) -> None:
    spec = model_spec(tiny_models.build(name))
    assert tuple(layer.sliding_window for layer in spec.layers) == tiny_models.WINDOWS.get(name, (0, 0))


def test_experts_are_one_node_a_layer(exported: Callable[[str], Any]) -> None:
    for name in ("mixtral", "qwen3_moe"):
        assert ops(graph_of(exported(name)))["MoEExperts"] == 2


def test_the_model_is_left_as_it_was(exported: Callable[[str], Any]) -> None:
    model = exported("llama").model
    assert model.config._attn_implementation == "eager"
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert tiny_models.logits(model, [3, 4, 5]).shape == (3, 128)
