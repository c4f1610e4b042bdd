"""A model's tokenizer from its directory: text to ids and back, chat templates, special tokens. No transformers.

Behaves as Hugging Face's fast tokenizer of the same directory: special tokens named in the configuration are special, also
where they occur in a user's text (unless split_special_tokens), add_bos_token and add_eos_token count when present, and a
truncation or padding left in tokenizer.json does not. `clean_up_tokenization_spaces` is not applied: it belongs to WordPiece
models, and Hugging Face skips it for BPE as well.

Files    tokenizer.json; optional tokenizer_config.json, special_tokens_map.json, generation_config.json, chat_template.jinja,
         additional_chat_templates/*.jinja
Raises   EngineNotFound, EngineError on loading; InvalidRequest for text that is not Unicode; UnsupportedFeature
Thread-safe: nothing changes after loading but caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from runtime.chat_template import ChatTemplate
from runtime.detokenizer import IncrementalDetokenizer, TokenPieces
from runtime.errors import EngineError, EngineNotFound, InvalidRequest


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`config` as in tokenizer_config.json. `load` is the usual way in; this one serves tests."""
        config, generation = dict(config or {}), dict(generation_config or {})
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        named = {name: _content(token) for name, token in config.items() if name.endswith("_token") and _content(token)}
        _add_named_special_tokens(backend, config)
        if "add_bos_token" in config or "add_eos_token" in config:
            _set_post_processor(backend, named, config)
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self.pieces = TokenPieces(decoder, backend.id_to_token)
        self.special_token_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.chat_template = ChatTemplate(chat_templates or {}, named)

        def ids_of(name: str) -> tuple[int, ...]:
            given = generation.get(f"{name}_token_id")
            if given is None:
                given = backend.token_to_id(named[f"{name}_token"]) if f"{name}_token" in named else None
            return tuple(given) if isinstance(given, list) else () if given is None else (given,)

        self.eos_token_ids = ids_of("eos")
        self.bos_token_id = next(iter(ids_of("bos")), None)
        self.pad_token_id = next(iter(ids_of("pad")), None)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise EngineNotFound(f"{path} does not exist; a tokenizer directory needs the tokenizer.json of a fast tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise EngineError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
        return cls(backend, config, _read_json(directory / "generation_config.json"), _chat_templates(directory, config))

    @cached_property
    def vocab_size(self) -> int:
        """Tokens known here; a model's may be larger, padded for its matrices."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Rendered chat templates hold their special tokens already: encode them with add_special_tokens=False."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}; "
                "send well-formed UTF-8"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = IncrementalDetokenizer(self, (), skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """`kwargs` go to the template: tools, documents, and what it defines, such as enable_thinking."""
        return self.chat_template.render(messages, add_generation_prompt, **kwargs)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self._backend.id_to_token(id)

    @cached_property
    def max_token_bytes(self) -> int:
        """Of the longest token; no text of more than n times as many bytes has n tokens."""
        longest = 1
        tokens = ((len(token.encode()), id) for token, id in self._backend.get_vocab(with_added_tokens=True).items())
        for num_bytes, id in sorted(tokens, reverse=True):  # of the token as written, which is no shorter than its text
            if num_bytes <= longest:
                break
            longest = max(longest, len(self.id_to_token_bytes(id)))
        return longest

    def id_to_token_bytes(self, id: int) -> bytes:
        """What the token adds inside a text; empty for ids the tokenizer does not know."""
        return self.pieces.piece(id) or b""


def _content(token: Any) -> str:
    """A special token is written as text or as an object; other settings end in _token too (add_bos_token)."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _add_named_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named: list[Any] = [token for name, token in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more: Iterable[Any] = config.get(name) or ()
        named.extend(more.values() if isinstance(more, Mapping) else more)
    for token in named:
        content = _content(token)
        if content and content not in known:
            known.add(content)
            flags = token if isinstance(token, Mapping) else {}
            options = {name: bool(flags.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(content, special=True, **options)])


def _set_post_processor(backend: tokenizers.Tokenizer, named: Mapping[str, str], config: Mapping[str, Any]) -> None:
    bos = named.get("bos_token", "") if config.get("add_bos_token") else ""
    eos = named.get("eos_token", "") if config.get("add_eos_token") else ""
    backend.post_processor = TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part],
        pair=[part for part in (bos, "$A", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1") if part],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token],
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02X}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise EngineError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineError(f"{path} holds a {type(data).__name__} but must hold an object")
    return data


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over the configuration's text, which is one template or a list of named ones."""
    templates: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates.update((entry["name"], entry["template"]) for entry in configured)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    return templates
