"""tritonserver as a child process: start, watch, restart, stop.

Watching   A Python backend that is killed leaves the server saying "ready" while its requests fail and its streams hang. So the
           backend processes are looked at every POLL_S: when one is gone although its model claims to be ready, the whole
           server is killed (every stream in flight ends with an error, health checks fail) and started again on the same ports.
           A server that ends by itself is started again as well. More than MAX_RESTARTS in RESTART_WINDOW_S: give up.
Stopping   the models drain (control.py): they refuse new requests and end those they have, within drain_timeout_s. Only then
           SIGTERM, for Triton crashes when it unloads a model whose streams are open. A bounded wait, then SIGKILL for the
           process group; the backends' shared memory is removed. `stop(at_once=True)`: SIGKILL without any of that. The kernel
           sends SIGTERM if this process dies first (PR_SET_PDEATHSIG counts from the thread that started the child, so one
           thread starts, watches and stops it).
Raises     ServerError
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import ServerError
from runtime.serving.control import Drain, control_path, remove_shared_memory
from runtime.serving.installation import STUB, ServerInstallation, find_server

__all__ = ["DRAIN_TIMEOUT_S", "ServerInstallation", "TritonServer", "find_server"]

log = logging.getLogger("forgeline.server")

POLL_S = 0.1
SCAN_S = 1.0  # looking for backends of models loaded later reads all of /proc
DRAIN_TIMEOUT_S = 5.0  # requests in flight may finish in this time, then they are cancelled
CANCEL_GRACE_S = 2.0  # for a cancelled request to end
STOP_GRACE_S = 5.0  # for unloading the models once the requests in flight are done or given up
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
LOG_TAIL_LINES = 12
# What a model says that refuses to load, between Triton's words and a traceback; the log has \n for a newline.
_REFUSAL = re.compile(r"failed to load '([^']+)' version \d+: \w+: TritonModelException: (.*?)(?:\\n|\"$)", re.MULTILINE)
# argv[1] is the pid this child belongs to: when it is already gone, nobody would ever stop us.
_LAUNCHER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class TritonServer:
    """Context manager around one supervised tritonserver. Port 0 means: choose a free one; the attributes say which."""

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        log_file: str | os.PathLike[str] | None = None,
        inherit_output: bool = False,
        options: Sequence[str] = (),
        ready_timeout_s: float = 300.0,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        stop_timeout_s: float = 10.0,
        installation: ServerInstallation | None = None,
    ) -> None:
        self.repository = Path(repository).resolve()
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self.log_file = Path(log_file) if log_file is not None else None
        self.inherit_output = inherit_output  # the server writes to our standard error instead of a file
        self.options = tuple(options)
        self.ready_timeout_s = ready_timeout_s
        self.drain_timeout_s = drain_timeout_s
        self.stop_timeout_s = stop_timeout_s  # Triton's own, for what is in flight after draining
        self.installation = installation
        self.num_restarts = 0
        self.num_ready = 0  # how often the server became ready
        self.num_in_flight: int | None = None  # requests when it began to stop
        self.error: ServerError | None = None  # set when supervision gave up
        self.process: subprocess.Popen[bytes] | None = None
        self._backends: dict[int, str] = {}  # Python-backend processes seen → the model of each
        self._directory: Path | None = None
        self._log_start = 0  # where the log of this start begins
        self._shm_prefix = f"forgeline-{uuid.uuid4().hex}-"  # a backend that is killed leaves its shared memory behind
        self._stop = threading.Event()
        self._at_once = threading.Event()
        self._settled = threading.Event()  # ready for the first time, or failed
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Return once every model is ready.  Raises  ServerError: no server, no model, port in use, a model fails to load."""
        assert self._thread is None, "a TritonServer starts once"
        if not self.repository.is_dir() or not any(self.repository.glob("*/config.pbtxt")):
            raise ServerError(
                f"{self.repository} holds no model; "
                f"deploy one with `builder deploy ENGINE --repository {self.repository} --name NAME`"
            )
        installation = self.installation or find_server()
        self._choose_ports()
        self._directory = Path(tempfile.mkdtemp(prefix="forgeline-triton-"))
        if self.log_file is None and not self.inherit_output:
            self.log_file = self._directory / "tritonserver.log"
        command = self._command(installation, installation.prepare(self._directory))
        self._thread = threading.Thread(
            target=self._supervise, args=(command, installation.environment()), name="forgeline-triton", daemon=True
        )
        self._thread.start()
        self._settled.wait()
        if self.error is not None:
            self.stop()
            raise self.error

    def request_stop(self, *, at_once: bool = False) -> None:
        """Begin to stop, and return; `at_once` also cuts short a stop that has begun. `stop` must follow."""
        if at_once:
            self._at_once.set()
        self._stop.set()

    def stop(self, *, at_once: bool = False) -> None:
        """No process is left when this returns. Idempotent."""
        self.request_stop(at_once=at_once)
        if self._thread is not None:
            self._thread.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return f"{self._client_host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self._client_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"{self._client_host}:{self.metrics_port}"

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host

    def is_ready(self) -> bool:
        return self._get("/v2/health/ready") == 200

    def wait_until_ready(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (ready := self.is_ready()) and time.monotonic() < deadline and not self._ended.is_set():
            time.sleep(POLL_S)
        return ready

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the server has ended for good (`error` says why, unless `stop` ended it)."""
        return self._ended.wait(timeout_s)

    def backend_pids(self) -> dict[int, str]:
        """Python-backend processes alive now → the model each serves."""
        assert self.process is not None
        return {pid: model for pid, model in _stubs(self.process.pid).items() if _alive(pid)}

    # ------------------------------------------------------------------------------------------- supervisor thread

    def _supervise(self, command: list[str], environment: dict[str, str]) -> None:
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        try:
            self._launch(command, environment)
            self._await_ready()
            self._settled.set()
            reason = self._watch()
            while reason is not None:
                now = time.monotonic()
                if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW_S:
                    raise ServerError(f"{reason}; that was failure {MAX_RESTARTS + 1} within {RESTART_WINDOW_S:.0f} s, giving up")
                restarts.append(now)
                log.error("%s; restarting tritonserver", reason)
                self._kill()
                self.num_restarts += 1
                self._launch(command, environment)
                reason = self._failed_again() or self._watch()
        except ServerError as error:
            self.error = error
        except OSError as error:
            self.error = ServerError(
                f"tritonserver could not be started ({error}); check --log-file and the server's installation"
            )
        finally:
            self._terminate()
            self._ended.set()
            self._settled.set()

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        launcher = [sys.executable, "-S", "-E", "-c", _LAUNCHER, str(os.getpid()), *command]
        with contextlib.ExitStack() as stack:
            output = None
            if self.log_file is not None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(self.log_file, "ab"))
                self._log_start = output.tell()
            self.process = subprocess.Popen(
                launcher, env=environment, stdin=subprocess.DEVNULL, stdout=output or sys.stderr.fileno(),
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _await_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.ready_timeout_s
        while not self._stop.wait(0.05):
            if self.process.poll() is not None:
                raise ServerError(f"tritonserver ended with status {self.process.returncode} before it was ready{self._tail()}")
            if self.is_ready():
                self._backends = _stubs(self.process.pid)
                self.num_ready += 1
                return
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver was not ready after {self.ready_timeout_s:.0f} s{self._tail()}")

    def _failed_again(self) -> str | None:
        try:
            self._await_ready()
        except ServerError as error:
            return str(error)
        return None

    def _watch(self) -> str | None:
        """Why the server must be restarted; None when `stop` was called."""
        assert self.process is not None
        known = self._backends
        next_scan = time.monotonic() + SCAN_S
        while not self._stop.wait(POLL_S):
            if self.process.poll() is not None:
                return f"tritonserver ended with status {self.process.returncode}"
            if time.monotonic() > next_scan:
                known.update(_stubs(self.process.pid))
                next_scan = time.monotonic() + SCAN_S
            for pid in [pid for pid in known if not _alive(pid)]:
                model = known.pop(pid)
                if model not in known.values() and self._get(f"/v2/models/{model}/ready") == 200:
                    return f"the backend of model {model!r} (process {pid}) died"  # an unloaded model is not ready
        return None

    def _terminate(self) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None and not self._at_once.is_set():
            self._drain(process.pid)
        if process.poll() is None and not self._at_once.is_set():
            process.terminate()
            deadline = time.monotonic() + self.stop_timeout_s + STOP_GRACE_S
            while process.poll() is None and time.monotonic() < deadline and not self._at_once.wait(0.02):
                pass
            if process.returncode:
                log.error("tritonserver ended with status %d when it was told to stop", process.returncode)
        self._kill()

    def _drain(self, server: int) -> None:
        paths = [control_path(self._shm_prefix, pid) for pid in _stubs(server)]
        with contextlib.closing(Drain(paths, self.drain_timeout_s)) as drain:
            self.num_in_flight = drain.num_in_flight()
            if not drain.wait(self.drain_timeout_s + CANCEL_GRACE_S, give_up=self._at_once) and not self._at_once.is_set():
                log.error("requests did not end within %.0f s", self.drain_timeout_s + CANCEL_GRACE_S)

    def _kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + STOP_GRACE_S
        while _group_members(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.002)
        remove_shared_memory(self._shm_prefix)

    # --------------------------------------------------------------------------------------------------- details

    def _command(self, installation: ServerInstallation, prepared: list[str]) -> list[str]:
        command = [
            str(installation.binary),
            f"--model-repository={self.repository}",
            *prepared,
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--exit-timeout-secs={max(1, int(self.stop_timeout_s))}",
        ]
        for service, port in (("http", self.http_port), ("grpc", self.grpc_port), ("metrics", self.metrics_port)):
            command += [f"--{service}-address={self.host}", f"--{service}-port={port}"]
        if not os.path.exists("/dev/nvidiactl"):
            command.append("--allow-gpu-metrics=false")
        return [*command, *self.options]

    def _choose_ports(self) -> None:
        """Check the ports that were asked for and fill in free ones; all are held until all are known."""
        with contextlib.ExitStack() as held:
            for service in ("http", "grpc", "metrics"):
                port = getattr(self, f"{service}_port")
                probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                    probe.listen()
                except OverflowError as error:
                    raise ServerError(f"{service} port {port} does not exist; ports are 0 (any free one) to 65535") from error
                except OSError as error:
                    raise ServerError(
                        f"{service} port {port} on {self.host} cannot be used ({error.strerror}); "
                        f"stop the program that holds it, or choose another with --{service}-port (0: any free one)"
                    ) from error
                setattr(self, f"{service}_port", probe.getsockname()[1])

    def _get(self, path: str) -> int | None:
        connection = http.client.HTTPConnection(self._client_host, self.http_port, timeout=2)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _tail(self) -> str:
        if self.log_file is None or not self.log_file.is_file():
            return "; see its output above"
        text = self.log_file.read_bytes()[self._log_start :].decode("utf-8", errors="replace")
        if refusals := _REFUSAL.findall(text):
            return ": " + "; ".join(f"model {model!r} does not load: {why}" for model, why in refusals)
        wanted = [line for line in text.splitlines() if not line.startswith(("I", "W", "+", "|")) and line.strip()]
        return "; the end of its log:\n  " + "\n  ".join(wanted[-LOG_TAIL_LINES:])


def _stubs(server: int) -> dict[int, str]:
    """Python-backend children of a server → the model of each, from the command line STUB REPOSITORY/MODEL/VERSION/model.py …"""
    children: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _stat(entry)[1:2] == [str(server)]:
            try:
                command = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.path.basename(command[0]).decode() == STUB:
                children[int(entry)] = Path(os.fsdecode(command[1])).parent.parent.name
    return children


def _stat(pid: str) -> list[str]:
    """[state, parent, group, …]; empty when there is no such process."""
    try:
        return Path("/proc", pid, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _group_members(group: int) -> list[str]:
    """Processes of a group that still run; the dead ones are their new parent's to collect."""
    found = []
    for entry in os.listdir("/proc"):
        stat = _stat(entry) if entry.isdigit() else []
        if stat[2:3] == [str(group)] and stat[0] not in "ZX":
            found.append(entry)
    return found


def _alive(pid: int) -> bool:
    state = _stat(str(pid))
    return bool(state) and state[0] not in "ZX"
