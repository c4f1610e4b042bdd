"""A generation request: what was asked for, what has been computed, when, and how it ended. Knows no tensors and no text.

Units    tokens; times are seconds of `time.monotonic()`, and `arrival_time_ns` etc. of `time.time_ns()`
Raises   InvalidRequest with the parameter's name, its value and the range that is allowed
"""

from __future__ import annotations

import enum
import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import InvalidRequest


class FinishReason(str, enum.Enum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    CANCELLED = "cancelled"
    ERROR = "error"


# Bounds of SamplingParams: each keeps float32 logits finite, or the cost of a request to the others within reason.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS = 1e4  # either way; more than any model's logits span, so that it bans or forces a token
MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1024  # how many, and characters of each
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 2048  # token sequences: 1024 words, each with and without a space before it
MAX_BIASED_TOKENS = 8192


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r} but must be {allowed}")


def _whole(name: str, value: Any) -> int:
    _check(isinstance(value, numbers.Integral) and not isinstance(value, bool), name, value, "a whole number")
    return int(value)


def _finite(name: str, value: Any, ok: Callable[[float], bool], allowed: str) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # of a whole number
        number = math.inf
    _check(math.isfinite(number) and ok(number), name, value, allowed)
    return number


def _sequence(name: str, value: Any, most: int, of: str) -> tuple[Any, ...]:
    _check(isinstance(value, (list, tuple)), name, value, f"a tuple of {of}")
    if len(value) > most:
        raise InvalidRequest(f"{name} holds {len(value)} {of} but at most {most} are allowed; send fewer")
    return tuple(value)


# Numbers of SamplingParams: name, what is allowed, and that in words.
_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "a finite number ≥ 0"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    (
        "repetition_penalty",
        lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        f"in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY:g}]",
    ),
    ("presence_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
)


def _bias(entry: Any) -> tuple[int, float]:
    pair = isinstance(entry, (list, tuple)) and len(entry) == 2
    _check(pair, "an entry of logit_bias", entry, "a token id and a number")
    id = _whole("a token of logit_bias", entry[0])
    allowed = f"in [{-MAX_BIAS:g}, {MAX_BIAS:g}]"
    return id, _finite(f"the bias of token {id}", entry[1], lambda bias: abs(bias) <= MAX_BIAS, allowed)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Defaults are greedy.

    temperature 0 is greedy and ignores top_k, top_p and min_p. top_k 0 and -1 mean off. `seed` fixes a row's randomness
    whatever else shares its batch; None draws one. `logprobs` n asks for the chosen token's logprob and the n best (0 = chosen
    token only); None asks for none. Lists are taken as tuples. The bounds are the constants above.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_in_output: bool = False

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the checked value in the field's own type

        for name in ("max_tokens", "min_tokens", "top_k"):
            keep(name, _whole(name, getattr(self, name)))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                keep(name, _whole(name, getattr(self, name)))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_in_output"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"in [0, max_tokens={self.max_tokens}]")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or at least 1")
        for name, ok, allowed in _NUMBERS:
            keep(name, _finite(name, getattr(self, name), ok, allowed))
        if self.seed is not None:
            _check(0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2**64)")
        if self.logprobs is not None:
            _check(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", self.logprobs, f"in [0, {MAX_LOGPROBS}]")
        keep("stop", _sequence("stop", self.stop, MAX_STOP_STRINGS, "strings"))
        _check(all(isinstance(stop, str) and stop for stop in self.stop), "stop", self.stop, "made of non-empty strings")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop has a string of {longest} characters but at most {MAX_STOP_CHARS} are taken; shorten it")
        ids = _sequence("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        keep("stop_token_ids", tuple(_whole("a token of stop_token_ids", id) for id in ids))
        words = _sequence("bad_words_ids", self.bad_words_ids, MAX_BAD_WORDS, "token sequences")
        for word in words:
            _check(isinstance(word, (list, tuple)), "a sequence of bad_words_ids", word, "a tuple of token ids")
        keep("bad_words_ids", tuple(tuple(_whole("a token of bad_words_ids", id) for id in word) for word in words))
        biases = _sequence("logit_bias", self.logit_bias, MAX_BIASED_TOKENS, "token biases")
        keep("logit_bias", tuple(_bias(entry) for entry in biases))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass
class Timings:
    """Moments in a request's life; nanoseconds of wall-clock time, 0 = not yet. Read by metrics and the response."""

    arrival_ns: int = field(default_factory=time.time_ns)
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def queue_ms(self) -> float:
        return (self.first_scheduled_ns - self.arrival_ns) / 1e6 if self.first_scheduled_ns else 0.0

    def prefill_ms(self) -> float:
        return (self.first_token_ns - self.first_scheduled_ns) / 1e6 if self.first_token_ns else 0.0

    def decode_ms(self) -> float:
        return (self.last_token_ns - self.first_token_ns) / 1e6 if self.first_token_ns else 0.0

    def ttft_ms(self) -> float:
        return (self.first_token_ns - self.arrival_ns) / 1e6 if self.first_token_ns else 0.0


class Request:
    """Mutable state of one sequence; owned by the scheduler between `add` and its end.

    There are no phases: `num_computed_tokens` catches up with `num_tokens`, by whole prompts, chunks, or one token a step.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        fork_of: Request | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.priority = priority  # lower runs first; equal priorities run in order of arrival
        self.cache_salt = cache_salt  # prefix blocks are shared only between equal salts
        self.fork_of = fork_of  # start from this request's prompt blocks, copy-on-write
        self.token_ids = list(prompt_token_ids)  # prompt + output
        self.num_computed_tokens = 0
        self.block_table: list[int] = []  # grows in place; any other change is a new list (batch.py relies on it)
        self.block_keys: list[bytes] = []  # prefix keys of the full blocks of token_ids, as far as worked out
        self.finish_reason: FinishReason | None = None
        self.error: str = ""
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when first scheduled
        self.num_allocated_blocks = 0
        self.timings = Timings()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, computed={self.num_computed_tokens}/{self.num_tokens}, "
            f"blocks={self.block_table}, finish={self.finish_reason})"
        )
