"""Small tokenizers of every kind, trained on a few lines, for tests."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime import tokenizer as product

TEXT = [
    "The cat sat on the mat, and that was that. The end!",
    "Привет, мир! Как дела? Это проверка.",
    "日本語の文章です。これは试验。",
    "naïve café — déjà vu",
    "emoji 😀👍🏽 👨‍👩‍👧 and flags 🇫🇷",
] * 3
TINY_LLAMA = Path(__file__).parents[1] / "models" / "tiny-llama"
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def _wrap(backend):
    return product.Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def byte_level():
    """As GPT-2, Llama-3, Qwen, SmolLM: ids 0 and 1 are special, 2 to 257 single bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])  # not special, and not in the byte alphabet
    return _wrap(backend)


@cache
def sentencepiece():
    """As Llama-2 and Mistral: ▁ for spaces, one before the text; bytes (ids 2 to 257) for what is not in the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained.train_from_iterator(TEXT[:1] * 3 + ["Привет, мир! Как дела?"], trainer)
    learned = trained.get_vocab()
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learned, key=lambda name: learned[name])]
    vocab = {name: id for id, name in enumerate(names)}
    merges = []
    for name in names[258:]:  # re-derive merges: every split of a learned token into two learned ones
        merges.extend((name[:i], name[i:]) for i in range(1, len(name)) if name[:i] in vocab and name[i:] in vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return _wrap(backend)


@cache
def gemma():
    """Like `sentencepiece`, without a space before the text."""
    backend = Tokenizer.from_str(sentencepiece()._backend.to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(backend)


@cache
def metaspace(prepend_scheme="always"):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    alphabet = sorted(set("".join(TEXT)))
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXT, trainer)
    return _wrap(backend)


@cache
def word_piece(cleanup=True):
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=cleanup)
    alphabet = sorted(set("".join(TEXT)))
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=["[UNK]", *SPECIAL], initial_alphabet=alphabet
    )
    backend.train_from_iterator([*TEXT, "do n't , it 's ' fine ' ?"], trainer)
    return _wrap(backend)


@cache
def without_decoder():
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "the": 2, "cat": 3, "[UNK]": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return _wrap(backend)


@cache
def tiny_llama():
    """The tokenizer of the trained test model, as it ships."""
    return product.Tokenizer.load(TINY_LLAMA)


ALL = {
    "tiny_llama": tiny_llama,
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": gemma,
    "metaspace": metaspace,
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": word_piece,
    "word_piece_raw": lambda: word_piece(False),
    "without_decoder": without_decoder,
}
