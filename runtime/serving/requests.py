"""From the tensors and parameters of a Triton request to generations. Every value is checked; none is ignored.

Sampling    Greedy unless asked otherwise, as in the classic backend: greedy when temperature is 0, top_k is 1, or neither top_p
            nor a top_k > 1 nor a temperature other than 1 is given (classic clients always send temperature 1). Otherwise
            sampled at `temperature` (default 1).
end_id      an end token of the model: all of its end tokens count. Another token: only that one. -1: none, run to max_tokens.
bad_words   each is banned with and without a space before it, since tokenizers join that space to the word.
Limits      lists of words: in number and in bytes, since they are tokenized while no other request is looked at
Shapes      with a batch dimension [B, …], one generation per row; without it [dims], one generation
Raises      InvalidRequest, UnsupportedFeature
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from runtime.errors import InvalidRequest, UnsupportedFeature
from runtime.request import MAX_STOP_STRINGS, SamplingParams
from runtime.serving.tensors import INPUTS, PARAMETERS, UNAVAILABLE, Array

INPUT_NAMES = frozenset(spec.name for spec in INPUTS)
MAX_WORDS = 1024  # in bad_words, and in embedding_bias_words
MAX_WORDS_BYTES = 16384  # in one of these or in stop_words, all words together
_IGNORED_PARAMETERS = frozenset({"id", "triton_enable_empty_final_response", "binary_data_output"})  # the front end's own


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Defaults:
    """What the engine and the model's configuration say where a request is silent."""

    tokenizer: Encoder
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    batched: bool  # inputs have a leading batch dimension
    exclude_input_in_output: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Generation:
    """One prompt of a Triton request."""

    prompt: str
    add_special_tokens: bool  # false for the text of a rendered chat template, which holds them already
    params: SamplingParams
    n: int
    priority: int
    cache_salt: str
    stream: bool
    include_prompt: bool  # the prompt comes first in the text; never so in a stream
    return_log_probs: bool
    return_perf_metrics: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    timeout_s: float  # 0: none


def is_stop(inputs: Mapping[str, Array]) -> bool:
    """Whether this request only cancels the one with the same id."""
    return "stop" in inputs and bool(inputs["stop"].any())


def decode(
    inputs: Mapping[str, Array], parameters: Mapping[str, Any], defaults: Defaults, *, timeout_us: int = 0
) -> list[Generation]:
    for name in ("text_input", "max_tokens"):
        if name not in inputs:
            raise InvalidRequest(f"{name} is missing; text_input and max_tokens are required")
    for name, unavailable in UNAVAILABLE.items():
        if name in inputs and not unavailable.is_neutral(inputs[name]):
            raise UnsupportedFeature(f"{name} is not available: {unavailable.reason}")
    for name in parameters:
        if name not in PARAMETERS and name not in _IGNORED_PARAMETERS:
            hint = "it is an input tensor, send it as one" if name in INPUT_NAMES else f"known are {', '.join(PARAMETERS)}"
            raise InvalidRequest(f"unknown request parameter {name!r}; {hint}")
    rows = len(inputs["text_input"]) if defaults.batched else 1
    return [_decode_row(_Row(inputs, parameters, row if defaults.batched else None), defaults, timeout_us) for row in range(rows)]


class _Row:
    """One batch row's values, by name; None where the client sent nothing."""

    def __init__(self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], row: int | None) -> None:
        self._inputs, self._parameters, self._row = inputs, parameters, row

    def values(self, name: str) -> list[Any]:
        array = self._inputs.get(name)
        if array is None:
            return []
        flat = (array if self._row is None else array[self._row]).reshape(-1)
        if flat.dtype == np.float32:  # the decimal number the client wrote: 0.7, not 0.699999988
            return [float(str(value)) for value in flat]
        return flat.tolist()

    def scalar(self, name: str) -> Any:
        values = self.values(name)
        if name in self._inputs and len(values) != 1:
            raise InvalidRequest(f"{name} holds {len(values)} values but takes one; send one request for each")
        if name in self._parameters:
            if values:
                raise InvalidRequest(f"{name} is given both as a tensor and as a request parameter; send one of them")
            return self._parameters[name]
        return values[0] if values else None

    def number(self, name: str, default: float) -> float:
        value = self.scalar(name)
        if value is None:
            return default
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise InvalidRequest(f"{name} is {value!r} but must be a number") from None

    def integer(self, name: str, default: int) -> int:
        value = self.scalar(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        number = self.number(name, default)
        if not math.isfinite(number) or number != int(number):
            raise InvalidRequest(f"{name} is {value!r} but must be a whole number")
        return int(number)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.scalar(name)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value in (0, 1):
            return bool(value)
        raise InvalidRequest(f"{name} is {value!r} but must be true or false")

    def count(self, name: str) -> int:
        array = self._inputs.get(name)
        return 0 if array is None else (array if self._row is None else array[self._row]).size

    def texts(self, name: str, most: int) -> list[str]:
        """A list of words. Empty ones, which fill up the rows of a batch, do not count towards the limits."""
        values = self.values(name)
        lengths = [len(value) for value in values if value]
        if len(lengths) > most:
            raise InvalidRequest(f"{name} holds {len(lengths)} words but at most {most} are allowed; send fewer")
        if sum(lengths) > MAX_WORDS_BYTES:
            raise InvalidRequest(
                f"{name} holds {sum(lengths)} bytes of text but at most {MAX_WORDS_BYTES} are allowed; send fewer or shorter"
            )
        return [_text(name, value) for value in values]

    def text(self, name: str, default: str = "") -> str:
        value = self.scalar(name)
        return default if value is None else _text(name, value)

    def either(self, name: str, older: str) -> int | None:
        """An input that has an older name as well."""
        values = [self.integer(key, 0) for key in (name, older) if self.scalar(key) is not None]
        if len(set(values)) > 1:
            raise InvalidRequest(f"{name} is {values[0]} but {older}, its older name, is {values[1]}; send one of them")
        return values[0] if values else None


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidRequest(f"{name} is {value!r} but must be a string")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: byte 0x{value[error.start]:02x} at offset {error.start} is not valid; encode the text as UTF-8"
        ) from None


