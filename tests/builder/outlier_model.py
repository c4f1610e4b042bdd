"""The trained tiny Llama made hard to quantize on purpose: the same function in fp32, a few channels far larger than the rest.

Input channels of each layer's projections grow by `factor` in the norm's weight, and the projections' columns shrink by it. Key
channels grow in the key projection, and the queries that meet them shrink; both channels of a rotary pair, which rotate into
each other.

    python tests/builder/outlier_model.py DIRECTORY     writes it there, to build it with `builder build`
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TINY_LLAMA = Path(__file__).resolve().parents[1] / "models" / "tiny-llama"
CHANNELS = (3, 77, 200)  # of 256
KEY_PAIRS = (
    0,
    4,
    15,
)  # of 32 rotary pairs, in every head: the largest as trained, up to 16, and 60 times that is beyond E4M3's 448


def load(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from builder.attention_hook import quiet

    torch.set_num_threads(1)
    with quiet():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def harden(model: Any, factor: float, *, inputs: bool = True, keys: bool = True, layers: Sequence[int] | None = None) -> Any:
    """In place; `layers` None: all of them."""
    import torch

    dim = model.config.head_dim
    channels = list(CHANNELS)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            if layers is not None and number not in layers:
                continue
            attention, mlp = layer.self_attn, layer.mlp
            if inputs:
                for norm, readers in (
                    (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                    (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
                ):
                    norm.weight[channels] *= factor
                    for reader in readers:
                        reader.weight[:, channels] /= factor
            if keys:
                for projection, scale in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
                    rows = projection.weight.view(-1, dim, projection.weight.shape[1])
                    for pair in KEY_PAIRS:
                        rows[:, [pair, pair + dim // 2]] *= scale
    return model


def write(directory: Path, factor: float = 60.0, **which: Any) -> None:
    """With the tokenizer, as a model to build."""
    harden(load(TINY_LLAMA), factor, **which).save_pretrained(directory)
    for file in TINY_LLAMA.glob("*token*"):
        shutil.copy(file, directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
