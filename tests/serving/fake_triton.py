"""Triton's Python API as far as the model uses it, and an engine whose outputs the test decides."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.config import ResolvedConfig
from runtime.contract import KVSpec, LayerSpec, Manifest, ModelSpec, PrecisionSpec
from runtime.engine import EngineStats, Output
from runtime.request import FinishReason, SamplingParams, Timings
from runtime.sampler import TokenLogprobs


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, UNSUPPORTED, INTERNAL, CANCELLED = range(5)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse, bool]] = []
        self.cancelled = False
        self.broken = False
        self.crashed = False
        self.slowness = 0.0
        self.asked = threading.Event()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not (self.sent and self.sent[-1][1]), "sent after the final response"
        if self.broken:
            raise RuntimeError("the client's connection is gone")
        self.sent.append((response, bool(flags)))

    def is_cancelled(self) -> bool:
        """The real one crashes the server when the final response goes out before it returns."""
        self.asked.set()
        time.sleep(self.slowness)
        if self.sent and self.sent[-1][1]:
            self.crashed = True
        return self.cancelled

    @property
    def responses(self) -> list[InferenceResponse]:
        return [response for response, _ in self.sent]

    @property
    def finals(self) -> list[bool]:
        return [final for _, final in self.sent]

    def only_error(self) -> TritonError:
        assert self.finals == [True] and self.sent[0][0].error is not None
        return self.sent[0][0].error

    def wait_for(self, count: int, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while len(self.sent) < count:
            assert time.monotonic() < deadline, f"{len(self.sent)} responses instead of {count}"
            time.sleep(0.002)


OUTPUT_NAMES = (
    "text_output", "cum_log_probs", "output_log_probs", "batch_index", "sequence_index", "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns",
    "last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens",
    "num_output_tokens", "finish_reason",
)  # fmt: skip


class Request:
    def __init__(
        self, inputs: dict[str, Any], *, id: str = "", parameters: dict[str, Any] | None = None, wanted: Any = OUTPUT_NAMES
    ) -> None:
        self._inputs = [Tensor(name, value) for name, value in inputs.items()]
        self._id, self._parameters, self._wanted = id, parameters or {}, wanted
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> list[str]:
        return list(self._wanted)

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Sender:
        return self.sender


class Metric:
    def __init__(self, family: MetricFamily, labels: dict[str, str], buckets: Any = None) -> None:
        self.family, self.labels, self.buckets = family, labels, buckets
        self.calls: list[float] = []

    def set(self, value: float) -> None:
        assert self.family.kind == "gauge"
        self.calls.append(value)

    def increment(self, value: float) -> None:
        assert self.family.kind == "counter" and value > 0
        self.calls.append(value)

    def observe(self, value: float) -> None:
        assert self.family.kind == "histogram"
        self.calls.append(value)


class MetricFamily:
    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
    made: dict[str, MetricFamily]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: list[Metric] = []
        assert name not in MetricFamily.made, f"{name} was created twice"
        MetricFamily.made[name] = self

    def Metric(self, labels: dict[str, str], buckets: Any = None) -> Metric:
        assert (buckets is not None) == (self.kind == "histogram")
        self.metrics.append(Metric(self, labels, buckets))
        return self.metrics[-1]


class TritonModelException(Exception):
    pass


def install() -> Any:
    """The fake module, where `import triton_python_backend_utils` finds it."""
    MetricFamily.made = {}
    module = types.ModuleType("triton_python_backend_utils")
    for thing in (Tensor, TritonError, InferenceResponse, MetricFamily, TritonModelException):
        setattr(module, thing.__name__, thing)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    module.using_decoupled_model_transaction_policy = (  # type: ignore[attr-defined]
        lambda config: config["model_transaction_policy"]["decoupled"]
    )
    return sys.modules.setdefault("triton_python_backend_utils", module)


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        schema_version=1, forgeline_version="0", created="", target="cpu",
        model=ModelSpec("tiny", "LlamaForCausalLM", "llama", 100, 8, (LayerSpec(1, 1, 8),), 64, eos_token_ids=(1, 2)),
        precision=PrecisionSpec("fp32", "fp32", "fp32", "fp32", "fp32"),
        kv_cache=KVSpec("f32", "f32", 16, "test", 8), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64,
        libraries={}, plan={}, checksums={}, weight_bytes=0,
    )  # fmt: skip
    return dataclasses.replace(manifest, **changes)


class FakeTokenizer:
    """One id per letter, its code; a beginning-of-text 0 when special tokens are asked for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


