"""What the sampler keeps of one request from step to step: its token counts, its seed, and its parameters as arrays.

A step's cost follows the tokens added since the last one, not how many bad words or biases a request has. Knows no logits.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from runtime.request import Request, SamplingParams

GREEDY, FREE, NUCLEUS, FILTERED = range(4)  # kinds of rows, worked on in this order, so that each is a slice


class TokenCounts:
    """Distinct tokens of one request in order of first use, with how often each was produced; grows by appending."""

    def __init__(self, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._reset()

    def _reset(self) -> None:
        self._num_seen = 0
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def update(self, request: Request) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(ids, output counts) up to the request's last token. Costs the tokens added since the last call."""
        if request.num_tokens < self._num_seen:  # tokens were taken back
            self._reset()
        num_prompt = request.num_prompt_tokens
        if self._num_seen < num_prompt:
            if self._with_prompt:
                for token in dict.fromkeys(request.prompt_token_ids):
                    self._slot(token)
            self._num_seen = num_prompt
        for token in request.token_ids[self._num_seen :]:
            slot = self._slot(token)  # may replace the arrays, so not inside the subscript
            self._counts[slot] += 1
        self._num_seen = request.num_tokens
        used = len(self._slots)
        return self._ids[:used], self._counts[:used]

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        return slot


class RowState:
    """What one request needs at every step, worked out once."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.params = params
        self.top_k = min(params.top_k, vocab_size)
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        self.counts = TokenCounts(with_prompt=params.repetition_penalty != 1) if penalized else None
        self.stop_ids = np.array(eos_token_ids + params.stop_token_ids if params.min_tokens else (), np.int64)
        self.bias_ids = np.array([id for id, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.banned = np.array([word[0] for word in params.bad_words_ids if len(word) == 1], np.int64)
        self._words: dict[int, list[tuple[list[int], int]]] = {}  # longer bad words, by their last token but one
        for *before, last in params.bad_words_ids:
            if before:
                self._words.setdefault(before[-1], []).append((before, last))
        changes_logits = bool(penalized or params.bad_words_ids or params.logit_bias)
        self._copies = changes_logits or params.logprobs is not None
        self._always = not params.is_greedy or self._copies
        if params.is_greedy:
            self.kind = GREEDY
        elif 0 < self.top_k < vocab_size:
            self.kind = FILTERED
        else:
            self.kind = NUCLEUS if params.top_p < 1 else FILTERED if params.min_p > 0 else FREE

    def needs_logits(self, request: Request) -> bool:
        return self._always or self.below_minimum(request)

    def needs_copy(self, request: Request) -> bool:
        """Whether more is done with the logits than to draw from them."""
        return self._copies or self.below_minimum(request)

    def below_minimum(self, request: Request) -> bool:
        return request.num_output_tokens < self.params.min_tokens

    def masked(self, request: Request) -> Iterable[npt.NDArray[np.int64]]:
        if self.below_minimum(request):
            yield self.stop_ids
        yield self.banned
        tokens = request.token_ids
        words = self._words.get(tokens[-1], ())
        if words:
            yield np.array([last for before, last in words if tokens[-len(before) :] == before], np.int64)
