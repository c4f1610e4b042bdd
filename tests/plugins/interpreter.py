"""Runs functions under Triton's CPU interpreter, in one child process.

The interpreter is chosen when triton is first imported, for the whole process, so it must not be chosen in the process that runs
the other tests. `call` takes functions of importable modules and numpy arguments. Not a test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


class Interpreter:
    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._pool.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        self._pool.shutdown()
