"""The socket between supervisor and model, and what `runtime serve` says; the real server is in test_triton_stop.py."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.errors import InvalidRequest
from runtime.serving import serve as serve_module
from runtime.serving.control import ControlServer, Drain, control_path, own_control_path


class Model:
    def __init__(self, num_in_flight: int) -> None:
        self.num_in_flight = num_in_flight
        self.timeout_s: float | None = None

    def drain(self, timeout_s: float) -> int:
        self.timeout_s = timeout_s
        return self.num_in_flight

    def is_drained(self) -> bool:
        return self.num_in_flight == 0


@pytest.fixture
def models(tmp_path: Path) -> Iterator[dict[Path, Model]]:
    """Two models that listen, with 3 and 4 requests."""
    models = {tmp_path / "a": Model(3), tmp_path / "b": Model(4)}
    servers = [ControlServer(path, model) for path, model in models.items()]
    yield models
    for server in servers:
        server.close()
    assert list(tmp_path.iterdir()) == []


def test_all_models_are_told_and_waited_for(models: dict[Path, Model]) -> None:
    never = threading.Event()
    first, second = models.values()
    with closing(Drain(models, 2.5)) as drain:
        assert drain.num_in_flight() == 7
        assert (first.timeout_s, second.timeout_s) == (2.5, 2.5)
        assert not drain.wait(0.05, never)
        first.num_in_flight = 0
        assert not drain.wait(0.05, never)
        second.num_in_flight = 0
        assert drain.wait(20, never)


def test_waiting_can_be_cut_short(models: dict[Path, Model]) -> None:
    now = threading.Event()
    with closing(Drain(models, 2.5)) as drain:
        threading.Timer(0.05, now.set).start()
        assert not drain.wait(3600, now)


def test_a_backend_without_a_socket_and_one_that_dies_are_not_waited_for(models: dict[Path, Model], tmp_path: Path) -> None:
    with closing(Drain([tmp_path / "none"], 1)) as drain:
        assert drain.num_in_flight() == 0 and drain.wait(0, threading.Event())
    path = tmp_path / "dies"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with closing(Drain([path], 1)) as drain:
            connection, _ = listener.accept()
            connection.close()  # before any answer, as when the process is killed
            assert drain.num_in_flight() == 0 and drain.wait(20, threading.Event())
    path.unlink()


def test_only_this_user_may_connect_and_nonsense_changes_nothing(
    models: dict[Path, Model], caplog: pytest.LogCaptureFixture
) -> None:
    path, model = next(iter(models.items()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(b"hello\n")
        assert connection.recv(16) == b"" and model.timeout_s is None
    assert "could not be understood" in caplog.text
    with closing(Drain([path], 1.5)) as drain:
        assert drain.num_in_flight() == 3 and model.timeout_s == 1.5


def test_a_backend_finds_its_path_in_its_command_line() -> None:
    prefix = f"forgeline-{'0123456789abcdef' * 2}-"
    script = "from runtime.serving.control import own_control_path; print(own_control_path())"
    for argument, expected in ((f"{prefix}1f2e-region", True), ("triton_python_backend_shm_region_1", False)):
        command = [sys.executable, "-c", script, "model.py", argument]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            out, _ = process.communicate(timeout=60)
        assert out == (f"{control_path(prefix, process.pid)}\n" if expected else "None\n")
    assert control_path(prefix, 7) == Path(f"/dev/shm/{prefix}control-7")
    assert len(os.fsencode(control_path(prefix, 4194304))) < 108  # what a socket's path may take


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "stopping: no requests in flight"),
        (1, "stopping: 1 request in flight, at most 5 s; Ctrl-C again to end at once"),
        (12, "stopping: 12 requests in flight, at most 5 s; Ctrl-C again to end at once"),
    ],
)
def test_what_is_said_when_stopping(count: int, text: str) -> None:
    assert serve_module._stopping(count, 5.0) == text


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, float("nan")])
def test_a_drain_timeout_out_of_range(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"^--drain-timeout is {seconds:g} but must be in \[0, 3600\]$"):
        serve_module.serve_main(tmp_path, drain_timeout_s=seconds)


def test_no_path_without_a_supervisor() -> None:
    assert own_control_path() is None
