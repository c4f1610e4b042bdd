"""`runtime serve` told to stop, before a real tritonserver and the tiny Llama: every request gets its end, nothing stays."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton_client import Stream, post, wait_until

from builder.deploy import deploy
from runtime.serving.orphan import NAME

pytestmark = pytest.mark.triton

TINY_LLAMA = Path(__file__).parent.parent / "models" / "tiny-llama"
LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
SHUTTING_DOWN = "the server is shutting down; send the request to another server"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine, directory = tmp_path_factory.mktemp("engines") / "tiny", tmp_path_factory.mktemp("repository")
    command = [
        sys.executable, "-m", "builder.cli", "build", str(TINY_LLAMA), "--target", "cpu", "--precision", "fp32",
        "--kv-cache-dtype", "f32", "--max-model-len", "2048", "--max-num-seqs", "8", "--output", str(engine),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    deploy(engine, directory, "llm", options={"num_threads": "1"})
    return directory


@pytest.fixture
def always_in_a_call(repository: Path, tmp_path: Path) -> Path:
    """The same model, most of the time in a call that waits for the server with the interpreter's lock held."""
    config = (repository / "llm" / "config.pbtxt").read_text(encoding="utf-8")
    engine = re.search(r'"engine_dir" value \{ string_value: "([^"]+)"', config)
    assert engine is not None
    deploy(engine[1], tmp_path / "always", "llm", options={"num_threads": "1", "stats_check_period_ms": "1"})
    return tmp_path / "always"


