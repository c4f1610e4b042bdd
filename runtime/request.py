"""A generation request: what was asked for, what has been computed, when, and how it ended. Knows no tensors and no text.

Units    tokens; times are seconds of `time.monotonic()`, and `arrival_time_ns` etc. of `time.time_ns()`
Raises   InvalidRequest with the parameter's name, its value and the range that is allowed
"""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass, field

from runtime.errors import InvalidRequest


class FinishReason(str, enum.Enum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    CANCELLED = "cancelled"
    ERROR = "error"


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r} but must be {allowed}")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Defaults are greedy.

    temperature 0 is greedy and ignores top_k, top_p and min_p. top_k 0 and -1 mean off. `seed` fixes a row's randomness
    whatever else shares its batch; None draws one. `logprobs` n asks for the chosen token's logprob and the n best (0 = chosen
    token only); None asks for none.
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
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"in [0, max_tokens={self.max_tokens}]",
        )
        finite = math.isfinite
        _check(finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a finite number ≥ 0")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or at least 1")
        _check(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "a finite number > 0",
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(finite(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        if self.seed is not None:
            _check(0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2**64)")
        if self.logprobs is not None:
            _check(0 <= self.logprobs <= 20, "logprobs", self.logprobs, "in [0, 20]")
        _check(all(self.stop), "stop", self.stop, "made of non-empty strings")
        _check(all(finite(bias) for _, bias in self.logit_bias), "logit_bias", self.logit_bias, "made of finite numbers")

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
