"""Supervision with a stand-in for tritonserver; the real one is in test_triton_live.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runtime.serving.installation as installation_module
import runtime.serving.server as server_module
from runtime.errors import ServerError
from runtime.serving.installation import STUB, ServerInstallation, find_server
from runtime.serving.server import TritonServer

# Serves health and one model, with a child that looks like a Python backend; MODE decides what goes wrong.
FAKE = r"""#!{python}
import http.server, os, signal, subprocess, sys
options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
mode = open("{mode}").read()
region = "/dev/shm/" + options["backend-config"].partition("shm-region-prefix-name=")[2] + str(os.getpid())
open(region, "w").close()
print("E starting in mode " + mode, flush=True)
if mode == "broken":
    print("I noise that does not matter\nerror: creating server: the model is broken", flush=True)
    sys.exit(3)
if mode == "refused":
    words = "Internal: TritonModelException: it"
    print("E \"failed to load 'llm' version 1: " + words + r" has no plan; build it\n\nAt:\n  model.py(7)", flush=True)
    print("E \"failed to load 'b' version 2: " + words + ' is old"\nerror: creating server', flush=True)
    sys.exit(1)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (stub.kill(), os.remove(region), os._exit(0)))
stub = subprocess.Popen(["/somewhere/{stub}", "{model}"], executable=sys.executable)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        unloaded = self.path == "/v2/models/llm/ready" and open("{mode}").read() == "unloaded"
        self.send_response(400 if unloaded else 200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["http-port"])), Handler).serve_forever()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "repository" / "llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('name: "llm"\n')
    (version / "model.py").write_text("import time\ntime.sleep(60)\n")
    return tmp_path / "repository"


@pytest.fixture
def make_server(tmp_path: Path, repository: Path) -> Callable[..., TritonServer]:
    mode, binary = tmp_path / "mode", tmp_path / "tritonserver"
    binary.write_text(FAKE.format(python=sys.executable, mode=mode, stub=STUB, model=repository / "llm/1/model.py"))
    binary.chmod(0o755)

    def make(kind: str = "good", **keywords: Any) -> TritonServer:
        mode.write_text(kind)
        installation = ServerInstallation(binary)
        return TritonServer(repository, installation=installation, log_file=tmp_path / "log", stop_timeout_s=1, **keywords)

    return make


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not server_module._alive(pid)


def test_ready_when_started_and_nothing_left_when_stopped(make_server: Any) -> None:
    with make_server() as server:
        assert server.is_ready() and server.http_url == f"127.0.0.1:{server.http_port}"
        assert len({server.http_port, server.grpc_port, server.metrics_port} - {0}) == 3
        (backend,) = server.backend_pids()
        assert server.backend_pids() == {backend: "llm"}
        pid, directory = server.process.pid, server._directory
        assert directory.is_dir()
    assert is_gone(pid) and is_gone(backend) and not directory.exists()
    assert not server.is_ready()
    server.stop()


def test_a_server_that_ends_before_it_is_ready(make_server: Any) -> None:
    server = make_server("broken")
    with pytest.raises(ServerError) as caught:
        server.start()
    assert str(caught.value) == (
        "tritonserver ended with status 3 before it was ready; the end of its log:\n"
        "  E starting in mode broken\n  error: creating server: the model is broken"
    )
    assert server.wait(0) and server.num_restarts == 0


