"""Triton over HTTP: POST generate_stream, server-sent events; one thread and one connection per request in flight."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from runtime.bench.clients import fill, request_values
from runtime.bench.driver import Finished
from runtime.bench.records import Record
from runtime.bench.workload import Work
from runtime.errors import ForgelineError, ServerError
from runtime.request import SamplingParams

MAX_IN_FLIGHT = 1024
TIMEOUT_S = 600.0  # without a byte


class TritonHttpClient:
    def __init__(self, address: str, model: str, params: SamplingParams) -> None:
        self._address, self._model, self._params = address, model, params
        self._threads = ThreadPoolExecutor(MAX_IN_FLIGHT, thread_name_prefix="bench-http")
        self._raw: dict[int, list[tuple[float, bytes]]] = {}  # by record index
        self.server = self._probe()

    def start(self, record: Record, work: Work, finished: Finished) -> None:
        raw: list[tuple[float, bytes]] = []
        self._raw[record.index] = raw
        try:
            body = json.dumps(request_values(work, self._params)).encode("utf-8")
        except ForgelineError as error:
            record.error = str(error)
            finished.put(record)
            return
        self._threads.submit(self._run, body, record, raw, finished)

    def complete(self, record: Record) -> None:
        chunks = [(moment, json.loads(line)) for moment, line in self._raw.pop(record.index, [])]
        if chunks and "error" in chunks[-1][1]:
            record.error = str(chunks.pop()[1]["error"])
        fill(record, chunks)

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, body: bytes, record: Record, raw: list[tuple[float, bytes]], finished: Finished) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", f"/v2/models/{self._model}/generate_stream", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                record.error = f"HTTP {response.status}: {response.read().decode('utf-8', 'replace').strip()}"
                return
            while line := response.readline():
                if line.startswith(b"data:"):
                    raw.append((time.perf_counter(), line[5:]))
        except (OSError, http.client.HTTPException) as error:
            record.error = f"the connection to {self._address} failed ({type(error).__name__}: {error})"
        finally:
            connection.close()
            finished.put(record)

    def _probe(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=10.0)
        try:
            connection.request("GET", f"/v2/models/{self._model}/ready")
            ready = connection.getresponse()
            ready.read()
            if ready.status != 200:
                raise ServerError(
                    f"the server at {self._address} has no model {self._model!r} that is ready; see its log, or give --model NAME"
                )
            connection.request("GET", "/v2")
            metadata = json.loads(connection.getresponse().read())
            return {"name": metadata["name"], "version": metadata["version"]}
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise ServerError(f"no Triton answers at {self._address} ({error}); start one with `runtime serve`") from error
        finally:
            connection.close()