class Submitted:
    def __init__(self, engine: FakeEngine, prompt: list[int], params: SamplingParams, keywords: dict[str, Any]) -> None:
        self.engine, self.prompt, self.params = engine, prompt, params
        self.keywords = keywords
        self.id: str = keywords["request_id"]
        self.on_output: Callable[[Output], None] = keywords["on_output"]
        self.counts: dict[int, int] = {}
        self.ended: set[int] = set()

    def emit(self, text: str, *, tokens: int = 1, finish: FinishReason | None = None, index: int = 0, error: str = "") -> None:
        self.ended |= {index} if finish is not None else set()
        count = self.counts[index] = self.counts.get(index, 0) + tokens
        self.on_output(
            Output(
                request_id=self.id, index=index, text=text, token_ids=tuple(range(tokens)),
                logprobs=tuple(TokenLogprobs(7, -0.5, ()) for _ in range(tokens)) if self.params.logprobs is not None else (),
                cum_logprob=-0.5 * count, finish_reason=finish, error=error, num_prompt_tokens=len(self.prompt),
                num_output_tokens=count, num_cached_tokens=0, num_allocated_blocks=2, num_reused_blocks=1, num_total_blocks=3,
                timings=Timings(1_000_000_000, 1_100_000_000, 1_300_000_000, 1_700_000_000),
            )
        )  # fmt: skip


class FakeEngine:
    def __init__(self, manifest: Manifest, config: Any) -> None:
        self.manifest = manifest
        self.loaded_with = config
        self.config = ResolvedConfig(8, 64, 64, 32, 16, True, True, "continuous", 1, True)
        self.tokenizer = FakeTokenizer()
        self.submitted: list[Submitted] = []
        self.cancelled: list[str] = []
        self.refuse_with: Exception | None = None
        self.healthy = True
        self.closed = False
        self.used_blocks = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def submit(self, prompt: Any, params: SamplingParams, **keywords: Any) -> str:
        if self.refuse_with is not None:
            raise self.refuse_with
        self.submitted.append(Submitted(self, prompt, params, keywords))
        return self.submitted[-1].id

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        return make_stats(num_used_blocks=self.used_blocks)

    def is_healthy(self) -> bool:
        return self.healthy

    def close(self) -> None:
        self.closed = True
        for request in self.submitted:
            for index in set(range(request.keywords["n"])) - request.ended:
                request.emit("", tokens=0, index=index, finish=FinishReason.CANCELLED)


def make_stats(**changes: Any) -> EngineStats:
    stats = EngineStats(
        num_running=2, num_waiting=3, num_context_requests=1, num_generation_requests=1, num_scheduled_requests=2, max_num_seqs=8,
        num_blocks=32, num_used_blocks=8, num_free_blocks=24, num_cached_blocks=4, block_size=16, iteration=7,
        total_context_tokens=5, num_preemptions=0, prefix_queries=40, prefix_hits=10, prompt_tokens=100, generation_tokens=50,
        kv_cache_bytes=4096,
    )  # fmt: skip
    return dataclasses.replace(stats, **changes)


def scalar(value: Any, dtype: Any) -> Any:
    return np.array([[value]], dtype=dtype)


def text_request(text: bytes = b"hi", max_tokens: int = 4, **inputs: Any) -> dict[str, Any]:
    return {"text_input": scalar(text, object), "max_tokens": scalar(max_tokens, np.int32), **inputs}
