"""How the supervisor tells a model to stop: a Unix socket per backend process, next to the process's shared memory.

Why        Triton unloads a decoupled model while its streams are open and crashes; so the requests end before Triton is told
Path       /dev/shm/PREFIXcontrol-PID. The backend finds PREFIX in its own command line, where the supervisor's
           `shm-region-prefix-name` ends up; without such a prefix (a tritonserver that nobody supervises) there is no socket
Protocol   the supervisor sends `{"drain_timeout_s": 5.0}` and a newline, the model answers with the number of requests in flight
           and a newline at once, and closes the connection when all have ended. A process that dies closes it as well
Security   only this user may connect
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

log = logging.getLogger("forgeline.control")

SHARED_MEMORY = Path("/dev/shm")
ANSWER_TIMEOUT_S = 2.0  # for a healthy model to say how many requests it has
POLL_S = 0.02
_PREFIX = re.compile(rb"(forgeline-[0-9a-f]{32}-)")


def control_path(prefix: str, pid: int) -> Path:
    return SHARED_MEMORY / f"{prefix}control-{pid}"


def own_prefix() -> str | None:
    """What the names of this backend's shared memory begin with; None when no supervisor started its server."""
    for argument in Path("/proc/self/cmdline").read_bytes().split(b"\0"):
        if found := _PREFIX.match(argument):
            return found[1].decode()
    return None


def own_control_path() -> Path | None:
    """Where this backend process is to listen; None when no supervisor started it."""
    prefix = own_prefix()
    return control_path(prefix, os.getpid()) if prefix is not None else None


def remove_shared_memory(prefix: str) -> None:
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


class Drainable(Protocol):
    def drain(self, timeout_s: float) -> int:
        """Accept nothing more, end what runs within this time; return the number of requests in flight now."""

    def is_drained(self) -> bool: ...


class ControlServer:
    """The model's end: listens from construction to `close`, on a thread of its own."""

    def __init__(self, path: Path, model: Drainable) -> None:
        self._path, self._model = path, model
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        self._listener.listen()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forgeline-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(ANSWER_TIMEOUT_S)
                    timeout_s = float(json.loads(connection.makefile("rb").readline())["drain_timeout_s"])
                    connection.sendall(b"%d\n" % self._model.drain(timeout_s))
                except (OSError, ValueError, KeyError, TypeError):
                    log.exception("a command to stop could not be understood")
                    continue
                while not self._model.is_drained() and not self._closing.wait(POLL_S):
                    pass


class Drain:
    """The supervisor's end: all backends of one server at once."""

    def __init__(self, paths: Iterable[Path], timeout_s: float) -> None:
        """Tells the models. A backend that has no socket is not ours, or has not loaded its model yet."""
        self._connections: list[socket.socket] = []
        for path in paths:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(ANSWER_TIMEOUT_S)
            try:
                connection.connect(str(path))
                connection.sendall(json.dumps({"drain_timeout_s": timeout_s}).encode() + b"\n")
            except OSError:
                connection.close()
                continue
            self._connections.append(connection)

    def num_in_flight(self) -> int:
        """Wait for the answers; a model that gives none is counted as 0."""
        return sum(_number(connection) for connection in self._connections)

    def wait(self, timeout_s: float, give_up: threading.Event) -> bool:
        """Whether every request has ended, or its backend with it."""
        deadline = time.monotonic() + timeout_s
        for connection in self._connections:
            connection.settimeout(POLL_S)
            while not _closed(connection):
                if give_up.is_set() or time.monotonic() > deadline:
                    return False
        return True

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


def _number(connection: socket.socket) -> int:
    digits = b""
    try:
        while (byte := connection.recv(1)) not in (b"", b"\n"):
            digits += byte
    except OSError:
        return 0
    return int(digits or b"0")
