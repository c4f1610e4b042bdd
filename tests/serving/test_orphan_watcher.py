"""The shell that ends a backend whose server has gone; server and backend are `sleep`s here."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import Make
from triton_client import wait_until

from runtime.serving import orphan
from runtime.serving.orphan import NAME, OrphanWatcher

PREFIX = f"forgeline-{'0' * 32}-"
COLLECTS, LEAVES = "wait; exec sleep 300", "exec sleep 300"  # what a server does with a child that ends
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class Processes:
    def __init__(self, then: str = COLLECTS) -> None:
        self.server = subprocess.Popen(["/bin/sh", "-c", f"sleep 300 & echo $!; {then}"], stdout=subprocess.PIPE)
        assert self.server.stdout is not None
        self.backend = int(self.server.stdout.readline())
        self.watcher: OrphanWatcher | None = None

    def watch(self, prefix: str | None = PREFIX) -> subprocess.Popen[bytes]:
        self.watcher = OrphanWatcher(self.backend, self.server.pid, prefix)
        assert self.watcher._process is not None
        return self.watcher._process

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
        if runs(self.backend):
            os.kill(self.backend, signal.SIGKILL)
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Processes]]:
    started: list[Processes] = []

    def make(*arguments: str) -> Processes:
        started.append(Processes(*arguments))
        return started[-1]

    yield make
    for processes in started:
        processes.close()


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(orphan, "SHARED_MEMORY", tmp_path)
    monkeypatch.chdir(tmp_path)  # a pattern without a directory would find the files too
    for name in (f"{PREFIX}1", f"{PREFIX}control-2", f"forgeline-{'1' * 32}-3"):
        (tmp_path / name).touch()
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ignored_signals(pid: int) -> set[int]:
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return {number for number in range(1, 32) if int(mask, 16) >> (number - 1) & 1}


def test_it_ends_a_backend_whose_server_was_killed_and_removes_its_shared_memory(start: Any, shared_memory: Path) -> None:
    processes = start()
    watcher = processes.watch()
    wait_until(lambda: set(IGNORED) <= ignored_signals(watcher.pid))
    for number in IGNORED:  # a terminal's, meant for the supervisor
        watcher.send_signal(number)
    processes.server.kill()
    assert watcher.wait(20) == 0
    wait_until(lambda: not runs(processes.backend))
    assert names(shared_memory) == [f"forgeline-{'1' * 32}-3"]


def test_without_a_supervisor_nothing_is_removed(start: Any, shared_memory: Path) -> None:
    processes = start()
    watcher = processes.watch(prefix=None)
    processes.server.kill()
    assert watcher.wait(20) == 0
    wait_until(lambda: not runs(processes.backend))
    assert len(names(shared_memory)) == 3


@pytest.mark.parametrize("then", [COLLECTS, LEAVES])
def test_it_ends_with_the_backend_and_leaves_the_server_its_memory(then: str, start: Any, shared_memory: Path) -> None:
    processes = start(then)
    watcher = processes.watch()
    wait_until(lambda: set(IGNORED) <= ignored_signals(watcher.pid))
    os.kill(processes.backend, signal.SIGKILL)
    assert watcher.wait(20) == 0
    assert runs(processes.server.pid) and len(names(shared_memory)) == 3


def test_stopping_it_touches_nothing(start: Any, shared_memory: Path) -> None:
    processes = start()
    watcher = processes.watch()
    processes.watcher.stop()
    assert watcher.returncode == -signal.SIGKILL and not Path(f"/proc/{watcher.pid}").exists()
    assert runs(processes.backend) and runs(processes.server.pid) and len(names(shared_memory)) == 3


def test_a_model_has_one_until_it_is_finalized(make_model: Make) -> None:
    def watchers() -> list[list[str]]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_text().split("\0")
                if line[3:5] == [NAME, str(os.getpid())]:
                    found.append(line[3:-1])
        return found

    model = make_model()
    wait_until(lambda: watchers() == [[NAME, str(os.getpid()), str(os.getppid()), ""]])  # its command line is empty at first
    model.finalize()
    assert watchers() == []


def test_without_a_shell_it_is_said_and_the_model_goes_on(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes = start()

    def refuse(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/bin/sh")

    monkeypatch.setattr(orphan.subprocess, "Popen", refuse)
    with caplog.at_level(logging.WARNING, logger="forgeline.orphan"):
        OrphanWatcher(processes.backend, processes.server.pid, None).stop()
    assert caplog.messages == [
        f"no watcher ([Errno 2] No such file or directory: '/bin/sh'): should the server be killed, "
        f"this process ({processes.backend}) may have to be killed by hand"
    ]
