"""Tiny random Hugging Face models, one per supported family and a few variants. Every test that needs a model starts here.

1-D parameters (norms, biases) are perturbed: all-ones norms would hide a lost or swapped weight. Where a family has a sliding
window it is 6 tokens, shorter than the prompts in use. Matrices are several times larger than usual: with scores near zero
attention is an average, whatever the scale or soft cap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 128
LAYERS = 2
WINDOW = 6


def _configs() -> dict[str, Callable[[], Any]]:
    import transformers as tf

    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15}
    small: dict[str, Any] = {**ids, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "num_hidden_layers": LAYERS}
    small |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    base = {**small, "num_key_value_heads": 2}
    gpt = {**ids, "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
    gemma = {**base, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
    mixed = ["sliding_attention", "full_attention"]
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 32}
    moe = {"num_experts_per_tok": 2}
    return {
        "cohere": lambda: tf.CohereConfig(**base, logit_scale=0.25),
        "gemma2": lambda: tf.Gemma2Config(**gemma, attn_logit_softcapping=1.0, final_logit_softcapping=3.0, layer_types=mixed),
        "gemma3_text": lambda: tf.Gemma3TextConfig(**gemma, layer_types=mixed),
        "gpt2": lambda: tf.GPT2Config(**gpt),
        "gpt_neox": lambda: tf.GPTNeoXConfig(**small, rotary_pct=0.25),
        "gptj": lambda: tf.GPTJConfig(**gpt, rotary_dim=8),
        "granite": lambda: tf.GraniteConfig(
            **base, attention_multiplier=0.25, logits_scaling=2.0, embedding_multiplier=3.0, residual_multiplier=0.5
        ),
        "llama": lambda: tf.LlamaConfig(**base),
        "llama_rope_scaled": lambda: tf.LlamaConfig(**base, rope_parameters=llama3),
        "llama_tied": lambda: tf.LlamaConfig(**base, tie_word_embeddings=True),
        "llama_wide_heads": lambda: tf.LlamaConfig(**base, head_dim=64),  # not a family of its own: for caches in groups
        "mistral": lambda: tf.MistralConfig(**base, head_dim=16, sliding_window=WINDOW),
        "mixtral": lambda: tf.MixtralConfig(**base, **moe, num_local_experts=4, sliding_window=None),
        "olmo2": lambda: tf.Olmo2Config(**base),
        "opt": lambda: tf.OPTConfig(
            **ids, init_std=0.15, vocab_size=VOCAB_SIZE, hidden_size=64, ffn_dim=96, num_hidden_layers=LAYERS,
            num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=64,
        ),
        "phi3": lambda: tf.Phi3Config(**base, sliding_window=WINDOW),
        "qwen2": lambda: tf.Qwen2Config(
            **base, use_sliding_window=True, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
        ),
        "qwen3": lambda: tf.Qwen3Config(**base, head_dim=32),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**base, **moe, head_dim=16, num_experts=4, moe_intermediate_size=48),
        "smollm3": lambda: tf.SmolLM3Config(**base, no_rope_layer_interval=2),
        "stablelm": lambda: tf.StableLmConfig(**base, use_qkv_bias=True, qk_layernorm=True),
    }  # fmt: skip


# Written out so that collecting tests needs no import of transformers.
NAMES = (
    "cohere", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "granite", "llama", "llama_rope_scaled", "llama_tied",
    "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
)  # fmt: skip
WINDOWS = {
    "gemma2": (WINDOW, 0),
    "gemma3_text": (WINDOW, 0),
    "mistral": (WINDOW, WINDOW),
    "phi3": (WINDOW, WINDOW),
    "qwen2": (0, WINDOW),
}


def config(name: str) -> Any:
    return _configs()[name]()


def build(name: str, seed: int = 0) -> Any:
    """fp32, eval mode, eager attention: the Hugging Face reference, and the exporter's input."""
    import torch
    from transformers import AutoModelForCausalLM

    from builder.attention_hook import quiet

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config(name), attn_implementation="eager").float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
    return model


def logits(model: Any, token_ids: list[int]) -> Any:
    """[len(token_ids), vocab] from Hugging Face, whole sequence, no cache."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def save(model: Any, directory: Path) -> Path:
    """A Hugging Face directory: config, safetensors, and a tokenizer of one token per word w0 … w127."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from builder.attention_hook import quiet

    with quiet():
        model.save_pretrained(directory)
        special = ["<pad>", "<s>", "</s>"]
        vocab = {word: index for index, word in enumerate([*special, *(f"w{index}" for index in range(3, VOCAB_SIZE))])}
        words = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        tokenizer.save_pretrained(directory)
    return directory


def save_gguf(model: Any, path: Path) -> Path:
    """A tiny llama as llama.cpp's converter writes it: F32, q and k rows interleaved for its rotary embedding."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        ["<pad>", "<s>", "</s>", *(chr(ord("!") + index) for index in range(90)), "ab", "cd", *(f"w{i}" for i in range(33))]
    )
    writer.add_token_types([3, 3, 3, *[1] * 125])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        writer.add_tensor(target, array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