class Serving:
    """`runtime serve` in a process group and a temporary directory of its own."""

    def __init__(self, repository: Path, directory: Path, drain_timeout_s: float) -> None:
        self.log = directory / "log"
        self.temporary = directory / "temporary"  # what the server's processes have in their command lines
        self.temporary.mkdir()
        command = [
            sys.executable, "-m", "runtime.cli", "serve", "--repository", str(repository), "--log-file", str(self.log),
            "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--drain-timeout", str(drain_timeout_s),
        ]  # fmt: skip
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self.read_lines, daemon=True)
        self.reader.start()
        self.wait_until_ready()
        (self.shm_prefix,) = {
            found[1] for line in self.processes().values() if (found := re.search(r"name=(forgeline-\w+-)", line))
        }

    def wait_until_ready(self) -> None:
        found = re.fullmatch(r"ready: HTTP (\S+), gRPC (\S+), metrics (\S+); Ctrl-C stops\n", self.line())
        assert found is not None
        self.urls: Any = SimpleNamespace(http_url=found[1], grpc_url=found[2])

    def read_lines(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)

    def line(self) -> str:
        return self.lines.get(timeout=60)

    def processes(self) -> dict[int, str]:
        """The server and its backends → their command lines."""
        found = {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and str(self.temporary) in (line := Path("/proc", entry, "cmdline").read_text()):
                    found[int(entry)] = line
        return found

    def watchers(self) -> list[int]:
        """Shells that would end an orphaned backend of this server."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                line = Path("/proc", entry, "cmdline").read_text().split("\0") if entry.isdigit() else []
                if NAME in line and f"/dev/shm/{self.shm_prefix}" in line:
                    found.append(int(entry))
        return found

    def shared_memory(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(self.shm_prefix)]

    def check_that_nothing_is_left(self) -> None:
        assert self.processes() == {} and self.watchers() == [] and self.shared_memory() == []
        assert list(self.temporary.iterdir()) == []

    def check_that_triton_ended_well(self) -> None:
        log = self.log.read_text()
        assert "Signal (15) received" in log and "successfully unloaded 'llm'" in log
        assert "Signal (11)" not in log and "failed to stop server" not in log


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Serving] = []

    def start(drain_timeout_s: float, place: Path = repository) -> Serving:
        started.append(Serving(place, tmp_path, drain_timeout_s))
        return started[-1]

    yield start
    for serving in started:
        while serving.process.poll() is None:  # the test failed: a second signal ends at once, and tidily
            serving.process.terminate()
            time.sleep(0.1)
        serving.reader.join()


def over_grpc(serving: Serving, begun: threading.Semaphore) -> str:
    with Stream(serving.urls, "Once upon a time", **LONG) as running:
        assert running.next() is not None
        begun.release()
        for _ in running:
            pass
    return running.answer.error or running.answer.finish_reason


def over_http(serving: Serving, begun: threading.Semaphore) -> str:
    """What the last event says; "truncated" when there is none that ends the stream."""
    connection = http.client.HTTPConnection(serving.urls.http_url, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/llm/generate_stream", json.dumps({"text_input": "The king", **LONG}))
        response = connection.getresponse()
        event: dict[str, Any] = {}
        with contextlib.suppress(http.client.HTTPException, OSError):
            while line := response.readline():
                if line.startswith(b"data:"):
                    if not event:
                        begun.release()
                    event = json.loads(line[5:])
    return event.get("error") or event.get("finish_reason", "truncated")


@contextlib.contextmanager
def eight_streams(serving: Serving) -> Iterator[list[Any]]:
    """Four over gRPC and four over HTTP, each of which has had a token → the futures of how they end."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(max_workers=8) as pool:
        ends = [pool.submit(ask, serving, begun) for ask in (over_grpc, over_http) * 4]
        for _ in ends:
            assert begun.acquire(timeout=60)
        yield ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_stream_gets_its_end_when_the_server_stops(serve: Any, number: int) -> None:
    serving = serve(0.3)
    with eight_streams(serving) as ends:
        serving.process.send_signal(number)
        assert serving.line() == "stopping: 8 requests in flight, at most 0.3 s; Ctrl-C again to end at once\n"
        assert [end.result(timeout=60) for end in ends] == [SHUTTING_DOWN] * 8
        assert serving.process.wait(60) == 0
    serving.check_that_triton_ended_well()
    serving.check_that_nothing_is_left()


def test_a_request_that_can_finish_does_and_new_ones_are_refused(serve: Any) -> None:
    serving = serve(120)
    flags = {**LONG, "max_tokens": 800, "return_num_output_tokens": True}
    with Stream(serving.urls, "Once upon a time", **flags) as running:
        assert running.next() is not None
        serving.process.send_signal(signal.SIGTERM)
        assert serving.line() == "stopping: 1 request in flight, at most 120 s; Ctrl-C again to end at once\n"
        status, body = post(serving.urls, "llm/generate", {"text_input": "a", "max_tokens": 1})
        assert status != 200 and json.loads(body) == {"error": SHUTTING_DOWN}  # Triton's generate has one status for all
        for _ in running:
            pass
    assert running.answer.finish_reason == "length" and running.answer.num_tokens == 800 and running.answer.is_final
    assert serving.process.wait(60) == 0
    serving.check_that_triton_ended_well()
    serving.check_that_nothing_is_left()


def test_clients_that_keep_asking_do_not_crash_a_server_that_stops(serve: Any) -> None:
    serving = serve(5)
    asked, over = threading.Semaphore(0), threading.Event()

    def keep_asking(_: int) -> set[str]:
        answers = set()
        while not over.is_set():
            try:
                status, body = post(serving.urls, "llm/generate", {"text_input": "a", "max_tokens": 2})
            except (OSError, http.client.HTTPException):
                break  # the server has closed its port
            asked.release()
            answers.add("complete" if status == 200 else json.loads(body)["error"])
        return answers

    with ThreadPoolExecutor(max_workers=4) as pool:
        try:
            answers = pool.map(keep_asking, range(4))
            for _ in range(12):
                assert asked.acquire(timeout=60)
            serving.process.send_signal(signal.SIGTERM)
            assert serving.process.wait(60) == 0
        finally:
            over.set()
        found = set().union(*answers)
    assert {"complete", SHUTTING_DOWN} <= found, found
    serving.check_that_triton_ended_well()
    serving.check_that_nothing_is_left()


def test_the_second_ctrl_c_ends_at_once(serve: Any) -> None:
    serving = serve(3000)
    with eight_streams(serving) as ends:
        serving.process.send_signal(signal.SIGINT)
        assert serving.line() == "stopping: 8 requests in flight, at most 3000 s; Ctrl-C again to end at once\n"
        assert serving.process.poll() is None
        serving.process.send_signal(signal.SIGINT)
        assert serving.line() == "ending at once: requests in flight are cut off\n"
        assert serving.process.wait(60) == 128 + signal.SIGINT
        assert {end.result(timeout=60) for end in ends} & {"length", SHUTTING_DOWN} == set()
    assert "Signal (15) received" not in serving.log.read_text()
    serving.check_that_nothing_is_left()


def test_no_backend_stays_when_its_server_and_the_supervisor_are_killed(serve: Any, always_in_a_call: Path) -> None:
    serving = serve(3000, always_in_a_call)
    (server,) = [pid for pid, line in serving.processes().items() if "model.py" not in line]
    with eight_streams(serving) as ends:
        assert len(serving.watchers()) == 1
        serving.process.kill()
        os.kill(server, signal.SIGKILL)
        assert {end.result(timeout=60) for end in ends} & {"length", SHUTTING_DOWN} == set()
    wait_until(lambda: serving.processes() == {} and serving.watchers() == [] and serving.shared_memory() == [], timeout=60)


def test_ready_is_said_again_after_a_restart_and_an_idle_stop_is_clean(serve: Any) -> None:
    serving = serve(5)
    before = serving.urls
    (backend,) = [pid for pid, line in serving.processes().items() if "model.py" in line]
    os.kill(backend, signal.SIGKILL)
    serving.wait_until_ready()
    assert serving.urls == before and backend not in serving.processes()
    wait_until(lambda: len(serving.processes()) == 2)
    serving.process.send_signal(signal.SIGINT)
    assert serving.line() == "stopping: no requests in flight\n"
    assert serving.process.wait(60) == 0
    serving.check_that_triton_ended_well()
    serving.check_that_nothing_is_left()
