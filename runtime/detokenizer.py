"""Token ids to text, one token at a time: each token is some bytes, and the text is the UTF-8 of all of them.

`TokenPieces` reads the decoder of a tokenizer.json once and gives each token's bytes; `IncrementalDetokenizer` joins them and
keeps back only an unfinished character. That costs O(1) per token, needs no repeated decoding of a window, and the deltas
always add up to the decode of the whole.

    ByteLevel                                   GPT-2, Llama-3, Qwen, OLMo, SmolLM …: characters stand for bytes
    Replace, ByteFallback, Fuse, Strip          Llama-2, Mistral, Gemma, Phi-3: ▁ is a space, <0xE2> a byte
    Metaspace                                   ▁ is a space, except before the first token
    WordPiece                                   ## continues a word, others begin with a space
    none                                        tokens joined by spaces

Invalid bytes become U+FFFD as in `tokenizers`: one per maximal invalid sequence (ByteLevel), one per byte (ByteFallback). One
deviation: where a run of byte tokens is partly valid, its valid characters are kept, while `tokenizers` replaces the whole
run; a stream has already sent them.

Raises   UnsupportedFeature for a decoder that is not one of these
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from runtime.errors import UnsupportedFeature

SUPPORTED_DECODERS = ("ByteLevel", "Replace, ByteFallback, Fuse, Strip", "Metaspace", "WordPiece")
_PER_BYTE = "forgeline.one-replacement-per-byte"
codecs.register_error(_PER_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF = _byte_level_alphabet()
_CLEANUPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class TokenPieces:
    """Bytes of every token; `leading` those of a token that begins the text. Filled in as tokens are met."""

    def __init__(self, decoder: Mapping[str, Any] | None, id_to_token: Callable[[int], str | None]) -> None:
        """`decoder` is the decoder section of a tokenizer.json."""
        self._id_to_token = id_to_token
        self._steps: list[Callable[[str, bool], str]] = []  # (token, leads the text) → token
        self._to_bytes: Callable[[str], bytes] = _utf8
        self._cache: dict[tuple[int, bool], bytes | None] = {}
        self._fused = False
        self.errors = "replace"  # how the UTF-8 decoder treats invalid bytes
        self.strip: tuple[str, int] = ("", 0)  # character and how many of it to drop at the start of the text
        if decoder is None:
            self._steps.append(lambda token, leading: token if leading else f" {token}")
        else:
            self._add(decoder)

    def piece(self, id: int, leading: bool = False) -> bytes | None:
        """None for an id the tokenizer does not know: models pad their vocabulary."""
        key = (id, leading)
        try:
            return self._cache[key]
        except KeyError:
            token = self._id_to_token(id) if id >= 0 else None
            if token is not None:
                for step in self._steps:
                    token = step(token, leading)
            piece = self._cache[key] = None if token is None else self._to_bytes(token)
            return piece

    def _add(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder["type"]
        started = self._to_bytes is not _utf8 or self._fused  # from here on a step would see more than one token's text
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._add(part)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and started and decoder["stop"] == 0 and not self.strip[1]:
            self.strip = (decoder["content"], decoder["start"])
        elif kind == "ByteLevel" and not started:
            self._to_bytes = _byte_level
        elif kind == "ByteFallback" and not started:
            self._to_bytes, self.errors = _byte_fallback, _PER_BYTE
        elif kind == "Replace" and not started and "String" in decoder["pattern"]:
            old, new = decoder["pattern"]["String"], decoder["content"]
            self._steps.append(lambda token, leading: token.replace(old, new))
        elif kind == "Metaspace" and not started:
            mark, keeps = decoder["replacement"], decoder["prepend_scheme"] == "never"
            self._steps.append(lambda token, leading: token.replace(mark, "" if leading and not keeps else " "))
        elif kind == "WordPiece" and not started:
            self._steps.append(_word_piece(decoder["prefix"], decoder["cleanup"]))
        else:
            raise UnsupportedFeature(
                f"the tokenizer's decoder {dict(decoder)} is not supported at its place; "
                f"supported decoders are {'; '.join(SUPPORTED_DECODERS)}"
            )


def _utf8(token: str) -> bytes:
    return token.encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES_OF[char] for char in token])
    except KeyError:  # an added token, written as itself
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.encode()


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str, bool], str]:
    def step(token: str, leading: bool) -> str:
        if not leading:
            token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        if cleanup:
            for old, new in _CLEANUPS:
                token = token.replace(old, new)
        return token

    return step


class HasPieces(Protocol):
    @property
    def pieces(self) -> TokenPieces: ...

    @property
    def special_token_ids(self) -> Collection[int]: ...


class IncrementalDetokenizer:
    """Text of an output as it grows: `push` returns what became certain, `flush` the rest.

    Joined, the deltas equal the decode of all pushed ids. With the prompt's ids they equal what the output adds to the decode
    of prompt + output, which differs for tokenizers that drop the space before a text's first word: "▁Paris" is "Paris" at the
    start of a text and " Paris" after a prompt.
    """

    def __init__(self, tokenizer: HasPieces, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._skipped: Collection[int] = tokenizer.special_token_ids if skip_special_tokens else ()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._pieces.errors)
        self._leading = True
        self._strip_char, self._strip_left = self._pieces.strip
        for id in prompt_token_ids:
            if not self._leading and not self._strip_left:
                break
            self.push([id])
        self._utf8.reset()

    def push(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for id in ids:
            if id in self._skipped:
                continue
            piece = self._pieces.piece(id, self._leading)
            if piece is not None:
                self._leading = False
                data += piece
        return self._stripped(self._utf8.decode(bytes(data)))

    def flush(self) -> str:
        """What an unfinished character at the end amounts to; the output ends here."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text
