from __future__ import annotations

import re
from typing import Any

import pytest
from fake_triton import make_manifest

from runtime.config import RuntimeConfig
from runtime.errors import InvalidRequest, ManifestMismatch
from runtime.serving.options import _REFUSED, ServingOptions, known_options, parse_options, runtime_config

MANIFEST = make_manifest()  # block_size 16, max_model_len 64, max_num_seqs 8

CLASSIC = (
    "triton_backend", "triton_max_batch_size", "decoupled_mode", "max_queue_delay_microseconds", "max_queue_size",
    "engine_dir", "encoder_engine_dir", "batching_strategy", "logits_datatype", "max_attention_window_size",
    "sink_token_length", "exclude_input_in_output", "cancellation_check_period_ms", "stats_check_period_ms",
    "iter_stats_max_iterations", "request_stats_max_iterations", "normalize_log_probs", "gpu_device_ids", "participant_ids",
    "num_nodes", "gpu_weights_percent", "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction", "kv_cache_host_memory_bytes", "enable_kv_cache_reuse", "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size", "lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes", "lora_prefetch_dir",
    "max_beam_width", "decoding_mode", "enable_chunked_context", "multi_block_mode", "enable_context_fmha_fp32_acc",
    "cuda_graph_mode", "cuda_graph_cache_size", "batch_scheduler_policy", "medusa_choices", "eagle_choices",
    "guided_decoding_backend", "tokenizer_dir", "xgrammar_tokenizer_info_path", "bls_instance_count",
    "preprocessing_instance_count", "postprocessing_instance_count", "skip_special_tokens", "add_special_tokens",
)  # fmt: skip


def test_nothing_given() -> None:
    assert parse_options({}, MANIFEST) == ServingOptions(runtime=RuntimeConfig())


def test_classic_parameters_are_honoured_or_mapped() -> None:
    options = parse_options(
        {
            "decoupled_mode": "False", "triton_max_batch_size": "4", "max_queue_size": "7",
            "kv_cache_free_gpu_mem_fraction": "0.9",
            "enable_kv_cache_reuse": "false", "enable_chunked_context": "FALSE", "max_tokens_in_paged_kv_cache": "100",
            "batching_strategy": "V1", "batch_scheduler_policy": "guaranteed_no_evict", "exclude_input_in_output": "true",
            "skip_special_tokens": "false", "add_special_tokens": "false", "cancellation_check_period_ms": "20",
            "stats_check_period_ms": "200", "max_num_seqs": "3", "stream_interval": "2",
        },
        MANIFEST,
    )  # fmt: skip
    assert options == ServingOptions(
        runtime=RuntimeConfig(
            max_queue_size=7, kv_cache_memory_fraction=0.9, enable_prefix_caching=False, enable_chunked_prefill=False,
            num_blocks=7,
            scheduling_policy="static", max_num_seqs=3,
        ),
        decoupled=False, max_batch_size=4, exclude_input_in_output=True, skip_special_tokens=False, add_special_tokens=False,
        cancellation_check_period_ms=20, stats_check_period_ms=200, stream_interval=2, guaranteed_no_evict=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", CLASSIC)
def test_every_classic_parameter_is_known_and_may_be_left_unset(name: str) -> None:
    assert name in [*known_options(), "engine_dir"]
    assert (
        parse_options({name: ""}, MANIFEST) == parse_options({name: "${" + name + "}"}, MANIFEST) == parse_options({}, MANIFEST)
    )


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_what_is_not_available_is_refused_with_a_reason(name: str) -> None:
    neutral, reason = _REFUSED[name]
    for value in neutral:
        assert parse_options({name: value}, MANIFEST) == parse_options({}, MANIFEST)
    if neutral != ("*",):
        with pytest.raises(InvalidRequest, match=f"^{name}=17 cannot be honoured: {re.escape(reason)}; leave it empty"):
            parse_options({name: "17"}, MANIFEST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpt_model_path": "x"},
            "unknown model parameter 'gpt_model_path'; the parameters are add_special_tokens, batch_scheduler",
        ),
        ({"decoupled_mode": "maybe"}, "decoupled_mode is 'maybe' but must be true or false"),
        (
            {"batching_strategy": "v7"},
            "batching_strategy is 'v7' but must be one of inflight_fused_batching, inflight_batching, V1",
        ),
        ({"stream_interval": "0"}, "stream_interval is '0' but must be a whole number of at least 1 or auto"),
        ({"triton_max_batch_size": "-1"}, "triton_max_batch_size is '-1' but must be a whole number of at least 0"),
        ({"max_tokens_in_paged_kv_cache": "x"}, "max_tokens_in_paged_kv_cache is 'x' but must be a whole number of at least 1"),
        ({"kv_cache_free_gpu_mem_fraction": "2"}, "kv_cache_memory_fraction is 2.0 but must be in (0, 1]"),
        ({"max_queue_size": "many"}, "max_queue_size is 'many' but must be int"),
    ],
)
def test_bad_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}"):
        parse_options(options, MANIFEST)


def test_limits_of_the_engine_are_checked_when_it_is_deployed() -> None:
    with pytest.raises(ManifestMismatch, match="max_num_seqs=9 exceeds the 8 the engine was built for"):
        parse_options({"max_num_seqs": "9"}, MANIFEST)
    with pytest.raises(ManifestMismatch, match="the KV cache has 3 blocks"):  # one sequence of 64 tokens needs 4
        parse_options({"max_tokens_in_paged_kv_cache": "48"}, MANIFEST)


@pytest.mark.parametrize(("tokens", "max_num_seqs"), [("64", 1), ("191", 3), ("6400", 8)])
def test_guaranteed_no_evict_admits_what_fits_at_full_length(tokens: str, max_num_seqs: int) -> None:
    given: dict[str, Any] = {"max_tokens_in_paged_kv_cache": tokens}
    evicting = runtime_config(parse_options(given, MANIFEST), MANIFEST)
    assert evicting.max_num_seqs is None
    config = runtime_config(parse_options({**given, "batch_scheduler_policy": "guaranteed_no_evict"}, MANIFEST), MANIFEST)
    assert (config.max_num_seqs, config.num_blocks) == (max_num_seqs, -(-int(tokens) // 16))
