"""`runtime serve`: a supervised tritonserver in the foreground, and what its user reads and types.

Says    "ready: …" whenever the server became ready, also after a restart; "stopping: …" with the number of requests in flight
Signals the first SIGINT or SIGTERM stops, the second ends at once. The handlers only count; all else happens in `_run`
Returns 0 after a stop, 128 + the signal's number when a second signal cut it short
Raises  ServerError when the server cannot start or supervision gives up, InvalidRequest for a drain timeout out of range
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from runtime.errors import InvalidRequest, ServerError
from runtime.serving.server import DRAIN_TIMEOUT_S, POLL_S, TritonServer


class _Signals:
    """Counts SIGINT and SIGTERM between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.first = threading.Event()

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.received.append(number)
        self.first.set()


def serve_main(
    repository: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    log_file: str | os.PathLike[str] | None = None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    options: Sequence[str] = (),
) -> int:
    if not 0 <= drain_timeout_s <= 3600:
        raise InvalidRequest(f"--drain-timeout is {drain_timeout_s:g} but must be in [0, 3600]")
    server = TritonServer(
        repository, host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port,
        log_file=log_file, inherit_output=log_file is None, drain_timeout_s=drain_timeout_s, options=options,
    )  # fmt: skip
    starter = threading.Thread(target=_start_quietly, args=(server,), daemon=True)
    with _Signals() as signals:
        try:
            starter.start()
            _serve(server, signals)
            if server.error is None:
                _stop(server, signals)
        finally:
            server.stop()
            starter.join()
            server.stop()  # the signal may have come before there was anything to stop
    if server.error is not None and not signals.received:
        raise server.error
    return 128 + signals.received[1] if len(signals.received) > 1 else 0


def _serve(server: TritonServer, signals: _Signals) -> None:
    said = 0
    while not signals.first.wait(POLL_S) and server.error is None:
        if server.num_ready > said:
            said = server.num_ready
            print(
                f"ready: HTTP {server.http_url}, gRPC {server.grpc_url}, metrics {server.metrics_url}; Ctrl-C stops", flush=True
            )


def _stop(server: TritonServer, signals: _Signals) -> None:
    server.request_stop()
    said = False
    ended = False
    while not ended and len(signals.received) < 2:
        ended = server.wait(0.02)
        if not said and (ended or server.num_in_flight is not None):
            said = True
            print(_stopping(server.num_in_flight or 0, server.drain_timeout_s), flush=True)
    if not ended:
        print("ending at once: requests in flight are cut off", flush=True)
        server.request_stop(at_once=True)


def _stopping(num_in_flight: int, drain_timeout_s: float) -> str:
    if num_in_flight == 0:
        return "stopping: no requests in flight"
    requests = "1 request" if num_in_flight == 1 else f"{num_in_flight} requests"
    return f"stopping: {requests} in flight, at most {drain_timeout_s:g} s; Ctrl-C again to end at once"


def _start_quietly(server: TritonServer) -> None:
    try:
        server.start()
    except ServerError as error:
        server.error = error
    except Exception as error:  # else the main thread would wait for a server that never came
        server.error = ServerError(f"tritonserver could not be started ({type(error).__name__}: {error})")
