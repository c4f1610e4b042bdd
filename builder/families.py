"""Which models can be built: an explicit list, checked against config.json before any weight is read.

A family is here when a tiny random model of it matches Hugging Face eager attention through the reference executor
(tests/runtime/test_reference_executor.py). Everything else is refused by name.

Raises  UnsupportedModel; CorruptCheckpoint for a config.json whose values cannot be
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import CorruptCheckpoint, UnsupportedModel

# architecture (Hugging Face class) → model_type of its config
FAMILIES = {
    "CohereForCausalLM": "cohere",
    "GPT2LMHeadModel": "gpt2",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
}
_BY_TYPE = {model_type: architecture for architecture, model_type in FAMILIES.items()}
_MOE_TYPES = ("mixtral", "qwen3_moe")
STORED_IN_OUT = ("gpt2",)  # model types whose linear weights are [in, out]

# Frequencies that depend on the length of the running batch cannot be part of a static graph.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")

# Sizes that every model has, by either name; GPT-2 and GPT-J use the second.
_SIZES = (
    ("num_hidden_layers", "n_layer"), ("max_position_embeddings", "n_positions"), ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"), ("vocab_size", "vocab_size"),
)  # fmt: skip
_POSITIONS = _SIZES[1]


def supported() -> str:
    return ", ".join(sorted(FAMILIES))


def check_config(config: Mapping[str, Any], source: str) -> str:
    """The architecture `config` (config.json as a dict) describes, once it is known that it can be built."""
    model_type = str(config.get("model_type", ""))
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CorruptCheckpoint(
            f"{source}: architectures in config.json is {named!r} but must be a list of names such as ['LlamaForCausalLM']; "
            "correct config.json"
        )
    architecture = named[0] if named else _BY_TYPE.get(model_type, "")
    if architecture not in FAMILIES:
        what = architecture or model_type or "an unnamed architecture"
        if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise UnsupportedModel(f"{source}: {what} is not supported; the supported architectures are {supported()}")
        raise UnsupportedModel(
            f"{source}: {what} is not a causal language model; give a model with one of the architectures {supported()}"
        )
    if model_type != FAMILIES[architecture]:
        raise UnsupportedModel(
            f"{source}: config.json says {architecture} but model_type {model_type!r} instead of {FAMILIES[architecture]!r}; "
            "correct config.json"
        )
    _check_values(config, source)
    for rope in _rope_types(config):
        if rope not in _STATIC_ROPE:
            raise UnsupportedModel(
                f"{source}: rotary embedding of type {rope!r} depends on the length of the batch and is not supported; "
                f"use a checkpoint with one of {', '.join(_STATIC_ROPE)}"
            )
    if model_type in _MOE_TYPES and config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{source}: experts with hidden_act {config['hidden_act']!r} are not supported; only 'silu' is")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{source}: use_bidirectional_attention is set but only causal attention is supported")
    return architecture


def _check_values(config: Mapping[str, Any], source: str) -> None:
    for names in _SIZES:
        for name in names:
            value = config.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise CorruptCheckpoint(
                    f"{source}: {name} in config.json is {value!r} but must be an integer of at least 1; correct config.json"
                )
    for name in ("quantization_config", "rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CorruptCheckpoint(
                f"{source}: {name} in config.json is {value!r} but must be an object or null; correct config.json"
            )


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Tokens the model was trained for, where config.json says it."""
    return next((config[name] for name in _POSITIONS if config.get(name) is not None), None)


def _rope_types(config: Mapping[str, Any]) -> list[str]:
    """rope_scaling (old) or rope_parameters (new), the latter possibly one per layer type."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        parameters = config.get(key) or {}
        for entry in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
            kind = entry.get("rope_type", entry.get("type"))
            if isinstance(kind, str):
                found.append(kind)
    return found
