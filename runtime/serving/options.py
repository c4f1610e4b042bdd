"""The classic model parameters of config.pbtxt: each one honoured, mapped to a runtime option, or refused with a reason.

`builder deploy` checks them when it writes the model; the model reads them again when it loads. An empty value and a template's
`${name}` mean "not set". Beside the classic names every option of RuntimeConfig is accepted under its own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.config import RuntimeConfig, from_strings, resolve
from runtime.contract import Manifest
from runtime.errors import InvalidRequest
from runtime.executors import kv_cache_free_bytes

ENGINE_DIR = "engine_dir"


@dataclass(frozen=True)
class ServingOptions:
    runtime: RuntimeConfig
    decoupled: bool = True  # streams; False: exactly one response, so that HTTP infer works
    max_batch_size: int = 1  # prompts in one request; 0: tensors have no batch dimension
    exclude_input_in_output: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    cancellation_check_period_ms: int = 50
    stats_check_period_ms: int = 100
    stream_interval: int | None = None  # tokens in a response of a stream; None (auto): more of them the more streams there are
    guaranteed_no_evict: bool = False


# Classic name → RuntimeConfig field of the same meaning.
_RENAMED = {
    "max_queue_size": "max_queue_size",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_memory_fraction",
    "enable_kv_cache_reuse": "enable_prefix_caching",
    "enable_chunked_context": "enable_chunked_prefill",
}
_CHOICES = {
    "batching_strategy": {"inflight_fused_batching": "continuous", "inflight_batching": "continuous", "V1": "static"},
    "batch_scheduler_policy": {"max_utilization": "", "guaranteed_no_evict": "no evict"},
}
# Classic name → (values that ask for nothing, why others are refused). "*": any value, it has no effect on results.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "triton_backend": (("python", "tensorrtllm"), "the model always runs in Triton's Python backend"),
    "max_queue_delay_microseconds": (("0",), "requests join the running batch at its next step, nothing waits for company"),
    "encoder_engine_dir": ((), "encoder-decoder models are not supported"),
    "logits_datatype": (("TYPE_FP32", "fp32"), "logits are not returned"),
    "max_attention_window_size": ((), "the attention window is fixed when the engine is built"),
    "sink_token_length": (("0",), "attention sinks are fixed when the engine is built"),
    "iter_stats_max_iterations": (("0",), "no history of iterations is kept; read the metrics endpoint"),
    "request_stats_max_iterations": (("0",), "no history of iterations is kept; read the metrics endpoint"),
    "normalize_log_probs": (("false",), "log probabilities are returned as they are"),
    "gpu_device_ids": ((), "this engine runs on one device"),
    "participant_ids": ((), "this engine runs in one process"),
    "num_nodes": (("1",), "this engine runs on one node"),
    "gpu_weights_percent": (("1", "1.0"), "weights are not streamed"),
    "cross_kv_cache_fraction": ((), "encoder-decoder models are not supported"),
    "kv_cache_host_memory_bytes": (("0",), "the KV cache is not offloaded"),
    "lora_cache_optimal_adapter_size": (("8",), "there are no LoRA adapters"),
    "lora_cache_max_adapter_size": (("64",), "there are no LoRA adapters"),
    "lora_cache_gpu_memory_fraction": (("0.05",), "there are no LoRA adapters"),
    "lora_cache_host_memory_bytes": (("1073741824",), "there are no LoRA adapters"),
    "lora_prefetch_dir": ((), "there are no LoRA adapters"),
    "max_beam_width": (("1",), "there is no beam search"),
    "decoding_mode": (("auto", "top_k", "top_p", "top_k_top_p"), "the sampling mode follows from each request"),
    "medusa_choices": ((), "there is no speculative decoding"),
    "eagle_choices": ((), "there is no speculative decoding"),
    "guided_decoding_backend": ((), "output is not constrained"),
    "xgrammar_tokenizer_info_path": ((), "output is not constrained"),
    "tokenizer_dir": ((), "the tokenizer is part of the engine"),
    "cuda_graph_mode": (("false",), "this engine runs without CUDA graphs"),
    "cuda_graph_cache_size": (("0",), "this engine runs without CUDA graphs"),
    "multi_block_mode": (("*",), ""),
    "enable_context_fmha_fp32_acc": (("*",), ""),
    "preprocessing_instance_count": (("*",), ""),
    "postprocessing_instance_count": (("*",), ""),
    "bls_instance_count": (("*",), ""),
}
_OWN = {field.name for field in dataclasses.fields(ServingOptions)} - {
    "runtime",
    "decoupled",
    "max_batch_size",
    "guaranteed_no_evict",
}
_RUNTIME = {field.name for field in dataclasses.fields(RuntimeConfig)}


def parse_options(options: Mapping[str, str], manifest: Manifest) -> ServingOptions:
    """Raises  InvalidRequest for an unknown name, a bad value, or one that asks for what this runtime does not have."""
    runtime: dict[str, str] = {}
    serving: dict[str, bool | int | None] = {}
    for name, value in options.items():
        if value == "" or (value.startswith("${") and value.endswith("}")) or name == ENGINE_DIR:
            continue
        if name in _RENAMED:
            runtime[_RENAMED[name]] = value
        elif name in _CHOICES:
            choice = _choose(name, value)
            if name == "batching_strategy":
                runtime["scheduling_policy"] = choice
            else:
                serving["guaranteed_no_evict"] = choice == "no evict"
        elif name == "decoupled_mode":
            serving["decoupled"] = _flag(name, value)
        elif name == "triton_max_batch_size":
            serving["max_batch_size"] = _whole(name, value, 0)
        elif name == "max_tokens_in_paged_kv_cache":
            runtime["num_blocks"] = str(-(-_whole(name, value, 1) // manifest.kv_cache.block_size))
        elif name in ("exclude_input_in_output", "add_special_tokens", "skip_special_tokens"):
            serving[name] = _flag(name, value)
        elif name in ("cancellation_check_period_ms", "stats_check_period_ms"):
            serving[name] = _whole(name, value, 1)
        elif name == "stream_interval":
            serving[name] = None if value == "auto" else _whole(name, value, 1, " or auto")
        elif name in _RUNTIME:
            runtime[name] = value
        elif name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value.lower() not in {text.lower() for text in neutral} and "*" not in neutral:
                accepted = f"leave it empty or {neutral[0]}" if neutral else "leave it empty"
                raise InvalidRequest(f"{name}={value} cannot be honoured: {reason}; {accepted}")
        else:
            raise InvalidRequest(f"unknown model parameter {name!r}; the parameters are {', '.join(known_options())}")
    config = from_strings(runtime)
    _check_against(config, manifest)
    return ServingOptions(runtime=config, **serving)  # type: ignore[arg-type]


def known_options() -> list[str]:
    structural = {"decoupled_mode", "triton_max_batch_size", "max_tokens_in_paged_kv_cache"}
    return sorted(set(_RENAMED) | set(_CHOICES) | set(_REFUSED) | _OWN | _RUNTIME | structural)


def runtime_config(options: ServingOptions, manifest: Manifest) -> RuntimeConfig:
    """What to load the engine with. Never evicting means: no more sequences at a time than the pool holds at full length."""
    if not options.guaranteed_no_evict:
        return options.runtime
    resolved = resolve(options.runtime, manifest, kv_cache_free_bytes(manifest))
    longest = -(-resolved.max_model_len // manifest.kv_cache.block_size)
    max_num_seqs = min(resolved.max_num_seqs, resolved.num_blocks // longest)
    return dataclasses.replace(options.runtime, max_num_seqs=max_num_seqs, num_blocks=resolved.num_blocks)


def _check_against(config: RuntimeConfig, manifest: Manifest) -> None:
    """The limits fixed at build time, without asking how much memory this machine has."""
    enough = -(-manifest.max_model_len // manifest.kv_cache.block_size)
    resolve(
        config if config.num_blocks is not None else dataclasses.replace(config, num_blocks=enough),
        manifest,
        free_bytes=sys.maxsize,
    )


def _choose(name: str, value: str) -> str:
    choices = _CHOICES[name]
    if value not in choices:
        raise InvalidRequest(f"{name} is {value!r} but must be one of {', '.join(choices)}")
    return choices[value]


def _flag(name: str, value: str) -> bool:
    flags = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in flags:
        raise InvalidRequest(f"{name} is {value!r} but must be true or false")
    return flags[value.lower()]


def _whole(name: str, value: str, least: int, otherwise: str = "") -> int:
    if not value.isdecimal() or int(value) < least:
        raise InvalidRequest(f"{name} is {value!r} but must be a whole number of at least {least}{otherwise}")
    return int(value)
