"""Triton over gRPC: one ModelStreamInfer stream per request in flight, kept open and used again. Needs tritonclient."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import numpy as np

from runtime.bench.clients import fill, request_values
from runtime.bench.driver import Finished
from runtime.bench.records import Record
from runtime.bench.workload import Work
from runtime.errors import ForgelineError, ServerError
from runtime.request import SamplingParams
from runtime.serving.tensors import INPUTS

_TYPES = {spec.name: "BYTES" if spec.data_type == "STRING" else spec.data_type for spec in INPUTS}
_NUMPY: dict[str, Any] = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}


class TritonGrpcClient:
    def __init__(self, address: str, model: str, params: SamplingParams) -> None:
        try:
            import tritonclient.grpc
        except ImportError as error:
            raise ServerError(
                f"gRPC needs tritonclient, which cannot be imported ({error}); pip install 'forgeline[bench]', or use http://"
            ) from error
        self._library: Any = tritonclient.grpc
        self._address, self._model, self._params = address, model, params
        self._free: deque[_Stream] = deque()
        self._all: list[_Stream] = []
        self._raw: dict[int, list[tuple[float, Any]]] = {}  # by record index
        probe = self._library.InferenceServerClient(address)
        try:
            if not probe.is_model_ready(model):
                raise ServerError(
                    f"the server at {address} has no model {model!r} that is ready; see its log, or give --model NAME"
                )
            metadata = probe.get_server_metadata()
            self.server = {"name": metadata.name, "version": metadata.version}
        except self._library.InferenceServerException as error:
            raise ServerError(f"no Triton answers at {address} ({error.message()}); start one with `runtime serve`") from error
        finally:
            probe.close()

    def start(self, record: Record, work: Work, finished: Finished) -> None:
        try:
            inputs = [self._tensor(name, value) for name, value in request_values(work, self._params).items()]
            raw: list[tuple[float, Any]] = []
            self._raw[record.index] = raw
            self._stream().send(inputs, record, raw, finished)
        except (ForgelineError, self._library.InferenceServerException) as error:
            record.error = str(error)
            finished.put(record)

    def complete(self, record: Record) -> None:
        fill(record, [(moment, _values(result)) for moment, result in self._raw.pop(record.index, [])])

    def close(self) -> None:
        for stream in self._all:
            stream.close()

    def _stream(self) -> _Stream:
        while self._free:
            stream = self._free.popleft()
            if not stream.broken:
                return stream
        stream = _Stream(self._library.InferenceServerClient(self._address), self._model, self._free)
        self._all.append(stream)
        return stream

    def _tensor(self, name: str, value: Any) -> Any:
        kind = _TYPES[name]
        data = value.encode("utf-8") if isinstance(value, str) else value
        tensor = self._library.InferInput(name, [1, 1], kind)
        return tensor.set_data_from_numpy(np.array([[data]], dtype=_NUMPY[kind]))


class _Stream:
    """One connection; carries one request at a time."""

    def __init__(self, client: Any, model: str, free: deque[_Stream]) -> None:
        self.broken = False
        self._client, self._model, self._free = client, model, free
        self._record: Record | None = None
        client.start_stream(callback=self._receive)

    def send(self, inputs: list[Any], record: Record, raw: list[tuple[float, Any]], finished: Finished) -> None:
        self._record, self._raw, self._finished = record, raw, finished
        self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)

    def _receive(self, result: Any, error: Any) -> None:
        moment = time.perf_counter()
        record = self._record
        if record is None:
            return
        if error is not None:
            record.error = str(error)
            self.broken = True
        else:
            self._raw.append((moment, result))
            if not result.get_response().parameters["triton_final_response"].bool_param:
                return
        self._record = None
        self._free.append(self)
        self._finished.put(record)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a connection that broke cannot be closed in order
            self._client.stop_stream(cancel_requests=self._record is not None)
        self._client.close()


def _values(result: Any) -> dict[str, Any]:
    values = {}
    for output in result.get_response().outputs:
        value = result.as_numpy(output.name).reshape(-1)[0]
        values[output.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return values
