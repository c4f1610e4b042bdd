"""What SamplingParams takes and refuses: no legal value may do harm to the requests it shares a batch with."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.executors.base import StepOutput
from runtime.request import Request, SamplingParams
from runtime.sampler import Sampler


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40 but must be in [0.01, 100]"),
        ({"repetition_penalty": 100.5}, "repetition_penalty is 100.5 but must be in [0.01, 100]"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1' but must be in [0.01, 100]"),
        ({"temperature": True}, "temperature is True but must be a finite number ≥ 0"),
        ({"temperature": 10**400}, f"temperature is {10**400} but must be a finite number ≥ 0"),
        ({"top_p": None}, "top_p is None but must be in (0, 1]"),
        ({"min_p": math.nan}, "min_p is nan but must be in [0, 1]"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5 but must be in [-2, 2]"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5 but must be in [-2, 2]"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0 but must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True but must be a whole number"),
        ({"min_tokens": "1"}, "min_tokens is '1' but must be a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5 but must be a whole number"),
        ({"logprobs": 2.5}, "logprobs is 2.5 but must be a whole number"),
        ({"logprobs": 21}, "logprobs is 21 but must be in [0, 20]"),
        ({"seed": 1.5}, "seed is 1.5 but must be a whole number"),
        ({"seed": 2**64}, "seed is 18446744073709551616 but must be in [0, 2**64)"),
        ({"ignore_eos": "false"}, "ignore_eos is 'false' but must be True or False"),
        ({"logit_bias": ((5, 6e38),)}, "the bias of token 5 is 6e+38 but must be in [-10000, 10000]"),
        ({"logit_bias": ((5, -10001),)}, "the bias of token 5 is -10001 but must be in [-10000, 10000]"),
        ({"logit_bias": ((1.5, 1.0),)}, "a token of logit_bias is 1.5 but must be a whole number"),
        ({"logit_bias": {5: 1.0}}, "logit_bias is {5: 1.0} but must be a tuple of token biases"),
        ({"logit_bias": (5,)}, "an entry of logit_bias is 5 but must be a token id and a number"),
        ({"logit_bias": ((1, 0.0),) * 8193}, "logit_bias holds 8193 token biases but at most 8192 are allowed; send fewer"),
        ({"bad_words_ids": ((1.5,),)}, "a token of bad_words_ids is 1.5 but must be a whole number"),
        ({"bad_words_ids": (5,)}, "a sequence of bad_words_ids is 5 but must be a tuple of token ids"),
        ({"bad_words_ids": ((1,),) * 2049}, "bad_words_ids holds 2049 token sequences but at most 2048 are allowed; send fewer"),
        ({"stop": "END"}, "stop is 'END' but must be a tuple of strings"),
        ({"stop": (b"x",)}, "stop is (b'x',) but must be made of non-empty strings"),
        ({"stop": ("x", "")}, "stop is ('x', '') but must be made of non-empty strings"),
        ({"stop": ("x",) * 65}, "stop holds 65 strings but at most 64 are allowed; send fewer"),
        ({"stop": ("x" * 1025,)}, "stop has a string of 1025 characters but at most 1024 are taken; shorten it"),
        ({"stop_token_ids": ("1",)}, "a token of stop_token_ids is '1' but must be a whole number"),
        ({"stop_token_ids": (1,) * 1025}, "stop_token_ids holds 1025 token ids but at most 1024 are allowed; send fewer"),
    ],
)
def test_what_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        SamplingParams(**params)


def test_lists_and_numpy_numbers_are_kept_as_the_fields_own_types() -> None:
    params = SamplingParams(
        max_tokens=np.int32(3), top_k=np.int64(2), temperature=np.float32(0.5), top_p=1, stop=["a"], stop_token_ids=[np.int64(4)],
        bad_words_ids=[[1, 2]], logit_bias=[[3, 1]],
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=3, top_k=2, temperature=0.5, top_p=1.0, stop=("a",), stop_token_ids=(4,), bad_words_ids=((1, 2),),
        logit_bias=((3, 1.0),),
    )  # fmt: skip
    assert [type(value) for value in (params.max_tokens, params.temperature, params.top_p, params.logit_bias[0][1])] == [
        int, float, float, float
    ]  # fmt: skip
    assert hash(params)


EXTREMES: list[dict[str, Any]] = [
    {"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"logit_bias": ((0, 1e4), (1, -1e4))},
    {"repetition_penalty": 0.01, "logit_bias": ((0, 1e4),)}, {"presence_penalty": -2, "frequency_penalty": 2},
    {"min_p": 1e-320}, {"top_p": 1e-320}, {"top_k": 10**30}, {"seed": 2**64 - 1}, {"logprobs": 20},
    {"max_tokens": 10**30, "min_tokens": 10**30},
]  # fmt: skip


@pytest.mark.parametrize("filters", [{}, {"temperature": 1e-320}, {"temperature": 1e308}, {"temperature": 1, "top_k": 5}])
@pytest.mark.parametrize("params", EXTREMES, ids=str)
def test_no_legal_value_breaks_a_row(params: dict[str, Any], filters: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(0, 30, (2, 50)).astype(np.float32)
    request = Request("r", [0, 1, 2], SamplingParams(**{"max_tokens": 5, **filters, **params}))
    request.token_ids += [0, 1, 3]
    sampled = Sampler(50, eos_token_ids=[7]).sample(StepOutput(logits, logits.argmax(axis=1)), [request, request])
    assert not sampled.errors and all(0 <= token < 50 for token in sampled.token_ids)
