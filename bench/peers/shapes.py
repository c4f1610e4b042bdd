"""Models to measure with, as Hugging Face directories that every peer converts from: random weights in known shapes, or SmolLM2.

Random weights cost exactly what trained ones cost. The tokenizer is the tiny Llama's: prompts are token ids, but tools want one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "models" / "tiny-llama"

SHAPES = {
    # Llama-3.2-1B, with a vocabulary of 32,000
    "llama-1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


def hugging_face_directory(model: str, place: Path) -> Path:
    """`model` is a name of SHAPES, a name `builder build` takes, or a directory; written to `place`/NAME once."""
    if Path(model).is_dir():
        return Path(model).resolve()
    target = place / model
    if (target / "config.json").is_file():
        return target
    if model in SHAPES:
        _write_random(model, target)
    else:
        _write_checkpoint(model, target)
    return target


def vocab_size(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _write_random(model: str, target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[model], bos_token_id=0, eos_token_id=1, pad_token_id=2, rms_norm_eps=1e-5)
    random = LlamaForCausalLM(config).to(torch.bfloat16)
    staging = target.with_name(f".{target.name}")
    random.save_pretrained(staging)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, staging / name)
    staging.rename(target)


def _write_checkpoint(model: str, target: Path) -> None:
    """A GGUF of the model zoo, dequantized, so that all peers quantize the same weights themselves."""
    import torch

    from builder import model_zoo
    from builder.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model_zoo.resolve(model))
    staging = target.with_name(f".{target.name}")
    checkpoint.model.to(torch.bfloat16).save_pretrained(staging)
    checkpoint.write_tokenizer(staging)
    staging.rename(target)
