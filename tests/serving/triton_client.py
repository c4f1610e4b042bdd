"""Short ways to talk to a real Triton: HTTP generate, gRPC streams, metrics."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from runtime.serving.server import TritonServer
from runtime.serving.tensors import INPUTS

TYPES: dict[str, Any] = {
    "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64, "STRING": np.object_, "FP16": np.float16,
    "UINT8": np.uint8,
}  # fmt: skip
SPECS = {spec.name: spec for spec in INPUTS}


def post(server: TritonServer, path: str, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{path}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8")
    finally:
        connection.close()


def generate(server: TritonServer, text: str, model: str = "llm", **values: Any) -> dict[str, Any]:
    status, body = post(server, f"{model}/generate", {"text_input": text, **values})
    assert status == 200, body
    return json.loads(body)


def generate_stream(server: TritonServer, text: str, **values: Any) -> list[dict[str, Any]]:
    status, body = post(server, "llm/generate_stream", {"text_input": text, "stream": True, **values})
    assert status == 200, body
    return [json.loads(line.removeprefix("data:")) for line in body.splitlines() if line.startswith("data:")]


def tensors(**values: Any) -> list[grpcclient.InferInput]:
    """Inputs with a batch dimension, typed by the tensor table; arrays are sent as they are."""
    result = []
    for name, value in values.items():
        data_type = SPECS[name].data_type
        if not isinstance(value, np.ndarray):
            value = np.array(value, dtype=TYPES[data_type]).reshape(1, -1)
        tensor = grpcclient.InferInput(name, list(value.shape), "BYTES" if data_type == "STRING" else data_type)
        result.append(tensor.set_data_from_numpy(value))
    return result


@dataclass
class Answer:
    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    is_final: bool = False  # Triton's final flag was seen

    @property
    def text(self) -> str:
        return "".join(chunk["text_output"] for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk["num_output_tokens"] for chunk in self.chunks)

    @property
    def finish_reason(self) -> str:
        return self.chunks[-1]["finish_reason"]


def _chunk(result: grpcclient.InferResult) -> dict[str, Any]:
    chunk = {}
    for output in result.get_response().outputs:
        flat = result.as_numpy(output.name).reshape(-1).tolist()
        values = [value.decode("utf-8") if isinstance(value, bytes) else value for value in flat]
        chunk[output.name] = values if output.name == "output_log_probs" else values[0]
    return chunk


class Stream:
    """One gRPC ModelStreamInfer request. Iterate over its chunks; leave the block to close (or cancel) it."""

    def __init__(
        self, server: TritonServer, text: str | bytes | np.ndarray, *, model: str = "llm", request_id: str = "", **values: Any
    ) -> None:
        parameters = values.pop("parameters", None)
        data = text.encode("utf-8") if isinstance(text, str) else text
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))
        inputs = tensors(text_input=data, **values)
        self._client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True, parameters=parameters
        )  # fmt: skip
        self.answer = Answer()

    def next(self, timeout: float = 60.0) -> dict[str, Any] | None:
        """The next chunk; None at the end."""
        if self.answer.is_final or self.answer.error:
            return None
        result, error = self._results.get(timeout=timeout)
        if error is not None:
            self.answer.error = str(error)
            return None
        self.answer.is_final = result.get_response().parameters["triton_final_response"].bool_param
        chunk = _chunk(result)
        if chunk:
            self.answer.chunks.append(chunk)
        return chunk if chunk else self.next(timeout)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (chunk := self.next()) is not None:
            yield chunk

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream(cancel_requests=not (self.answer.is_final or self.answer.error))
        self._client.close()


def stream(server: TritonServer, text: str | bytes, **values: Any) -> Answer:
    """Run one gRPC stream to its end."""
    flags = {"stream": True, "return_num_output_tokens": True, **values}
    with Stream(server, text, **flags) as running:
        for _ in running:
            pass
    return running.answer


def infer(server: TritonServer, model: str = "plain", **values: Any) -> dict[str, Any]:
    """HTTP infer; a list of numbers or strings per tensor."""
    inputs = []
    for name, value in values.items():
        data = value if isinstance(value, list) else [value]
        kind = SPECS[name].data_type
        inputs.append({"name": name, "shape": [1, len(data)], "datatype": "BYTES" if kind == "STRING" else kind, "data": data})
    status, body = post(server, f"{model}/infer", {"inputs": inputs})
    assert status == 200, body
    return {output["name"]: output["data"] for output in json.loads(body)["outputs"]}


def metrics(server: TritonServer) -> dict[str, float]:
    connection = http.client.HTTPConnection(server.metrics_url, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode("utf-8")
    connection.close()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines()) if name and name[0] != "#"
    }


def used_blocks(server: TritonServer, model: str = "llm") -> float:
    return metrics(server)[f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="used",model="{model}",version="1"}}']


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
