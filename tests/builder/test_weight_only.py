"""Quantization of the canonical graph: exact integers, which weight gets which type, honest byte counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import fused

from builder.quantize import QuantizationReport, quantize, weight_only
from builder.quantize.weights import find_weights, tie
from runtime.errors import BuildError


def values(quantized: weight_only.Quantized) -> np.ndarray:
    return quantized.q.numpy().astype(np.int32)


def test_int8_has_one_scale_per_output_channel() -> None:
    weight = np.array([[1.27, -0.50, 0.004], [0.0, 0.0, 0.0], [-2.54, 1.0, 0.03]], np.float32)
    quantized = weight_only.int8(weight)
    np.testing.assert_allclose(quantized.scale, [0.01, 1.0, 0.02], rtol=1e-6)
    assert values(quantized).tolist() == [[127, -50, 0], [0, 0, 0], [-127, 50, 2]]
    assert quantized.num_bytes == 9 + 3 * 4


def test_int4_maps_the_extreme_of_each_group_to_minus_eight() -> None:
    weight = np.array([[-8.0, 7.0, 3.4, 0.0, 4.0, -2.0, 1.0, 0.2], [0.0] * 4 + [16.0, -15.0, 1.0, 2.0]], np.float32)
    quantized = weight_only.int4(weight, group_size=4)
    # the second group's extreme is positive: its scale is negative, and -3.5 is 7 half-steps below zero
    assert quantized.scale.tolist() == [[1.0, -0.5], [1.0, -2.0]]
    assert values(quantized).tolist() == [[-8, 7, 3, 0, -8, 4, -2, 0], [0, 0, 0, 0, -8, 7, 0, -1]]
    assert quantized.q.dtype == ir.DataType.INT4
    assert quantized.num_bytes == 16 // 2 + 4 * 4


def test_a_group_is_never_larger_than_its_own_error_bound() -> None:
    """Half a step, or a whole one where the far end of the range is clipped at 7."""
    weight = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    quantized = weight_only.int4(weight, 32)
    step = np.abs(quantized.scale).repeat(32, axis=1)
    dense = values(quantized) * quantized.scale.repeat(32, axis=1)
    assert (np.abs(dense - weight) <= step * np.where(values(quantized) == 7, 1.0, 0.5) + 1e-6).all()


@pytest.mark.parametrize(("widths", "group"), [([576, 1536], 64), ([2048, 8192], 128), ([64, 96], 32), ([80], None), ([], 128)])
def test_the_automatic_group_divides_every_layer(widths: list[int], group: int | None) -> None:
    assert weight_only.common_group_size(widths) == group


@pytest.mark.parametrize(
    ("width", "wanted", "group"), [(576, 128, 64), (1536, 128, 128), (96, 48, 48), (96, 128, 32), (80, 64, None), (576, None, 64)]
)
def test_a_layer_the_wanted_group_does_not_divide_takes_a_smaller_one(width: int, wanted: int | None, group: int | None) -> None:
    assert weight_only.group_size_for(width, wanted) == group


def roles(model: ir.Model) -> dict[str, str]:
    return {weight.name: weight.role for weight in find_weights(model.graph)}


def test_weights_are_told_apart_by_what_they_feed(exported: Callable[[str], Any]) -> None:
    found = roles(fused(exported("llama")))
    block = {name.removeprefix("model.layers.0."): role for name, role in found.items() if ".layers.0." in name}
    assert sorted(block.values()) == ["attention", "attention", "mlp", "mlp"]
    assert block["self_attn.o_proj.weight"] == "attention"
    assert block["mlp.down_proj.weight"] == "mlp"
    assert found["model.embed_tokens.weight"] == "embedding"
    assert found["lm_head.weight"] == "lm_head"
    assert len(found) == 2 * 4 + 2


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "cohere", "olmo2", "mixtral", "gemma3_text"])
def test_every_family_has_attention_mlp_and_embedding(name: str, exported: Callable[[str], Any]) -> None:
    model = fused(exported(name))
    tie(model.graph)
    found = list(roles(model).values())
    assert found.count("attention") in (4, 8)  # two layers: qkv merged or not, and the output projection
    assert found.count("mlp") >= 4
    assert "embedding" in found


def dense_weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {weight.name: weight.value.const_value.numpy() for weight in find_weights(model.graph)}  # type: ignore[union-attr]


def test_int8_graph_holds_the_rounded_weights(exported: Callable[[str], Any]) -> None:
    before = dense_weights(fused(exported("llama")))
    model = fused(exported("llama"))
    report = quantize(model, "int8")
    initializers = model.graph.initializers
    assert set(before).isdisjoint(initializers)
    for name, weight in before.items():
        matrix = weight if name == "model.embed_tokens.weight" else weight.T
        expected = weight_only.int8(np.ascontiguousarray(matrix))
        np.testing.assert_array_equal(initializers[f"{name}.q"].const_value.numpy(), expected.q.numpy())  # type: ignore[union-attr]
    assert report.skipped == {} and report.group_size == 0
    assert {name: entry.dtype for name, entry in report.classes.items()} == {
        "attention": "int8",
        "mlp": "int8",
        "embedding": "int8",
        "lm_head": "int8",
        "norms": "fp32",
    }


# Per layer 64 * 128 (qkv) + 64 * 64 weights of attention and 64 * 192 + 96 * 64 of mlp; one int8 scale per output, of 4 bytes.
ATTENTION, MLP = 2 * (64 * 128 + 64 * 64), 2 * (64 * 192 + 96 * 64)


@pytest.mark.parametrize(
    ("precision", "attention", "mlp", "embedding"),
    [
        ("fp32", 4 * ATTENTION, 4 * MLP, 4 * 128 * 64),
        ("bf16", 2 * ATTENTION, 2 * MLP, 2 * 128 * 64),
        ("int8", ATTENTION + 2 * 4 * (128 + 64), MLP + 2 * 4 * (192 + 64), 128 * 64 + 4 * 128),
        ("int4", ATTENTION // 2 + 4 * ATTENTION // 32, MLP // 2 + 4 * MLP // 32, 128 * 64 + 4 * 128),
    ],
)
def test_bytes_are_counted_with_their_scales(
    precision: str, attention: int, mlp: int, embedding: int, exported: Callable[[str], Any]
) -> None:
    model = fused(exported("llama_tied"))
    report = quantize(model, precision)
    classes = report.classes
    assert (classes["attention"].num_weights, classes["mlp"].num_weights) == (ATTENTION, MLP)
    assert (classes["attention"].num_bytes, classes["mlp"].num_bytes) == (attention, mlp)
    assert classes["embedding"].num_bytes == embedding
    assert "lm_head" not in classes and report.tied
    assert report.dtype_of("lm_head") == classes["embedding"].dtype
    stored = sum(int(v.const_value.nbytes) for v in model.graph.initializers.values() if _is_weight(v))
    assert report.total_bytes == stored
    assert report.to_dict()["bytes_per_weight"] == stored / report.num_weights


def _is_weight(value: ir.Value) -> bool:
    integers = (ir.DataType.INT64, ir.DataType.INT32)
    return value.const_value is not None and value.const_value.dtype not in integers


def test_int4_takes_int8_where_no_group_divides_and_says_so(exported: Callable[[str], Any]) -> None:
    model = fused(exported("qwen3_moe"))
    report = quantize(model, "int4")
    # experts 48 wide; everything else 64
    narrow = {name for name, reason in report.skipped.items() if "no group of" in reason and reason.startswith("int8, not int4")}
    assert narrow and all("down_proj" in name for name in narrow)
    assert set(report.groups.values()) == {64}
    routers = {name for name, reason in report.skipped.items() if "router" in reason}
    assert len(routers) == 2 and all("gate" in name for name in routers)


def test_a_position_table_stays_as_it_is(exported: Callable[[str], Any]) -> None:
    model = fused(exported("gpt2"))
    report = quantize(model, "int8")
    assert list(report.skipped) == ["transformer.wpe.weight"]
    assert "positions" in report.skipped["transformer.wpe.weight"]
    assert "transformer.wpe.weight" in model.graph.initializers
    assert "transformer.wte.weight.q" in model.graph.initializers


def test_bf16_rounds_to_nearest_even(exported: Callable[[str], Any]) -> None:
    before = dense_weights(fused(exported("llama")))
    model = fused(exported("llama"))
    quantize(model, "bf16")
    for name, weight in before.items():
        stored = model.graph.initializers[f"{name}.bf16"].const_value
        assert stored is not None and stored.dtype == ir.DataType.BFLOAT16
        np.testing.assert_array_equal(stored.numpy().astype(np.float32), weight.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_only_a_head_equal_to_the_embedding_is_tied(exported: Callable[[str], Any]) -> None:
    tied, untied = fused(exported("llama_tied")), fused(exported("llama"))
    assert tie(tied.graph) and not tie(untied.graph)
    assert "lm_head.weight" not in tied.graph.initializers
    assert "lm_head.weight" in untied.graph.initializers
    altered = fused(exported("llama_tied"))
    head = altered.graph.initializers["lm_head.weight"]
    assert head.const_value is not None
    changed = head.const_value.numpy().copy()
    changed[3, 5] += 1e-3
    head.const_value = ir.tensor(changed, name=head.name)
    assert not tie(altered.graph)


def test_progress_reaches_the_number_of_weights(exported: Callable[[str], Any]) -> None:
    seen: list[tuple[int, int]] = []
    quantize(fused(exported("llama")), "int8", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 10) for number in range(1, 11)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "int3"}, "unknown precision 'int3'; the precisions are fp32, bf16, int8-wo, int8, int8-sq, int4, fp8"),
        ({"scheme": "int4", "group_size": 50}, "group_size is 50 but must be a multiple of 16"),
        ({"scheme": "int4", "group_size": 0}, "group_size is 0 but must be a multiple of 16"),
    ],
)
def test_unknown_schemes_and_groups_are_refused(arguments: dict[str, Any], message: str) -> None:
    empty = ir.Model(ir.Graph([], [], nodes=[]), ir_version=11)
    with pytest.raises(BuildError, match=message):
        quantize(empty, **arguments)


def test_a_report_without_weights_has_no_bytes() -> None:
    assert QuantizationReport("int8").layers_bytes_per_weight == 0.0