def _decode_row(row: _Row, defaults: Defaults, timeout_us: int) -> Generation:
    beam_width = row.integer("beam_width", 1)
    if beam_width != 1:
        raise UnsupportedFeature(
            f"beam_width is {beam_width} but this runtime decodes one beam; send 1, or num_return_sequences for several samples"
        )
    n = row.integer("num_return_sequences", 1)
    if not 1 <= n <= defaults.max_num_seqs:
        raise InvalidRequest(f"num_return_sequences is {n} but must be in [1, {defaults.max_num_seqs}] (max_num_seqs)")
    stream = row.flag("stream")
    timeout_us = row.integer("timeout", timeout_us)
    if timeout_us < 0:
        raise InvalidRequest(f"timeout is {timeout_us} microseconds but must be at least 0 (none)")
    return Generation(
        prompt=row.text("text_input"),
        add_special_tokens=row.flag("add_special_tokens", defaults.add_special_tokens),
        params=_sampling(row, defaults),
        n=n,
        priority=row.integer("priority", 0),
        cache_salt=row.text("cache_salt"),
        stream=stream,
        include_prompt=not (row.flag("exclude_input_in_output", defaults.exclude_input_in_output) or stream),
        return_log_probs=row.flag("return_log_probs"),
        return_perf_metrics=row.flag("return_perf_metrics"),
        return_num_input_tokens=row.flag("return_num_input_tokens"),
        return_num_output_tokens=row.flag("return_num_output_tokens"),
        timeout_s=timeout_us / 1e6,
    )


def _sampling(row: _Row, defaults: Defaults) -> SamplingParams:
    temperature = row.number("temperature", 1.0)
    top_k = row.integer("top_k", 0)
    top_p = row.number("top_p", 1.0)
    asked_to_sample = row.scalar("top_p") is not None or top_k > 1 or temperature != 1.0
    if top_k == 1 or not asked_to_sample:
        temperature = 0.0
    stop_token_ids, ignore_eos = _end(row, defaults)
    pad_id = row.integer("pad_id", 0)  # responses are not padded, so any token will do
    if not -1 <= pad_id < defaults.vocab_size:
        raise InvalidRequest(f"pad_id is {pad_id} but must be a token id in [0, {defaults.vocab_size}), or -1")
    return SamplingParams(
        max_tokens=row.integer("max_tokens", 0),
        min_tokens=row.either("min_tokens", "min_length") or 0,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=row.number("min_p", 0.0),
        repetition_penalty=row.number("repetition_penalty", 1.0),
        presence_penalty=row.number("presence_penalty", 0.0),
        frequency_penalty=row.number("frequency_penalty", 0.0),
        seed=row.either("seed", "random_seed"),
        logprobs=0 if row.flag("return_log_probs") else None,
        stop=tuple(word for word in row.texts("stop_words", MAX_STOP_STRINGS) if word),
        stop_token_ids=stop_token_ids,
        bad_words_ids=_bad_words(row, defaults),
        logit_bias=_bias(row, defaults),
        ignore_eos=ignore_eos,
        skip_special_tokens=row.flag("skip_special_tokens", defaults.skip_special_tokens),
        include_stop_in_output=row.flag("include_stop_in_output"),
    )


def _end(row: _Row, defaults: Defaults) -> tuple[tuple[int, ...], bool]:
    """(stop_token_ids, ignore_eos)"""
    ignore_eos = row.flag("ignore_eos")
    end_id = row.scalar("end_id")
    if end_id is None or end_id in defaults.eos_token_ids:
        return (), ignore_eos
    if end_id == -1:
        return (), True
    if not 0 <= end_id < defaults.vocab_size:
        raise InvalidRequest(f"end_id is {end_id} but must be a token id in [0, {defaults.vocab_size}), or -1 for none")
    return (end_id,), True


def _bad_words(row: _Row, defaults: Defaults) -> tuple[tuple[int, ...], ...]:
    banned: dict[tuple[int, ...], None] = {}
    for word in row.texts("bad_words", MAX_WORDS):
        for form in dict.fromkeys((word, " " + word.lstrip(" "))) if word else ():
            ids = tuple(defaults.tokenizer.encode(form, add_special_tokens=False))
            if ids:
                banned[ids] = None
    return tuple(banned)


def _bias(row: _Row, defaults: Defaults) -> tuple[tuple[int, float], ...]:
    words, num_weights = row.texts("embedding_bias_words", MAX_WORDS), row.count("embedding_bias_weights")
    if len(words) != num_weights:
        raise InvalidRequest(
            f"embedding_bias_words holds {len(words)} words but embedding_bias_weights {num_weights}; send one weight per word"
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, row.values("embedding_bias_weights"), strict=True):
        for token in defaults.tokenizer.encode(word, add_special_tokens=False):
            bias[token] = bias.get(token, 0.0) + weight
    return tuple(bias.items())
