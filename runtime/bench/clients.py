"""Ways to reach an engine: in this process, Triton over gRPC streams, Triton over HTTP generate_stream.

What a token costs here   in process: two appends on the engine's output thread, half a microsecond (see `chunk_cost_us`).
                          Through Triton: the library's own reception; decoding the tensors waits until the run is over.
Text                      Triton's classic tensors take text, so prompts must be text there
Units                     seconds of time.perf_counter
Raises                    InvalidRequest for a bad address, ServerError when the server does not answer
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runtime.bench.driver import Client, Finished
from runtime.bench.records import Record
from runtime.bench.workload import Work
from runtime.errors import ForgelineError, InvalidRequest
from runtime.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from runtime.engine import Engine, Output

FAILED = (FinishReason.ERROR.value, FinishReason.CANCELLED.value)


class InProcessClient:
    """`params` are those of every request but for max_tokens."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params

    def start(self, record: Record, work: Work, finished: Finished) -> None:
        import dataclasses

        try:
            params = dataclasses.replace(self._params, max_tokens=work.max_tokens)
            self._engine.submit(work.prompt, params, on_output=receiver(record, finished))
        except ForgelineError as error:
            record.error = str(error)
            finished.put(record)

    def complete(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


def receiver(record: Record, finished: Finished) -> Callable[[Output], None]:
    """The on_output of one request."""
    clock, moments, counts = time.perf_counter, record.moments, record.counts

    def receive(output: Output) -> None:
        if output.token_ids:
            moments.append(clock())
            counts.append(len(output.token_ids))
        if output.finish_reason is not None:
            record.finish_reason = output.finish_reason.value
            if record.finish_reason in FAILED:
                record.error = output.error or f"the request was {record.finish_reason}"
            record.num_prompt_tokens = output.num_prompt_tokens
            record.num_cached_tokens = output.num_cached_tokens
            times = output.timings
            record.stages_ms = {"queue": times.queue_ms(), "prefill": times.prefill_ms(), "decode": times.decode_ms()}
            finished.put(record)

    return receive


def chunk_cost_us(repetitions: int = 20_000) -> float:
    """Microseconds that a chunk costs in `receiver`, measured now."""
    from types import SimpleNamespace

    output: Any = SimpleNamespace(token_ids=(1,), finish_reason=None)
    receive = receiver(Record(0, 0.0, 0), Finished())
    start = time.perf_counter()
    for _ in range(repetitions):
        receive(output)
    return 1e6 * (time.perf_counter() - start) / repetitions


def connect(url: str, model: str, params: SamplingParams) -> Client:
    """grpc://HOST:PORT or http://HOST:PORT, a running Triton that serves `model`."""
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "http") or not parts.hostname or not parts.port:
        raise InvalidRequest(f"the address {url!r} must have the form grpc://HOST:PORT or http://HOST:PORT")
    address = f"{parts.hostname}:{parts.port}"
    if parts.scheme == "grpc":
        from runtime.bench.triton_grpc import TritonGrpcClient

        return TritonGrpcClient(address, model, params)
    from runtime.bench.triton_http import TritonHttpClient

    return TritonHttpClient(address, model, params)


def request_values(work: Work, params: SamplingParams) -> dict[str, Any]:
    """The classic tensors of one request, by name."""
    if not isinstance(work.prompt, str):
        raise InvalidRequest("Triton's text_input takes text but the prompt is token ids; run with --prompts text")
    values: dict[str, Any] = {
        "text_input": work.prompt,
        "max_tokens": work.max_tokens,
        "stream": True,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_perf_metrics": True,
        "ignore_eos": params.ignore_eos,
        "temperature": params.temperature,
    }
    if params.top_k > 0:
        values["top_k"] = params.top_k
    if params.top_p < 1:
        values["top_p"] = params.top_p
    if params.seed is not None:
        values["seed"] = params.seed
    return values


def fill(record: Record, arrived: list[tuple[float, dict[str, Any]]]) -> None:
    """From a stream's chunks, as (moment, values by tensor name), to the record."""
    for moment, chunk in arrived:
        if chunk.get("num_output_tokens"):
            record.moments.append(moment)
            record.counts.append(int(chunk["num_output_tokens"]))
        if "num_input_tokens" in chunk:
            record.num_prompt_tokens = int(chunk["num_input_tokens"])
        if "finish_reason" in chunk:
            record.finish_reason = str(chunk["finish_reason"])
        if "last_token_time_ns" in chunk:
            moments = [int(chunk[f"{name}_time_ns"]) for name in ("arrival", "first_scheduled", "first_token", "last_token")]
            spans = [(after - before) / 1e6 for before, after in itertools.pairwise(moments)]
            record.stages_ms = dict(zip(("queue", "prefill", "decode"), spans, strict=True))
    if not record.error and not record.finish_reason:
        record.error = "the stream ended without a finish_reason; is this model served by runtime.serving?"
