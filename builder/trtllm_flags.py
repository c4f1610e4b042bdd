"""The flags of the removed `trtllm-build`, as aliases of `builder build`: each is mapped, honoured or refused, with a reason.

    mapped      replaced by a flag of ours
    honoured    what it asks for is so anyway, for the values listed; other values are refused with the same reason
    refused     asks for something an engine of this kind does not have

`translate` runs before argparse and knows nothing of the build. Flags it does not know are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.errors import BuildError

MAPPED, HONOURED, REFUSED = "mapped", "honoured", "refused"
_ON = ("enable", "auto", "true")
_OFF = ("disable", "false", "0", "none")
_DTYPES = ("auto", "float16", "bfloat16", "enable")


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    outcome: str
    reason: str
    to: str = ""  # mapped: our flag; empty for the positional model
    becomes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # mapped, value by value: our flags
    values: tuple[str, ...] = ()  # honoured: these; empty = any
    takes_value: bool = True


def _mapped(names: str, to: str, reason: str) -> Flag:
    return Flag(tuple(names.split("|")), MAPPED, reason, to=to)


def _honoured(names: str, reason: str, *values: str, takes_value: bool = True) -> Flag:
    return Flag(tuple(names.split("|")), HONOURED, reason, values=values, takes_value=takes_value)


def _refused(names: str, reason: str, *, takes_value: bool = True) -> Flag:
    return Flag(tuple(names.split("|")), REFUSED, reason, takes_value=takes_value)


_HINT = "TensorRT chooses kernels by itself, so the hint has no effect"
_SPECULATION = "drafts are the runtime's choice and need no engine of their own"
_LORA = "engines hold one set of weights; merge the adapter into the checkpoint first"
_ONE_GPU = "an engine runs on one GPU"
_DECODER = "only decoder language models are built"

FLAGS: tuple[Flag, ...] = (
    _mapped("checkpoint_dir", "", "the checkpoint is the model argument: a Hugging Face directory, a .gguf file or a hub id"),
    _mapped("max_batch_size", "--max-num-seqs", "sequences that may run at once"),
    _mapped("max_num_tokens", "--max-num-batched-tokens", "tokens per step"),
    _mapped("max_seq_len|max_decoder_seq_len", "--max-model-len", "prompt and output tokens of one sequence"),
    _mapped("input_timing_cache|output_timing_cache", "--timing-cache", "one file is read and written"),
    Flag(
        ("profiling_verbosity",),
        MAPPED,
        "layer names are kept in the plan when profilers need them",
        becomes={"layer_names_only": (), "none": (), "detailed": ("--detailed-profiling",)},
    ),
    Flag(("fast_build",), MAPPED, "the builder's effort", becomes={"": ("--optimization-level", "1")}, takes_value=False),
    _honoured("max_input_len", "prompts are prefilled in chunks, so only --max-model-len bounds them"),
    _honoured("opt_num_tokens", "there is an optimization profile for every range of tokens"),
    _honoured("max_beam_width", "sequences are sampled, not searched, so the width is 1", "1"),
    _honoured("kv_cache_type", "the KV cache is always paged", "paged"),
    _honoured("paged_kv_cache", "the KV cache is always paged", *_ON),
    _honoured("tokens_per_block", "the attention kernels are compiled for blocks of 64 tokens", "64"),
    _honoured("remove_input_padding", "steps are always packed", *_ON),
    _honoured("context_fmha", "attention never stores its scores", *_ON),
    _honoured("context_fmha_fp32_acc", "attention always accumulates in fp32", *_ON),
    _honoured("use_paged_context_fmha", "prefill always reads and writes pages", *_ON),
    _honoured("multiple_profiles", "an engine always has several profiles", *_ON),
    _honoured("logits_dtype", "logits always leave the engine in float32", "float32"),
    _honoured("gpt_attention_plugin", "attention is always a plugin, in the type of --precision", *_DTYPES),
    _honoured("gemm_plugin|gemm_swiglu_plugin|lookup_plugin|moe_plugin", _HINT),
    _honoured("reduce_fusion|user_buffer|nccl_plugin", f"{_ONE_GPU}, so there is nothing to reduce across GPUs"),
    _honoured("bert_attention_plugin|mamba_conv1d_plugin|paged_state", _DECODER, *_OFF),
    _honoured("lora_plugin", _LORA, *_OFF),
    _honoured("fp8_rowwise_gemm_plugin", "fp8 inputs have one calibrated scale per tensor, weights one per output", *_OFF),
    _honoured("use_fp8_context_fmha", "attention computes in 16 bit; store the cache in fp8 with --kv-cache-dtype f8", *_OFF),
    _honoured("streamingllm", "attention sinks are a property of the model", *_OFF),
    _honoured("workers", "plans of several architectures are built one after the other"),
    _honoured("log_level", "the report has what the build found, and errors carry TensorRT's own words"),
    _honoured("monitor_memory", "the report always has the peak memory of the build", takes_value=False),
    _honoured("max_encoder_input_len|max_prompt_embedding_table_size|max_multimodal_len", _DECODER, "0"),
    _honoured("max_draft_len", _SPECULATION, "0"),
    _refused("speculative_decoding_mode", _SPECULATION),
    _refused(
        "model_config|build_config|model_cls_file|model_cls_name", "the checkpoint says what the model is, flags say the rest"
    ),
    _refused("strip_plan", "a plan carries its weights, so that it runs without the checkpoint", takes_value=False),
    _refused("weight_sparsity", "no checkpoint that is supported has 2:4 sparse weights", takes_value=False),
    _refused("weight_streaming", "streamed weights and CUDA graphs exclude each other", takes_value=False),
    _refused("enable_debug_output|visualize_network", "inspect the canonical graph instead; it is ONNX", takes_value=False),
    _refused("dry_run", "nothing is built to find out whether it could be", takes_value=False),
    _refused(
        "gather_context_logits|gather_generation_logits|gather_all_token_logits",
        "each request says which logits it wants, and only those rows are computed",
        takes_value=False,
    ),
    _refused("lora_dir|lora_ckpt_source|lora_target_modules|max_lora_rank", _LORA),
)

_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


@dataclass(frozen=True)
class Translation:
    argv: list[str]  # for `builder build`
    notes: list[str]  # what was accepted without a flag of ours


def translate(argv: Sequence[str]) -> Translation:
    """Raises BuildError for the first flag that is refused, or honoured for other values only."""
    result = Translation([], [])
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        flag = _BY_NAME.get(name) if word.startswith("--") else None
        if flag is None:
            result.argv.append(word)
            continue
        if flag.takes_value and not equals:
            if not words or words[0].startswith("--"):
                raise BuildError(f"--{name} needs a value")
            value = words.pop(0)
        _one(flag, name, value, result)
    return result


def _one(flag: Flag, name: str, value: str, result: Translation) -> None:
    if flag.becomes:
        if value not in flag.becomes:
            raise BuildError(f"--{name} is {value!r} but must be one of {', '.join(flag.becomes)}")
        result.argv.extend(flag.becomes[value])
    elif flag.outcome == MAPPED:
        result.argv.extend([flag.to, value] if flag.to else [value])
    elif flag.outcome == HONOURED and (not flag.values or value.lower() in flag.values):
        result.notes.append(f"--{name} {value}".rstrip() + f": {flag.reason}")
    else:
        allowed = f" (accepted: {', '.join(flag.values)})" if flag.values else ""
        raise BuildError(f"--{name} {value}".rstrip() + f" is not available: {flag.reason}{allowed}")


def table() -> list[tuple[str, str, str]]:
    """(flag, outcome, what becomes of it), for the documentation."""
    rows = []
    for flag in FLAGS:
        text = flag.reason
        if flag.becomes:
            text += "; " + ", ".join(
                " ".join((*([key] if key else []), "→", *(flags or ("default",)))) for key, flags in flag.becomes.items()
            )
        elif flag.outcome == MAPPED and flag.to:
            text += f" → {flag.to}"
        if flag.values:
            text += f"; accepted: {', '.join(flag.values)}"
        rows += [(f"--{name}", flag.outcome, text) for name in flag.names]
    return rows
