"""The Python API without a server: what goes in is checked as everywhere else, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import LLM
from runtime.errors import InvalidRequest, PromptTooLong
from runtime.request import SamplingParams

LIMIT = 64
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
HUGE = "a" * 100_000


@pytest.fixture(scope="module")
def llm(tiny_engine: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny_engine("fp32"), max_model_len=LIMIT, num_blocks=16) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate(HUGE, PARAMS),
        lambda llm: next(llm.stream(HUGE, PARAMS)),
        lambda llm: llm.encode(HUGE),
        lambda llm: llm.encode(HUGE, chat=True),
        lambda llm: llm.chat([{"role": "user", "content": HUGE}], PARAMS),
    ],
    ids=["generate", "stream", "encode", "encode chat", "chat"],
)
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    llm: LLM, ask: Callable[[LLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(
        PromptTooLong, match=r"^the prompt has 1\d{5} bytes but max_model_len=64 tokens of at most \d+ bytes hold"
    ):
        ask(llm)


def test_a_chat_of_too_many_tokens_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"^the prompt has \d\d tokens but max_model_len=64 leaves room for 63; shorten"):
        llm.chat([{"role": "user", "content": "once upon a time " * 15}], PARAMS)


def test_an_engine_and_messages_of_another_kind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^engine is None but must be the directory that `builder build` wrote$"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^messages is 5 but must be a list of objects with a role and content$"):
        llm.chat(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts is 5 but must be a prompt or a list of prompts"),
        (None, "prompts is None but must be a prompt or a list of prompts"),
        ([1, 2, 3], "the prompt is of type int but must be text or a list of token ids"),
        ([None], "the prompt is of type NoneType but must be text or a list of token ids"),
        ([[1, "2"]], "the prompt has the token id '2' but must be made of whole numbers"),
    ],
)
def test_prompts_of_another_kind(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        llm.generate(prompts, PARAMS)


def test_a_refused_prompt_cancels_those_before_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []
    cancel = llm.engine.cancel
    monkeypatch.setattr(llm.engine, "cancel", lambda name: (cancelled.append(name), cancel(name)))
    with pytest.raises(PromptTooLong):
        llm.generate(["In", "the", HUGE], PARAMS)
    assert len(set(cancelled)) == 2


def test_ids_may_come_in_any_sequence(llm: LLM) -> None:
    expected = llm.generate([[1, 2, 3]], PARAMS)[0].token_ids
    for ids in ((1, 2, 3), range(1, 4), np.arange(1, 4)):
        assert llm.generate([ids], PARAMS)[0].token_ids == expected
        assert sum((output.token_ids for output in llm.stream(ids, PARAMS)), ()) == expected
