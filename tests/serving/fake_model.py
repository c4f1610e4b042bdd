"""Runs the Triton model (runtime/serving/triton.py) on fakes of Triton and of the engine; the fixture `make_model` makes one."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import fake_triton
from fake_triton import Request, scalar, text_request

fake_triton.install()
triton = importlib.import_module("runtime.serving.triton")

Make = Callable[..., Any]


def start(model: Any, inputs: dict[str, Any] | None = None, **keywords: Any) -> tuple[Any, Any]:
    """Send one request → its sender and what reached the engine."""
    request = Request(inputs or text_request(), **keywords)
    before = len(model.engine.submitted)
    assert model.execute([request]) is None
    submitted = model.engine.submitted[before:]
    return request.sender, submitted[0] if len(submitted) == 1 else submitted


def texts(sender: Any) -> list[list[bytes]]:
    return [response.tensors["text_output"].tolist() for response in sender.responses]


def stream(**inputs: Any) -> dict[str, Any]:
    return text_request(stream=scalar(True, bool), return_num_output_tokens=scalar(True, bool), **inputs)


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(2500):
        if condition():
            return
        event.wait(0.002)
    raise AssertionError("did not happen within 5 s")
