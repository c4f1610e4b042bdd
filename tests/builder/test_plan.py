"""`builder plan` against figures worked out on paper and known from the literature."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from builder import cli
from builder.cli import main
from builder.plan import GIB, GPUS, Shape, decode_floor, kv_bytes_per_token, make_plan, prefill_floor, process_need, weight_bytes
from plugins.quantized_matmul import native
from runtime.config import RuntimeConfig, resolve
from runtime.contract import KVSpec, LayerSpec, Manifest, ModelSpec, PrecisionSpec
from runtime.errors import BuildError, InvalidRequest

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
LAYERS = (LayerSpec(32, 32, 128),) * 32


def test_llama_2_7b_stores_half_a_megabyte_per_token() -> None:
    per_token = kv_bytes_per_token(LAYERS, "f16", "f16")
    assert per_token == 2 * 32 * 32 * 128 * 2 == 0.5 * (1 << 20)
    assert per_token * 4000 == 2000 * (1 << 20)
    assert per_token * 128 * 1024 == 64 * GIB


def test_a_pair_costs_the_sum_of_its_sides_with_scales() -> None:
    layers = (LayerSpec(9, 3, 64),) * 30  # SmolLM2
    assert kv_bytes_per_token(layers, "f32", "f32") == 46080
    assert kv_bytes_per_token(layers, "u8", "u8") == 30 * 3 * 2 * 72
    assert kv_bytes_per_token(layers, "u8", "u4") == 30 * 3 * (72 + 48)  # 32 values share a scale
    assert kv_bytes_per_token((LayerSpec(9, 3, 80),), "u8", "u4") == 3 * (88 + 48)  # or a head, where 32 does not divide it
    assert kv_bytes_per_token(layers, "bf16", "f8") == 30 * 3 * (128 + 64)


def test_a_seven_billion_model_waits_for_memory() -> None:
    one = decode_floor(14e9, 7e9, GPUS["a100"])
    assert one["memory_s"] == pytest.approx(7.0e-3)
    assert one["arithmetic_s"] == pytest.approx(0.045e-3, rel=0.01)
    assert one["arithmetic_idle"] == pytest.approx(0.994, abs=5e-4)
    batch = decode_floor(14e9, 7e9, GPUS["a100"], batch=32)
    assert batch["step_s"] == pytest.approx(8.5e-3, rel=0.01)
    assert 32 * one["step_s"] == pytest.approx(224e-3)
    assert decode_floor(14e9, 7e9, GPUS["a100"], batch=32, kv_bytes=2e9)["memory_s"] == pytest.approx(8.0e-3)
    assert prefill_floor(14e9, 7e9, GPUS["a100"], 1) == pytest.approx(7.0e-3)
    assert prefill_floor(14e9, 7e9, GPUS["a100"], 4000) == pytest.approx(4000 * 14e9 / 312e12)


SHAPE = Shape("m", 1_000_000, 200_000, (LayerSpec(4, 2, 64),) * 4, 256, 2048, 1024)


def test_weights_count_tables_apart() -> None:
    assert weight_bytes(SHAPE, "fp32") == 4_000_000
    assert weight_bytes(SHAPE, "fp8") == pytest.approx(800_000 * 1.005 + 200_000 * 2)


def test_what_is_left_beside_weights_becomes_tokens() -> None:
    plan = make_plan(
        SHAPE, precision="fp32", key_dtype="f32", value_dtype="f32", hardware=None, memory=40_000_000, context=512, concurrency=4
    )
    left = 40_000_000 - plan["weight_bytes"] - plan["activation_bytes"]
    assert plan["kv_bytes_per_token"] == 4096
    assert plan["max_tokens"] == left // 4096
    assert plan["max_sequences"] == plan["max_tokens"] // 512
    assert plan["largest_context"] == min(1024, plan["max_tokens"] // 4)
    assert plan["fits"] == (plan["max_tokens"] >= 2048)
    with pytest.raises(
        BuildError,
        match=r"m in fp32 needs 3\.81 MiB of weights and .* MiB of activations .* choose a narrower --precision or more memory",
    ):
        make_plan(
            SHAPE, precision="fp32", key_dtype="f32", value_dtype="f32", hardware=None, memory=4_000_001, context=1, concurrency=1
        )


@pytest.mark.parametrize("process", [False, True])
def test_what_is_too_large_is_what_is_to_be_lowered(process: bool) -> None:
    sizes = {"memory": 1 << 30, "context": 8, "process": process, "hardware": None}
    kinds = {"precision": "int8", "key_dtype": "f16", "value_dtype": "f16"}
    for given, remedy in (
        ({"concurrency": 1_000_000}, "lower --concurrency, or give more memory"),
        ({"concurrency": 1_000_000, "max_num_batched_tokens": 10**6}, "lower --concurrency or --max-num-batched-tokens, or give"),
        ({"concurrency": 2, "memory": 100_000}, "choose a narrower --precision or more memory"),  # not even the weights fit
    ):
        with pytest.raises(BuildError, match=f"; {remedy}"):
            make_plan(SHAPE, **{**sizes, **kinds, **given})


def test_on_the_cpu_the_whole_process_counts() -> None:
    options: dict[str, Any] = {"key_dtype": "u8", "value_dtype": "u8", "hardware": None, "context": 512, "concurrency": 4}
    plan = make_plan(SHAPE, precision="int8", memory=1 << 30, process=True, **options)
    need = process_need(SHAPE, "int8", 4, 512)
    assert plan["process_bytes"] == dataclasses.asdict(need)
    assert need.weights == int(1.005 * 1_000_000)
    assert need.activations == 8 * 512 * 800_000 / (4 * 256)
    assert need.logits == 8 * 4 * 2048
    assert plan["max_tokens"] == ((1 << 30) - need.total) // plan["kv_bytes_per_token"]
    assert plan["total_bytes"] == need.total + plan["kv_bytes_per_token"] * 2048
    with pytest.raises(
        BuildError, match=r"needs 0\.\d+ GiB for a process that serves it, 0\.96 MiB of them weights, and 1152 bytes"
    ):
        make_plan(SHAPE, precision="int8", memory=need.total + 1151, process=True, **options)
    assert make_plan(SHAPE, precision="int8", memory=need.total + 1152, process=True, **options)["max_tokens"] == 1


@pytest.mark.parametrize("kernels", ["forgeline", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int8-wo", "int8-sq", "int4", "fp8"])
def test_loading_enforces_what_the_plan_says(precision: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model as an engine: the budget that the plan calls enough for n blocks loads n blocks."""
    monkeypatch.setattr(native, "why_not", lambda: "" if kernels == "forgeline" else "no compiler")
    shape = dataclasses.replace(SHAPE, table_parameters=SHAPE.vocab_size * SHAPE.hidden_size, num_parameters=1_324_288)
    planned = process_need(shape, precision, 4, 512)
    model = ModelSpec(
        "m", "LlamaForCausalLM", "llama", shape.vocab_size, shape.hidden_size, shape.layers, 1024, num_parameters=1_324_288
    )
    integer = precision in ("int8", "int8-sq", "int4")
    manifest = Manifest(
        schema_version=1, forgeline_version="0", created="", target="cpu", model=model,
        precision=PrecisionSpec(
            precision, "", "", "", "", emulated=precision == "fp8",
            details={"dynamic_quantization_group_size": 64 if integer else 0, "kernels": kernels if integer else "openvino"},
        ),
        kv_cache=KVSpec("u8", "u8", 32, "test", 1152), max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512,
        libraries={}, plan={}, checksums={}, weight_bytes=int(weight_bytes(shape, precision)),
    )  # fmt: skip
    plan = make_plan(
        shape, precision=precision, key_dtype="u8", value_dtype="u8", hardware=None, memory=planned.total + 40 * 32 * 1152 + 99,
        context=1024, concurrency=4, process=True,
    )  # fmt: skip
    assert plan["max_tokens"] == 40 * 32
    assert resolve(RuntimeConfig(memory_bytes=plan["memory_bytes"]), manifest).num_blocks == 40
    with pytest.raises(InvalidRequest, match="holds 1248 tokens of KV cache"):
        resolve(RuntimeConfig(memory_bytes=planned.total + 39 * 32 * 1152, num_blocks=40), manifest)


