from __future__ import annotations

from typing import Any

from fake_model import Make, start, stream, texts
from fake_triton import Request, scalar

from runtime.request import FinishReason


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
