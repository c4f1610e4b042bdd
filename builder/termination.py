"""SIGTERM as an orderly end: what was begun is undone by the `finally` blocks on the way out, as after Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

EXIT_STATUS = 128 + signal.SIGTERM


class Terminated(BaseException):
    """Like KeyboardInterrupt no Exception, so nothing on the way takes it for a failure of its own."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises Terminated within the block; nothing changes in a thread that cannot set a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
