"""Logits to token ids: one batched pass with per-row parameters. Knows nothing of text, scheduling or how a request ends.

A plain greedy row (no penalty, bias, bad word, minimum, logprob) takes the engine's argmax; only the other rows' logits are
copied and worked on. Order, as in vLLM:

    logit_bias → repetition, frequency, presence penalties → bad words, min_tokens (masks) → temperature 0: argmax
    → temperature → min_p → top_k → top_p → draw

repetition_penalty   over prompt and output: positive logits are divided by it, negative ones multiplied (Hugging Face)
frequency, presence  over the output only: logit − frequency · count − presence · (count > 0) (OpenAI)
bad words            a sequence's last token is masked where the tokens before it end prompt + output
min_tokens           end-of-sequence and stop tokens are masked until that many tokens were produced, also with ignore_eos
min_p                keeps tokens at least min_p times as likely as the likeliest
top_k                keeps exactly k, the lower id among equals; top_p the smallest set of probability ≥ p of what is left
seed                 the n-th output token's randomness is a hash of (seed, n): the same alone, in a batch, after preemption
logprobs             of the model's own distribution: before temperature, bias, penalties and masks

An executor may bring a kernel for what comes after the edits (`StepOutput.choose`), which draws from the engine's own buffer
where nothing is edited. Without one numpy does it on copies.

A row that cannot be sampled, for whatever reason, ends alone: a block of rows in which something raises is done again row by row.

State per request (token counts, a drawn seed) follows `Request.token_ids`, which preemption keeps; it ends with `forget`, or
with the request. Not thread-safe: owned by the loop.

Shapes   R rows of a step, V = vocab_size
Raises   InvalidRequest from `validate`; a row that cannot be sampled is reported in `SampledTokens.errors` and stops no other
"""

from __future__ import annotations

import logging
import math
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import runtime.logits as ops
from runtime.errors import InvalidRequest
from runtime.executors.base import Choose, StepOutput
from runtime.request import Request, SamplingParams
from runtime.row_state import FILTERED, FREE, GREEDY, NUCLEUS, RowState

log = logging.getLogger("forgeline.sampler")

NOT_A_TOKEN = -1
BROKEN_LOGITS = (
    "the engine produced NaN or infinite logits for this request; read the engine's accuracy with `builder inspect`, or build it "
    "again with a wider --precision"
)
BROKEN_BY_PARAMETERS = (
    "repetition_penalty={0.repetition_penalty}, frequency_penalty={0.frequency_penalty}, presence_penalty={0.presence_penalty} "
    "and logit_bias make this request's logits infinite; move them towards 1, 0, 0 and none"
)
NOTHING_LEFT = "min_tokens, bad_words_ids and logit_bias together exclude every token; loosen one of them"
_BLOCK_BYTES = 4 << 20  # logits worked on at a time: they stay in the cache, and in one buffer however large the batch
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-5, 1e30  # keeps float32 arithmetic finite; beyond, the choice no longer changes


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), best first