def test_the_command_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert main(["plan", str(tmp_path), "--gpu", "a100", "--context", "4000", "--concurrency", "32", "--parameters", "7e9"]) == 0
    text = capsys.readouterr().out
    assert "KV cache    0.5 MiB per token (f16:f16), 1.95 GiB per sequence of 4000 tokens" in text
    assert "7.00 ms per token reading weights, 0.045 ms of arithmetic (99.4 % idle)" in text
    assert "batch 32: 8.44 ms a step against 224 ms one by one" in text
    assert main(["plan", str(tmp_path), "--memory", "24GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_parameters"] == 6_738_415_616
    assert plan["memory_bytes"] == 24 * GIB
    assert plan["weight_bytes"] == 2 * 6_738_415_616


def test_bad_options_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--context", "0"]) == 2
    assert "--context is 0 but must be at least 1" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--kv-cache-dtype", "u8:f3"]) == 2
    assert "'u8:f3' is not auto, a type or a pair KEYS:VALUES" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert main(["plan", str(tmp_path)]) == 2
    assert "cannot be planned" in capsys.readouterr().err


def test_small_models_and_long_contexts_are_told_in_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA_2_7B | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4})
    )
    assert main(["plan", str(tmp_path), "--precision", "int8", "--memory", "2GiB", "--context", "8192"]) == 0
    text = capsys.readouterr().out
    assert "0.00 GiB" not in text
    assert "--context 8192 is beyond the 4096 positions of the model" in text
    assert main(["plan", str(tmp_path), "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    assert "0.00 " not in text
    assert "beyond" not in text


def test_a_cache_the_cpu_cannot_store_is_refused_as_by_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert main(["plan", str(tmp_path), "--precision", "int8", "--kv-cache-dtype", "bf16:f8"]) == 2
    assert "the cpu target cannot store the KV cache as bf16:f8" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--precision", "int8", "--kv-cache-dtype", "bf16:f8", "--gpu", "h100"]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * GIB), ("24G", 24 * GIB), ("24GB", 24 * 10**9), ("1.5gib", 3 * GIB // 2), ("512M", GIB // 2), ("7", 7)],
)
def test_sizes_are_read_in_powers_of_1024_and_in_bytes_of_1000(text: str, expected: int) -> None:
    assert cli._size(text) == expected


@pytest.mark.parametrize("text", ["0", "-1GiB", "", "GiB", "1.G", "1e3", "nan", "1 GiB", "٣G", "0.4"])
def test_what_is_no_size_is_quoted_as_it_was_typed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(repr(text))} is not a size such as 512M, 1.5GiB or 24GB$"):
        cli._size(text)
