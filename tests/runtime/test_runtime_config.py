"""The operator's options: what is refused, in one sentence with the name, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from runtime.config import RuntimeConfig, free_memory_bytes, from_options, from_strings, resolve
from runtime.contract import KVSpec, LayerSpec, Manifest, ModelSpec, PrecisionSpec
from runtime.errors import InvalidRequest, ManifestMismatch
from runtime.memory import (
    BASE,
    GRAPH_PER_LAYER,
    KERNELS_PER_LENGTH,
    OWN_BASE,
    OWN_GRAPH_PER_LAYER,
    loaded_weight_bytes,
    of_engine,
)
from runtime.serving.options import parse_options

BLOCK_BYTES = 8 * 16
MANIFEST = Manifest(
    schema_version=1, forgeline_version="0", created="", target="cpu",
    model=ModelSpec("tiny", "LlamaForCausalLM", "llama", 100, 8, (LayerSpec(1, 1, 8),), 64, eos_token_ids=(1, 2)),
    precision=PrecisionSpec("fp32", "fp32", "fp32", "fp32", "fp32"),
    kv_cache=KVSpec("f32", "f32", 16, "test", 8), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64,
    libraries={}, plan={}, checksums={}, weight_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue_size": 0}, "max_queue_size is 0 but must be a whole number of at least 1"),
        ({"max_queue_size": None}, "max_queue_size is None but must be a whole number of at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1 but must be a whole number of at least 2"),
        ({"kv_cache_memory_bytes": -5}, "kv_cache_memory_bytes is -5 but must be a whole number of at least 1"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5 but must be a whole number of at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4' but must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True but must be a whole number of at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0 but must be a whole number of at least 1"),
        ({"num_blocks": 0}, "num_blocks is 0 but must be a whole number of at least 1"),
        ({"num_threads": -1}, "num_threads is -1 but must be a whole number of at least 1"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching is 'false' but must be True or False"),
        ({"enable_chunked_prefill": 0}, "enable_chunked_prefill is 0 but must be True or False"),
        ({"verify_checksums": None}, "verify_checksums is None but must be True or False"),
        ({"kv_cache_memory_fraction": "0.5"}, "kv_cache_memory_fraction is '0.5' but must be in (0, 1]"),
        ({"kv_cache_memory_fraction": float("nan")}, "kv_cache_memory_fraction is nan but must be in (0, 1]"),
        ({"kv_cache_memory_fraction": True}, "kv_cache_memory_fraction is True but must be in (0, 1]"),
        ({"max_itl_stretch": 1}, "max_itl_stretch is 1 but must be a number above 1; inf is without limit"),
        ({"max_itl_stretch": float("nan")}, "max_itl_stretch is nan but must be a number above 1; inf is without limit"),
        ({"max_itl_stretch": "3"}, "max_itl_stretch is '3' but must be a number above 1; inf is without limit"),
        (
            {"max_itl_stretch": 2.5, "enable_chunked_prefill": False},
            "max_itl_stretch=2.5 needs prompts in parts; leave enable_chunked_prefill on, or set max_itl_stretch=inf",
        ),
        ({"scheduling_policy": ["static"]}, "scheduling_policy is ['static'] but must be one of continuous, static"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        from_options(options)


def test_a_step_holds_no_more_than_all_sequences() -> None:
    assert resolve(RuntimeConfig(max_num_batched_tokens=10**12), MANIFEST).max_num_batched_tokens == 8 * 64
    assert resolve(RuntimeConfig(max_num_batched_tokens=10**12, memory_bytes=1 << 40), MANIFEST).max_num_batched_tokens == 8 * 64


def test_the_stretch_is_what_was_asked_for_and_off_otherwise() -> None:
    assert resolve(RuntimeConfig(max_itl_stretch=2.5), MANIFEST).max_itl_stretch == 2.5
    assert resolve(RuntimeConfig(enable_chunked_prefill=False), MANIFEST).max_itl_stretch == float("inf")
    assert parse_options({"max_itl_stretch": "3"}, MANIFEST).runtime.max_itl_stretch == 3.0


def test_a_pool_without_a_block_is_told_what_to_set() -> None:
    with pytest.raises(ManifestMismatch, match=r"the KV cache has 0 blocks .* set kv_cache_memory_bytes=512 or more$"):
        resolve(RuntimeConfig(kv_cache_memory_bytes=1), MANIFEST)


def test_text_is_checked_like_values() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_queue_size is -1 but must be a whole number of at least 1$"):
        from_strings({"max_queue_size": "-1"})
    with pytest.raises(InvalidRequest, match=r"^max_itl_stretch is 'off' but must be float$"):
        from_strings({"max_itl_stretch": "off"})
    assert from_strings({"max_itl_stretch": "2.5"}).max_itl_stretch == 2.5
    assert from_strings({"max_itl_stretch": "inf"}) == RuntimeConfig()
    assert from_strings({"max_model_len": "2", "kv_cache_memory_bytes": "1", "max_queue_size": "1"}) == RuntimeConfig(
        max_model_len=2, kv_cache_memory_bytes=1, max_queue_size=1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_blocks": 11},
            "num_blocks=11 asks for a KV cache of 1408 bytes but 1407 are free; set it to 10 or less",
        ),
        (
            {"kv_cache_memory_bytes": 1500},
            "kv_cache_memory_bytes=1500 asks for a KV cache of 1408 bytes but 1407 are free; set it to 1407 or less",
        ),
    ],
)
def test_a_pool_beyond_the_free_memory_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        resolve(RuntimeConfig(**options), MANIFEST, free_bytes=1407)
    assert resolve(RuntimeConfig(**options), MANIFEST, free_bytes=1408).num_blocks == 11


def test_this_machines_memory_counts_unless_told_otherwise() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^num_blocks=1000000000000000 asks for a KV cache of 128000000000000000 bytes but \d+ are f"
    ):
        resolve(RuntimeConfig(num_blocks=10**15), MANIFEST)
    assert 0 < free_memory_bytes() < 10**15


def test_no_budget_takes_more_than_its_share_or_than_can_be_used() -> None:
    assert resolve(RuntimeConfig(kv_cache_memory_fraction=0.5), MANIFEST, free_bytes=20 * BLOCK_BYTES).num_blocks == 10
    assert resolve(RuntimeConfig(kv_cache_memory_bytes=10**9), MANIFEST, free_bytes=32 * BLOCK_BYTES).num_blocks == 32
    with pytest.raises(ManifestMismatch, match="the KV cache has 3 blocks"):
        resolve(RuntimeConfig(num_blocks=3), MANIFEST, free_bytes=10**9)


def test_deploying_does_not_ask_for_the_memory_of_this_machine() -> None:
    """The engine may run on another."""
    large = dataclasses.replace(MANIFEST, kv_cache=dataclasses.replace(MANIFEST.kv_cache, bytes_per_token=10**12))
    assert parse_options({"num_blocks": "10"}, large).runtime.num_blocks == 10
    assert parse_options({}, large).runtime.num_blocks is None


SIZED = dataclasses.replace(
    MANIFEST,
    weight_bytes=4096,
    model=dataclasses.replace(MANIFEST.model, num_parameters=100 * 8 + 3 * 8 * 50),  # one layer, fifty outputs wide
)
# base, 580 bytes for each of 100 tokens, one layer, weights, 64 tokens × 150 wide, 8 rows of logits; all floats twice
BESIDE = BASE + 58_000 + GRAPH_PER_LAYER + 4096 + 8 * 64 * 150 + 8 * 8 * 100
SEQUENCE = 4 * BLOCK_BYTES


def test_what_an_engine_needs_beside_its_cache() -> None:
    assert of_engine(SIZED, 8, 64).total == BESIDE
    assert of_engine(SIZED, 8, 64).still_to_come == BESIDE - BASE
    assert of_engine(SIZED, 8, 60).total == BESIDE, "a step of 60 tokens is padded to 64"
    details = {"dynamic_quantization_group_size": 64}
    quantized = dataclasses.replace(SIZED, precision=dataclasses.replace(SIZED.precision, details=details))
    lengths = 31 + 4  # 2 to 32, 40, 48, 56, 64
    assert of_engine(quantized, 8, 64).total == BESIDE + lengths * KERNELS_PER_LENGTH
    own = dataclasses.replace(SIZED, precision=dataclasses.replace(SIZED.precision, details={**details, "kernels": "forgeline"}))
    assert of_engine(own, 8, 64).total == BESIDE - BASE - GRAPH_PER_LAYER + OWN_BASE + OWN_GRAPH_PER_LAYER
    emulated = dataclasses.replace(SIZED, precision=dataclasses.replace(SIZED.precision, emulated=True))
    assert of_engine(emulated, 8, 64).weights == 4 * (2 * 2000 - 800)


def test_weights_as_the_plug_in_keeps_them() -> None:
    assert loaded_weight_bytes(100, 80, 20, "int8", emulated=False) == 100
    assert loaded_weight_bytes(160, 80, 20, "bf16", emulated=False) == 320
    assert loaded_weight_bytes(100, 80, 20, "int8-wo", emulated=False) == 160
    in_bf16 = [loaded_weight_bytes(100, 80, 20, name, emulated=False, arithmetic="bf16") for name in ("int8", "bf16", "int8-wo")]
    assert in_bf16 == [100, 640, 100]
    details = {"arithmetic": "bf16"}
    wide = dataclasses.replace(SIZED, precision=dataclasses.replace(SIZED.precision, name="bf16", details=details))
    assert of_engine(wide, 8, 64).weights == 2 * 4 * 2000


@pytest.mark.parametrize(
    ("room", "options", "blocks"),
    [
        (SEQUENCE, {}, 4),  # exactly one sequence
        (SEQUENCE + BLOCK_BYTES - 1, {}, 4),
        (SEQUENCE + BLOCK_BYTES, {}, 5),
        (10**9, {}, 8 * 4),  # as much as all sequences can use
        (10**9, {"num_blocks": 40}, 40),
        (SEQUENCE + BLOCK_BYTES, {"num_blocks": 5}, 5),
        (10**9, {"kv_cache_memory_bytes": 6 * BLOCK_BYTES}, 6),
    ],
)
def test_a_memory_budget_becomes_a_pool(room: int, options: dict[str, int], blocks: int) -> None:
    assert resolve(RuntimeConfig(memory_bytes=BESIDE + room, **options), SIZED).num_blocks == blocks


@pytest.mark.parametrize(
    ("budget", "options", "fits", "wanted", "whose"),
    [
        (1, {}, 0, 64, "one sequence of max_model_len needs"),
        (BESIDE, {}, 0, 64, "one sequence of max_model_len needs"),
        (BESIDE + SEQUENCE - 1, {}, 48, 64, "one sequence of max_model_len needs"),
        (BESIDE + SEQUENCE, {"num_blocks": 5}, 64, 80, "the KV cache that was asked for has"),
        (BESIDE + SEQUENCE, {"kv_cache_memory_bytes": 5 * BLOCK_BYTES}, 64, 80, "the KV cache that was asked for has"),
    ],
)
def test_a_budget_that_is_too_small_says_what_would_fit(
    budget: int, options: dict[str, int], fits: int, wanted: int, whose: str
) -> None:
    knob = "max_model_len" if not options else "the KV cache"
    message = (
        f"memory_bytes={budget} holds {fits} tokens of KV cache beside 4096 bytes of weights and {BESIDE - 4096} of process, "
        f"activations and logits, but {whose} {wanted} ({wanted * 8} bytes); set memory_bytes={BESIDE + wanted * 8} or more"
        + (f", or {knob} to {fits} or less" if fits else "")
    )
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        resolve(RuntimeConfig(memory_bytes=budget, **options), SIZED)
    enough = resolve(RuntimeConfig(memory_bytes=BESIDE + wanted * 8, **options), SIZED)
    assert enough.num_blocks * 16 == wanted


def test_a_memory_budget_is_not_for_gpus() -> None:
    with pytest.raises(InvalidRequest, match="memory_bytes=5 is for engines of target cpu, not tensorrt; set kv_cache_memory_by"):
        resolve(RuntimeConfig(memory_bytes=5), dataclasses.replace(SIZED, target="tensorrt"), free_bytes=10**9)


def test_the_share_of_free_memory_is_taken_beside_what_the_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.config.free_memory_bytes", lambda: BESIDE - BASE + 20 * BLOCK_BYTES)
    assert resolve(RuntimeConfig(kv_cache_memory_fraction=0.5), SIZED).num_blocks == 10
    with pytest.raises(InvalidRequest, match=r"^num_blocks=21 asks .* 2560 are free; set it to 20 or less$"):
        resolve(RuntimeConfig(num_blocks=21), SIZED)