def test_models_that_do_not_load_say_why_in_their_own_words(make_server: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("failed to load 'old' version 1: Internal: TritonModelException: of an earlier start\\n\n")
    with pytest.raises(ServerError) as caught:
        make_server("refused").start()
    assert str(caught.value) == (
        "tritonserver ended with status 1 before it was ready: "
        "model 'llm' does not load: it has no plan; build it; model 'b' does not load: it is old"
    )


def test_a_dead_backend_restarts_the_server_on_the_same_ports(make_server: Any) -> None:
    with make_server() as server:
        port, pid = server.http_port, server.process.pid
        (backend,) = server.backend_pids()
        os.kill(backend, signal.SIGKILL)
        wait_until(lambda: server.num_restarts == 1)
        assert server.wait_until_ready(20)
        assert server.http_port == port and server.process.pid != pid and is_gone(pid)
        assert len(server.backend_pids()) == 1 and backend not in server.backend_pids()


def test_shared_memory_of_killed_backends_is_removed(make_server: Any) -> None:
    with make_server() as server:

        def regions() -> list[str]:
            return [name for name in os.listdir("/dev/shm") if name.startswith(server._shm_prefix)]

        assert regions() == [f"{server._shm_prefix}{server.process.pid}"]
        server.process.kill()
        wait_until(lambda: server.num_restarts == 1)
        assert server.wait_until_ready(20)
        assert regions() == [f"{server._shm_prefix}{server.process.pid}"]
    assert regions() == []


def test_a_backend_that_ends_because_its_model_was_unloaded_is_no_death(make_server: Any, tmp_path: Path) -> None:
    with make_server() as server:
        (tmp_path / "mode").write_text("unloaded")
        (backend,) = server.backend_pids()
        os.kill(backend, signal.SIGKILL)
        time.sleep(0.5)
        assert server.num_restarts == 0 and server.is_ready()


def test_a_dead_server_is_restarted_until_it_happens_too_often(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_RESTARTS", 2)
    with make_server() as server:
        for count in (1, 2):
            server.process.kill()
            wait_until(lambda count=count: server.num_restarts == count)
            assert server.wait_until_ready(20)
        assert server.error is None
        server.process.kill()
        assert server.wait(20)
        assert str(server.error).startswith("tritonserver ended with status -9")
        assert str(server.error).endswith("; that was failure 3 within 60 s, giving up")
        assert not server.is_ready()


def test_a_restart_that_fails_is_tried_again(make_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_RESTARTS", 3)
    with make_server() as server:
        (tmp_path / "mode").write_text("broken")
        server.process.kill()
        wait_until(lambda: server.num_restarts == 2)
        (tmp_path / "mode").write_text("good")
        assert server.wait_until_ready(20) and server.error is None
        (tmp_path / "mode").write_text("broken")
        server.process.kill()
        assert server.wait(20)
    assert str(server.error).startswith("tritonserver ended with status 3 before it was ready; the end of its log:")
    assert str(server.error).endswith("that was failure 4 within 60 s, giving up")


def test_a_server_that_ignores_sigterm_is_killed(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.1)
    with make_server("stubborn") as server:
        pid, (backend,) = server.process.pid, server.backend_pids()
    assert is_gone(pid) and is_gone(backend)


def test_the_server_ends_with_the_process_that_started_it(make_server: Any, tmp_path: Path) -> None:
    server = make_server()
    script = f"""
import os, signal
from runtime.serving.installation import ServerInstallation
from runtime.serving.server import TritonServer
server = TritonServer({str(server.repository)!r}, installation=ServerInstallation({str(server.installation.binary)!r}))
server.start()
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, env=environment)
    assert result.returncode == -signal.SIGKILL
    wait_until(lambda: is_gone(int(result.stdout)))


@pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named(make_server: Any, service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(**{f"{service}_port": port})
        with pytest.raises(ServerError) as caught:
            server.start()
    assert str(caught.value) == (
        f"{service} port {port} on 127.0.0.1 cannot be used (Address already in use); "
        f"stop the program that holds it, or choose another with --{service}-port (0: any free one)"
    )
    assert server.process is None


def test_one_port_for_two_services(make_server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=f"^grpc port {port} on 127.0.0.1 cannot be used"):
        make_server(http_port=port, grpc_port=port).start()


def test_a_repository_without_models(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            ServerError, match=r"holds no model; deploy one with `builder deploy ENGINE --repository .+ --name NAME`"
        ):
            TritonServer(path).start()


def wheel(root: Path, version: str) -> Path:
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so", f"python_backend_stubs/{version}/{STUB}"):
        path = root / "tritonserver" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    return root / "__init__.py"


def find_with(monkeypatch: pytest.MonkeyPatch, *, origin: Path | None, path: str = "") -> ServerInstallation:
    spec = None if origin is None else type("Spec", (), {"origin": str(origin)})
    monkeypatch.setattr(installation_module.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", path)
    return find_server()


def test_the_wheel_is_laid_out_as_triton_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = find_with(monkeypatch, origin=wheel(tmp_path / "wheel", version))
    run = tmp_path / "run"
    assert found.prepare(run) == [
        f"--backend-directory={run}/backends",
        f"--cache-directory={tmp_path}/wheel/tritonserver/caches",
    ]
    files = {path.name: path.read_text() for path in (run / "backends" / "python").iterdir()}
    assert files == {"libtriton_python.so": "backends/python/libtriton_python.so", STUB: f"python_backend_stubs/{version}/{STUB}"}
    environment = found.environment()
    assert environment["PATH"].split(":")[0] == os.path.dirname(sys.executable)
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == installation_module.sysconfig.get_config_var("LIBDIR")


def test_a_wheel_without_a_stub_for_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match=r"no Python-backend stub for Python 3\.\d+ \(it has 2\.7\); use one of those"):
        find_with(monkeypatch, origin=wheel(tmp_path, "2.7"))


def test_a_server_on_the_path_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    found = find_with(monkeypatch, origin=None, path=str(tmp_path))
    assert found == ServerInstallation(binary) and found.prepare(tmp_path) == []


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match=r"install it with `pip install 'forgeline\[triton\]'`, or run inside the image"):
        find_with(monkeypatch, origin=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"http_port": 99999}, "http port 99999 does not exist; ports are 0 (any free one) to 65535"),
        ({"log_file": Path("/proc/nope/x.log")}, "tritonserver could not be started"),
    ],
)
def test_a_server_that_cannot_even_be_launched_is_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").write_text("")
    server = TritonServer(tmp_path, installation=ServerInstallation(Path("/bin/true")), **options)
    with pytest.raises(ServerError) as caught:
        server.start()
    assert message in str(caught.value)