@dataclass(frozen=True)
class SampledTokens:
    """One entry per row of the step; a row named in `errors` has token id -1 and its request must end with that message."""

    token_ids: npt.NDArray[np.int64]
    logprobs: Sequence[TokenLogprobs | None]
    errors: Mapping[int, str] = field(default_factory=dict)


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(id for id in eos_token_ids if 0 <= id < vocab_size)
        self._states: weakref.WeakKeyDictionary[Request, RowState] = weakref.WeakKeyDictionary()
        self._values = self._scratch = np.empty((0, vocab_size), np.float32)

    def validate(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for what only the vocabulary can tell. Call it when a request arrives."""
        ids = {id for word in params.bad_words_ids for id in word}
        biased = Counter(id for id, _ in params.logit_bias)
        for name, values in (("bad_words_ids", ids), ("logit_bias", biased), ("stop_token_ids", params.stop_token_ids)):
            for id in values:
                if not 0 <= id < self.vocab_size:
                    raise InvalidRequest(f"{name} names token {id} but the model's token ids are 0 to {self.vocab_size - 1}")
        if not all(params.bad_words_ids):
            raise InvalidRequest("bad_words_ids contains an empty sequence but each must name at least one token")
        if biased and biased.most_common(1)[0][1] > 1:
            twice = biased.most_common(1)[0][0]
            raise InvalidRequest(f"logit_bias names token {twice} twice; give each token one bias")

    def forget(self, request: Request) -> None:
        """Drop a request's state; harmless when there is none."""
        self._states.pop(request, None)

    def sample(self, output: StepOutput, requests: Sequence[Request]) -> SampledTokens:
        """The next token of each row; `requests` follow the rows of `output`."""
        token_ids = np.array(output.next_token, np.int64)
        assert token_ids.shape == (len(requests),), f"{token_ids.shape} tokens for {len(requests)} requests"
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        errors: dict[int, str] = {}
        active: list[tuple[int, Request, RowState]] = []
        for row, request in enumerate(requests):
            try:
                state = self._state(request)
                needed = state.needs_logits(request)
            except Exception as error:
                errors[row] = str(error) if isinstance(error, InvalidRequest) else _fault(error)
                continue
            if needed:
                active.append((row, request, state))
        self._check_argmax(output, token_ids, errors)
        if output.choose is not None:
            active = self._choose_in_place(output, output.choose, active, token_ids, errors)
        active.sort(key=lambda entry: entry[2].kind)
        size = max(1, _BLOCK_BYTES // (4 * self.vocab_size))
        if active:
            shape = output.logits.shape
            assert shape == (len(requests), self.vocab_size), f"logits of shape {shape}, vocabulary of {self.vocab_size}"
        for start in range(0, len(active), size):
            block = active[start : start + size]
            try:
                self._process(output.logits, block, token_ids, logprobs, errors, output.choose)
            except Exception:
                log.exception("%d rows could not be sampled together; each is sampled alone", len(block))
                for entry in block:
                    try:
                        self._process(output.logits, [entry], token_ids, logprobs, errors, output.choose)
                    except Exception as error:
                        errors[entry[0]] = _fault(error)
        token_ids[list(errors)] = NOT_A_TOKEN
        return SampledTokens(token_ids, logprobs, errors)

    def _state(self, request: Request) -> RowState:
        state = self._states.get(request)
        if state is None:
            self.validate(request.params)
            state = self._states[request] = RowState(request.params, self._eos_token_ids, self.vocab_size)
        return state

    def _check_argmax(self, output: StepOutput, token_ids: npt.NDArray[np.int64], errors: dict[int, str]) -> None:
        """Find broken rows by one element each, where the engine left its logits within reach.

        One by one: after a step the interpreter is out of the cache, and half a dozen calls of numpy took 50 µs.
        """
        logits = output.logits if output.logits_at_hand and len(output.logits) == len(token_ids) else None
        for row, token in enumerate(token_ids.tolist()):
            if not 0 <= token < self.vocab_size or (logits is not None and not math.isfinite(logits[row, token])):
                errors.setdefault(row, BROKEN_LOGITS)

    def _choose_in_place(
        self,
        output: StepOutput,
        choose: Choose,
        active: list[tuple[int, Request, RowState]],
        token_ids: npt.NDArray[np.int64],
        errors: Mapping[int, str],
    ) -> list[tuple[int, Request, RowState]]:
        """Rows that are only drawn from need no copy of their logits, and their best value is known. Returns the others."""
        copied = [entry for entry in active if entry[2].needs_copy(entry[1])]
        drawn = [entry for entry in active if entry[0] not in errors and not entry[2].needs_copy(entry[1])]
        if drawn:
            rows, requests, states = zip(*drawn, strict=True)
            at = np.array(rows)
            best = output.logits[at, token_ids[at]]
            try:
                token_ids[at] = choose(output.logits, at, best, *self._parameters(requests, states))
            except Exception:
                log.exception("%d rows could not be sampled in place; their logits are copied", len(drawn))
                return active
        return copied

    def _process(
        self,
        raw: npt.NDArray[np.float32],
        block: Sequence[tuple[int, Request, RowState]],
        token_ids: npt.NDArray[np.int64],
        logprobs: list[TokenLogprobs | None],
        errors: dict[int, str],
        choose: Choose | None,
    ) -> None:
        """Choose the tokens of some rows, in order of kind, into `token_ids`, `logprobs` and `errors`."""
        rows, requests, states = zip(*block, strict=True)
        if len(self._values) < len(rows):  # two arrays: numpy's exp is ten times slower into memory next to its input
            self._values, self._scratch = (np.empty((len(rows), self.vocab_size), np.float32) for _ in range(2))
        values, scratch = self._values[: len(rows)], self._scratch[: len(rows)]
        np.take(raw, rows, axis=0, out=values, mode="clip")  # the default mode would buffer
        best = values.max(axis=1)
        for i in np.flatnonzero(~np.isfinite(best)):  # the maximum of a row with a NaN is NaN
            errors.setdefault(rows[i], BROKEN_LOGITS)
            values[i] = best[i] = 0
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None and rows[i] not in errors]
        if wanted:
            numbers = np.array([state.params.logprobs or 0 for state in states])
            normalizer = ops.log_normalizer(values, scratch)
            top_ids, top_values = ops.largest(values, numbers)
        if self._edit(values, requests, states):
            best = values.max(axis=1)
        for i in np.flatnonzero(~np.isfinite(best)):  # a row with a NaN has the maximum NaN
            reason = NOTHING_LEFT if best[i] == -np.inf else BROKEN_BY_PARAMETERS.format(states[i].params)
            errors.setdefault(rows[i], reason)
            values[i] = best[i] = 0
        chosen = np.empty(len(rows), np.int64)
        kinds = [state.kind for state in states]  # ascending
        for kind in (GREEDY, FREE, NUCLEUS, FILTERED):
            part = slice(bisect_left(kinds, kind), bisect_right(kinds, kind))
            if kind == GREEDY:
                values[part].argmax(axis=1, out=chosen[part])
            elif states[part]:
                chosen[part] = self._draw(values[part], best[part], scratch[part], requests[part], states[part], choose)
        token_ids[list(rows)] = chosen
        for i in wanted:
            token = int(chosen[i])
            pairs = zip(top_ids[i, : numbers[i]].tolist(), (top_values[i, : numbers[i]] - normalizer[i]).tolist(), strict=True)
            top = tuple(pair for pair in pairs if math.isfinite(pair[1]))
            logprobs[rows[i]] = TokenLogprobs(token, float(raw[rows[i], token] - normalizer[i]), top)

    def _draw(
        self,
        values: npt.NDArray[np.float32],
        best: npt.NDArray[np.float32],
        scratch: npt.NDArray[np.float32],
        requests: Sequence[Request],
        states: Sequence[RowState],
        choose: Choose | None,
    ) -> npt.NDArray[np.int64]:
        temperature, top_k, top_p, min_p, uniform = self._parameters(requests, states)
        if choose is not None:
            return choose(values, np.arange(len(values)), best, temperature, top_k, top_p, min_p, uniform)
        values -= best[:, None]
        if (temperature != 1).any():
            values *= (1 / temperature)[:, None].astype(np.float32)
        return ops.choose(values, top_k, top_p, min_p, uniform, scratch)

    @staticmethod
    def _parameters(requests: Sequence[Request], states: Sequence[RowState]) -> tuple[npt.NDArray[Any], ...]:
        """temperature, top_k, top_p, min_p, uniform."""
        params = [state.params for state in states]
        return (
            np.clip(np.array([p.temperature for p in params]), _MIN_TEMPERATURE, _MAX_TEMPERATURE),
            np.array([state.top_k for state in states]),
            np.array([p.top_p for p in params]),
            np.array([p.min_p for p in params]),
            ops.uniforms(
                np.array([state.seed for state in states], np.uint64),
                np.array([request.num_output_tokens for request in requests], np.uint64),
            ),
        )

    def _edit(self, values: npt.NDArray[np.float32], requests: Sequence[Request], states: Sequence[RowState]) -> bool:
        """Bias, penalties and masks, in place: each a single scatter over all rows. Whether there were any."""
        biased = [i for i, state in enumerate(states) if len(state.bias)]
        if biased:
            at = _places((i, states[i].bias_ids) for i in biased)
            values[at] += np.concatenate([states[i].bias for i in biased])
        counted = [(i, *s.counts.update(r)) for i, (s, r) in enumerate(zip(states, requests, strict=True)) if s.counts]
        if counted:
            index, ids, counts = zip(*counted, strict=True)
            lengths = [len(part) for part in ids]
            at = _places(zip(index, ids, strict=True))
            count = np.concatenate(counts)

            def per_token(name: str) -> npt.NDArray[np.float32]:
                return np.repeat(np.array([getattr(states[i].params, name) for i in index], np.float32), lengths)

            value, repetition = values[at], per_token("repetition_penalty")
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite afterwards is found and reported
                value = np.where(value > 0, value / repetition, value * repetition)
                values[at] = value - per_token("frequency_penalty") * count - per_token("presence_penalty") * (count > 0)
        masks = [(i, ids) for i, (s, r) in enumerate(zip(states, requests, strict=True)) for ids in s.masked(r) if len(ids)]
        if masks:
            values[_places(masks)] = -np.inf
        return bool(biased or counted or masks)


def _places(ids_of_rows: Iterable[tuple[int, npt.NDArray[np.int64]]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(row index, token id) of every element, to index a [rows, V] array with."""
    rows, ids = zip(*ids_of_rows, strict=True)
    return np.repeat(rows, [len(part) for part in ids]), np.concatenate(ids)


def _fault(error: Exception) -> str:
    return f"this request's next token could not be chosen ({type(error).__name__}: {error}); change its sampling parameters"
