"""The classic Triton LLM tensors (the `ensemble` of TensorRT-LLM's backend): names, types, shapes, and what is not available.

The one table that config.pbtxt is generated from (builder/deploy.py) and that requests and responses follow (requests.py,
responses.py). Clients of the classic ensemble find every tensor they know. Knows nothing of Triton's Python API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class TensorSpec:
    name: str
    data_type: str  # as in config.pbtxt, without TYPE_
    dims: tuple[int, ...] = (1,)
    optional: bool = True


INPUTS = (
    TensorSpec("text_input", "STRING", optional=False),
    TensorSpec("max_tokens", "INT32", optional=False),
    TensorSpec("num_return_sequences", "INT32"),
    TensorSpec("bad_words", "STRING", (-1,)),
    TensorSpec("stop_words", "STRING", (-1,)),
    TensorSpec("exclude_input_in_output", "BOOL"),
    TensorSpec("end_id", "INT32"),
    TensorSpec("pad_id", "INT32"),
    TensorSpec("top_k", "INT32"),
    TensorSpec("top_p", "FP32"),
    TensorSpec("temperature", "FP32"),
    TensorSpec("length_penalty", "FP32"),
    TensorSpec("repetition_penalty", "FP32"),
    TensorSpec("presence_penalty", "FP32"),
    TensorSpec("frequency_penalty", "FP32"),
    TensorSpec("min_tokens", "INT32"),
    TensorSpec("min_length", "INT32"),  # older name of min_tokens
    TensorSpec("seed", "UINT64"),
    TensorSpec("random_seed", "UINT64"),  # older name of seed
    TensorSpec("return_log_probs", "BOOL"),
    TensorSpec("return_context_logits", "BOOL"),
    TensorSpec("return_generation_logits", "BOOL"),
    TensorSpec("return_perf_metrics", "BOOL"),
    TensorSpec("return_num_input_tokens", "BOOL"),
    TensorSpec("return_num_output_tokens", "BOOL"),
    TensorSpec("beam_width", "INT32"),
    TensorSpec("stream", "BOOL"),
    TensorSpec("stop", "BOOL"),
    TensorSpec("embedding_bias_words", "STRING", (-1,)),
    TensorSpec("embedding_bias_weights", "FP32", (-1,)),
    TensorSpec("decoder_text_input", "STRING"),
    TensorSpec("image_input", "FP16", (-1, 3, -1, -1)),
    TensorSpec("image_bytes_input", "UINT8", (-1, -1, -1, -1)),
    TensorSpec("image_url_input", "STRING", (-1,)),
    TensorSpec("video_bytes_input", "UINT8", (-1, -1, -1, -1)),
    TensorSpec("prompt_embedding_table", "FP16", (-1, -1)),
    TensorSpec("prompt_table_extra_id", "UINT64", (-1,)),
    TensorSpec("prompt_vocab_size", "INT32"),
    TensorSpec("lora_task_id", "UINT64"),
    TensorSpec("lora_weights", "FP16", (-1, -1)),
    TensorSpec("lora_config", "INT32", (-1, 3)),
    TensorSpec("guided_decoding_guide_type", "STRING"),
    TensorSpec("guided_decoding_guide", "STRING"),
    TensorSpec("num_draft_tokens", "INT32"),
    TensorSpec("use_draft_logits", "BOOL"),
    # Beyond the classic contract.
    TensorSpec("priority", "INT32"),
    TensorSpec("cache_salt", "STRING"),
    TensorSpec("min_p", "FP32"),
    TensorSpec("ignore_eos", "BOOL"),
    TensorSpec("add_special_tokens", "BOOL"),
    TensorSpec("skip_special_tokens", "BOOL"),
    TensorSpec("include_stop_in_output", "BOOL"),
)

OUTPUTS = (
    TensorSpec("text_output", "STRING", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_logits", "FP32", (-1, -1)),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1)),
    TensorSpec("batch_index", "INT32"),
    TensorSpec("sequence_index", "INT32"),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32"),
    TensorSpec("kv_cache_reused_blocks", "INT32"),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32"),
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
    TensorSpec("finish_reason", "STRING", (-1,)),  # beyond the classic contract
)

# Inputs that may also come as request parameters, where a client can send those but not tensors.
PARAMETERS = (
    "priority",
    "cache_salt",
    "min_p",
    "ignore_eos",
    "add_special_tokens",
    "skip_special_tokens",
    "include_stop_in_output",
    "timeout",
)


def _empty(array: Array) -> bool:
    return array.size == 0


def _zero(array: Array) -> bool:
    return not array.any()


def _blank(array: Array) -> bool:
    return not any(array.reshape(-1))


def _zero_or_one(array: Array) -> bool:
    return bool(np.isin(array, (0, 1)).all())


@dataclass(frozen=True)
class Unavailable:
    """An input that is known but not served: refused by `reason`, unless its value asks for nothing."""

    is_neutral: Callable[[Array], bool]
    reason: str


_NO_IMAGES = "this engine takes text only; leave it out"
_NO_PROMPT_TUNING = "this runtime has no prompt tuning; put the text of the prompt into text_input"
_NO_LORA = "this runtime has no LoRA adapters; merge the adapter into the model and build an engine from that"
_NO_GRAMMAR = "this runtime does not constrain its output yet; leave it out and check the text"
_NO_LOGITS = "this engine does not return logits; use return_log_probs"
_NO_DRAFTS = "this runtime has no draft model; leave it out"

UNAVAILABLE = {
    "length_penalty": Unavailable(_zero_or_one, "it ranks beams and this runtime decodes one; leave it out or send 1.0"),
    "return_context_logits": Unavailable(_zero, _NO_LOGITS),
    "return_generation_logits": Unavailable(_zero, _NO_LOGITS),
    "decoder_text_input": Unavailable(_blank, "this engine is decoder-only; put the text into text_input"),
    "image_input": Unavailable(_empty, _NO_IMAGES),
    "image_bytes_input": Unavailable(_empty, _NO_IMAGES),
    "image_url_input": Unavailable(_blank, _NO_IMAGES),
    "video_bytes_input": Unavailable(_empty, _NO_IMAGES),
    "prompt_embedding_table": Unavailable(_empty, _NO_PROMPT_TUNING),
    "prompt_table_extra_id": Unavailable(_zero, _NO_PROMPT_TUNING),
    "prompt_vocab_size": Unavailable(_zero, _NO_PROMPT_TUNING),
    "lora_task_id": Unavailable(_zero, _NO_LORA),
    "lora_weights": Unavailable(_empty, _NO_LORA),
    "lora_config": Unavailable(_empty, _NO_LORA),
    "guided_decoding_guide_type": Unavailable(_blank, _NO_GRAMMAR),
    "guided_decoding_guide": Unavailable(_blank, _NO_GRAMMAR),
    "num_draft_tokens": Unavailable(_zero, _NO_DRAFTS),
    "use_draft_logits": Unavailable(_zero, _NO_DRAFTS),
}
