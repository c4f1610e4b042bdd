"""What `submit` takes: everything is checked and built before anything is registered, so that a refusal leaves nothing behind."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.config import RuntimeConfig
from runtime.engine import Engine, Output
from runtime.errors import ForgelineError, InvalidRequest, PromptTooLong
from runtime.prompt import check_length, checked_ids
from runtime.request import FinishReason, SamplingParams

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
LIMIT = 64


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine.load(tiny_engine("fp32"), RuntimeConfig(max_model_len=LIMIT, num_blocks=64, max_queue_size=8)) as loaded:
        yield loaded
        assert loaded.is_healthy()


def broken(**fields: Any) -> SamplingParams:
    """Parameters that went past the checks of SamplingParams."""
    params = SamplingParams()
    for name, value in fields.items():
        object.__setattr__(params, name, value)
    return params


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": None}, "params is None but must be of type SamplingParams"),
        ({"prompt": None}, "the prompt is of type NoneType but must be text or a list of token ids"),
        ({"prompt": b"text"}, "the prompt is of type bytes but must be text or a list of token ids"),
        ({"prompt": [1, 2.0]}, "the prompt has the token id 2.0 but must be made of whole numbers"),
        ({"prompt": [1, "a"]}, "the prompt has the token id 'a' but must be made of whole numbers"),
        ({"prompt": [1, True]}, "the prompt has the token id True but must be made of whole numbers"),
        ({"prompt": [5, 10**9]}, "the prompt has token id 1000000000 but the model's are in [0, 2048); check the tokenizer"),
        ({"prompt": [-1, 5]}, "the prompt has token id -1 but the model's are in [0, 2048); check the tokenizer"),
        (
            {"params": SamplingParams(stop_token_ids=(2048,))},
            "stop_token_ids names token 2048 but the model's token ids are 0 to ",
        ),
        ({"n": 9}, "n is 9 but must be at least 1 and at most max_queue_size=8"),
        ({"n": 1.0}, "n is 1.0 but must be at least 1 and at most max_queue_size=8"),
        ({"priority": "high"}, "priority is 'high' but must be a whole number"),
        ({"cache_salt": 5}, "cache_salt is 5 but must be of type str"),
        ({"request_id": 5}, "request_id is 5 but must be of type str"),
    ],
)
def test_what_is_refused_at_once(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    arguments = {"prompt": [1, 2], "params": PARAMS, "on_output": pytest.fail, "request_id": "mine", **arguments}
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}"):
        engine.submit(**arguments)
    assert not engine._sequences and not engine._user_ids


@pytest.mark.parametrize("params", [broken(stop=(b"x",)), broken(bad_words_ids=(5,)), broken(stop_token_ids=None)])
def test_a_refusal_of_any_kind_leaves_nothing_behind(engine: Engine, params: SamplingParams) -> None:
    with pytest.raises((ForgelineError, TypeError)):
        engine.submit([1, 2], params, request_id="mine", n=2, on_output=pytest.fail)
    assert not engine._sequences and not engine._user_ids
    assert [ended for _, ended in run(engine, ("mine", 1))] == [FinishReason.LENGTH]


def run(engine: Engine, *requests: tuple[str, int]) -> list[tuple[tuple[str, int], FinishReason]]:
    """Submit (id, n) requests together; the end of each sequence as ((id, index), reason), sorted."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    for request_id, n in requests:
        engine.submit([1, 2, 3], PARAMS, request_id=request_id, n=n, on_output=outputs.put)
    ends = []
    while len(ends) < sum(n for _, n in requests):
        output = outputs.get(timeout=60)
        if output.finish_reason is not None:
            assert output.num_output_tokens == 4, output
            ends.append(((output.request_id, output.index), output.finish_reason))
    return sorted(ends)


def test_ids_of_sequences_collide_with_no_id_that_a_client_chooses(engine: Engine) -> None:
    expected = [("x", 0), ("x", 1), ("x/0", 0), ("x/1", 0)]
    assert run(engine, ("x", 2), ("x/0", 1), ("x/1", 1)) == [(key, FinishReason.LENGTH) for key in expected]
    expected = [("0", 0), ("1", 0), ("2", 0), ("2", 1)]
    assert run(engine, ("0", 1), ("1", 1), ("2", 2)) == [(key, FinishReason.LENGTH) for key in expected]


def test_numpy_ids_are_taken_as_whole_numbers() -> None:
    ids = checked_ids(np.array([1, 2]), 5)
    assert ids == [1, 2] and [type(id) for id in ids] == [int, int]


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = engine.tokenizer.max_token_bytes
    most = LIMIT * longest
    assert longest == max(len(engine.tokenizer.id_to_token_bytes(id)) for id in range(engine.tokenizer.vocab_size)) > 1
    with pytest.raises(PromptTooLong, match="tokens but max_model_len=64"):  # it might have fitted: counted, then refused
        engine.submit("a" * most, PARAMS, on_output=pytest.fail)
    monkeypatch.setattr(engine.tokenizer, "encode", pytest.fail)
    expected = (
        f"the prompt has {most + 1} bytes but max_model_len=64 tokens of at most {longest} bytes hold {most}; "
        "shorten the prompt, or build with a larger --max-model-len where the model allows it"
    )
    for prompt in ("a" * (most + 1), "é" * (most // 2) + "a"):
        with pytest.raises(PromptTooLong, match=f"^{re.escape(expected)}$"):
            engine.submit(prompt, PARAMS, on_output=pytest.fail)
        with pytest.raises(PromptTooLong, match=f"^{re.escape(expected)}$"):
            engine.encode(prompt)


def test_the_longest_token_is_looked_up_only_for_long_text() -> None:
    check_length("x" * 10, 10, pytest.fail)
    check_length("x" * 30, 10, lambda: 3)
    with pytest.raises(PromptTooLong):
        check_length("x" * 31, 10, lambda: 3)
