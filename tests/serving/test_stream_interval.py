from __future__ import annotations

from typing import Any

import pytest
from fake_model import Make, start, stream, texts
from fake_triton import Request, scalar, text_request

from runtime.request import FinishReason
from runtime.serving import chunks
from runtime.serving.chunks import Chunks


def counts(sender: Any) -> list[int]:
    return [int(response.tensors["num_output_tokens"].item()) for response in sender.responses]


def test_a_response_holds_the_interval_but_the_first_token_comes_at_once_and_the_rest_with_the_end(make_model: Make) -> None:
    sender, running = start(make_model(stream_interval="3"), stream())
    seen = []
    for number in range(1, 9):
        running.emit(str(number), finish=FinishReason.LENGTH if number == 8 else None)
        seen.append(len(sender.responses))
    assert seen == [1, 1, 1, 2, 2, 2, 3, 4]
    assert texts(sender) == [[b"1"], [b"234"], [b"567"], [b"8"]]
    assert counts(sender) == [1, 3, 3, 1]


def test_tokens_that_came_together_are_not_held_for_more(make_model: Make) -> None:
    sender, running = start(make_model(stream_interval="3"), stream())
    running.emit("ab", tokens=2)
    running.emit("c")
    running.emit("defg", tokens=4)
    assert texts(sender) == [[b"ab"], [b"cdefg"]]


def test_each_sequence_counts_for_itself(make_model: Make) -> None:
    sender, running = start(make_model(stream_interval="2"), stream(num_return_sequences=scalar(2, "int32")))
    for text in ("a", "b", "c"):
        running.emit(text, index=0)
    running.emit("x", index=1)
    running.emit("y", index=1)
    assert texts(sender) == [[b"a"], [b"bc"], [b"x"]]


def test_what_was_held_reaches_a_client_that_stops_its_request(make_model: Make) -> None:
    model = make_model(stream_interval="4")
    sender, running = start(model, stream(), id="r")
    running.emit("a")
    running.emit("b")

    model.execute([Request({"stop": scalar(True, bool)}, id="r")])
    running.emit("", tokens=0, finish=FinishReason.CANCELLED)
    assert texts(sender) == [[b"a"], [b"b"]]
    assert sender.responses[-1].tensors["finish_reason"].tolist() == [b"cancelled"]


@pytest.mark.parametrize(("streams", "tokens"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (32, 4), (33, 4), (1000, 4)])
def test_auto_sends_more_at_a_time_the_more_streams_there_are(streams: int, tokens: int) -> None:
    policy = Chunks(None, cores=2)
    policy.streams = streams
    assert [policy.due(count, 0.001) for count in range(1, 6)] == [count >= tokens for count in range(1, 6)]


def test_auto_never_lets_a_reader_wait() -> None:
    policy = Chunks(None, cores=1)
    policy.streams = 1000
    longest = chunks.LONGEST_S
    assert policy.due(1, 0.51 * longest) and not policy.due(1, 0.49 * longest)  # the next token comes as much later
    assert policy.due(2, 0.67 * longest) and not policy.due(2, 0.66 * longest)
    fixed = Chunks(4)
    assert not fixed.due(3, 10 * longest)  # asked for


def test_a_crowded_model_merges_tokens_until_streams_have_ended(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LONGEST_S", 1e9)  # a slow machine merges too
    model = make_model()
    model.chunks = Chunks(None, cores=1)
    alone, running = start(model, stream())
    others = [start(model, stream())[1] for _ in range(chunks.STREAMS_PER_CORE)]
    start(model, text_request())  # does not stream and does not count
    for text in ("a", "b", "c", "d"):
        running.emit(text)
    assert texts(alone) == [[b"a"], [b"bc"]]  # d waits
    others[0].emit("", finish=FinishReason.LENGTH)
    running.emit("e")
    running.emit("f")
    assert texts(alone) == [[b"a"], [b"bc"], [b"de"], [b"f"]]
    for other in (running, *others[1:]):
        other.emit("", finish=FinishReason.LENGTH)
    assert model.chunks.streams == 0


def test_a_refused_stream_is_not_counted(make_model: Make) -> None:
    model = make_model()
    model.drain(10)
    sender, _ = start(model, stream())
    assert sender.responses[-1].error is not None
    assert model.chunks.streams == 0
