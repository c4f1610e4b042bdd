"""What operators watch: the classic `nv_trt_llm_*` gauges, latency histograms with buckets below 10 ms, token counters.

Independent of who exposes them: a Registry makes the instruments. TritonRegistry puts them on Triton's own metrics endpoint,
where every update is a message to the server (15–30 µs), so updates come from a timer thread: gauges only when they changed,
counters as differences, observations from a queue. TextRegistry renders the Prometheus text format in this process.

Threads   `request_ended` and `gap` may be called from any thread and only append; `update` from one
Units     seconds in histograms, bytes and tokens elsewhere
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runtime.request import FinishReason, Timings

# Supersets of the buckets that TensorRT-LLM and vLLM use.
TTFT_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10000.0, 50000.0, 100000.0)

# Gaps are one per streamed chunk; beyond this many in one update a uniform sample of them is observed, for beside 32 streams each
# observation takes 45 µs with the interpreter's lock held: an update took 6.4 ms when it observed all 118 gaps, and takes 1.9 ms.
MAX_GAPS_PER_UPDATE = 16


class Gauge(Protocol):
    def set(self, value: float, /) -> None: ...


class Counter(Protocol):
    def increment(self, value: float, /) -> None: ...


class Histogram(Protocol):
    def observe(self, value: float, /) -> None: ...


class Registry(Protocol):
    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge: ...

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Counter: ...

    def histogram(self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]) -> Histogram: ...

    def close(self) -> None: ...


class EngineMetrics:
    """Every instrument of one engine. `stats` is a runtime.engine.EngineStats."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)
        self._gauges: dict[tuple[str, str], tuple[Gauge, list[float]]] = {}
        self._counters: dict[tuple[str, str], tuple[Counter, list[float]]] = {}
        for name, label, values, description in _GAUGES:
            for value in values:
                gauge = registry.gauge(name, description, {label: value, **self._labels})
                self._gauges[name, value] = (gauge, [math.nan])
        for name, _, description in _COUNTERS:
            self._counters[name, ""] = (registry.counter(name, description, self._labels), [0.0])
        for reason in FinishReason:
            counter = registry.counter(
                "forgeline_requests_total", "Sequences that ended", {"finish_reason": reason.value, **self._labels}
            )
            self._counters["forgeline_requests_total", reason.value] = (counter, [0.0])
        self._histograms = {
            name: registry.histogram(name, description, {**extra, **self._labels}, buckets)
            for name, description, extra, buckets in _HISTOGRAMS
        }
        self._ended: deque[tuple[Timings, FinishReason, int, int]] = deque()
        self._gaps: deque[float] = deque(maxlen=100_000)
        self._reasons = dict.fromkeys(FinishReason, 0)

    def request_ended(self, timings: Timings, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._ended.append((timings, reason, num_prompt_tokens, num_output_tokens))

    def gap(self, seconds: float) -> None:
        """Time between two chunks of one stream."""
        self._gaps.append(seconds)

    def update(self, stats: Any, memory_bytes: Mapping[str, int]) -> None:
        """Bring every instrument up to date. `memory_bytes` has the keys cpu, gpu and pinned."""
        for key, value in _gauge_values(stats, memory_bytes).items():
            gauge, last = self._gauges[key]
            if value != last[0]:
                gauge.set(value)
                last[0] = value
        self._observe_ended()
        self._observe_gaps()
        for name, attribute, _ in _COUNTERS:
            self._advance((name, ""), getattr(stats, attribute))
        for reason, count in self._reasons.items():
            self._advance(("forgeline_requests_total", reason.value), count)

    def close(self) -> None:
        """Let go of every instrument; Triton's stub must not find them when it exits."""
        self._gauges.clear()
        self._counters.clear()
        self._histograms.clear()
        self._registry.close()

    def _advance(self, key: tuple[str, str], total: float) -> None:
        counter, last = self._counters[key]
        if total > last[0]:
            counter.increment(total - last[0])
            last[0] = total

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _observe_ended(self) -> None:
        while self._ended:
            timings, reason, num_prompt_tokens, num_output_tokens = self._ended.popleft()
            self._reasons[reason] += 1
            if not timings.first_token_ns:
                continue
            self._observe("forgeline_time_to_first_token_seconds", timings.ttft_ms() / 1e3)
            self._observe("forgeline_e2e_request_latency_seconds", (timings.last_token_ns - timings.arrival_ns) / 1e9)
            self._observe("forgeline_request_queue_time_seconds", timings.queue_ms() / 1e3)
            self._observe("forgeline_request_prefill_time_seconds", timings.prefill_ms() / 1e3)
            self._observe("forgeline_request_decode_time_seconds", timings.decode_ms() / 1e3)
            self._observe("nv_llm_input_token_len", num_prompt_tokens)
            self._observe("nv_llm_output_token_len", num_output_tokens)
            if num_output_tokens > 1:
                per_token = timings.decode_ms() / 1e3 / (num_output_tokens - 1)
                self._observe("forgeline_time_per_output_token_seconds", per_token)

    def _observe_gaps(self) -> None:
        gaps = [self._gaps.popleft() for _ in range(len(self._gaps))]
        if len(gaps) > MAX_GAPS_PER_UPDATE:
            gaps = random.sample(gaps, MAX_GAPS_PER_UPDATE)
        for gap in gaps:
            self._observe("forgeline_inter_token_latency_seconds", gap)


_GAUGES = (
    ("nv_trt_llm_request_metrics", "request_type", ("waiting", "context", "scheduled", "max", "active"), "Requests"),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", ("cpu", "gpu", "pinned"), "Memory of the runtime in bytes"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", ("fraction", "tokens_per", "used", "free", "max"), "KV blocks"),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        ("micro_batch_id", "generation_requests", "total_context_tokens"),
        "The running batch",
    ),
    ("nv_trt_llm_general_metrics", "general_type", ("iteration_counter", "timestamp"), "Steps so far, time of this reading"),
    ("forgeline_roofline_share", "stage", ("prefill", "decode", "mixed"), "Least possible time over time taken, of recent steps"),
    (
        "forgeline_step_time_error",
        "stage",
        ("mixed",),
        "How far off max_itl_stretch expected recent steps, as a share of their time",
    ),
)
_COUNTERS = (
    ("forgeline_prompt_tokens_total", "prompt_tokens", "Prompt tokens processed"),
    ("forgeline_generation_tokens_total", "generation_tokens", "Tokens generated"),
    ("forgeline_preemptions_total", "num_preemptions", "Sequences preempted for lack of KV blocks"),
    ("forgeline_prefix_cache_queries_total", "prefix_queries", "Prompt tokens looked up in the prefix cache"),
    ("forgeline_prefix_cache_hits_total", "prefix_hits", "Prompt tokens found in the prefix cache"),
)
_HISTOGRAMS: tuple[tuple[str, str, dict[str, str], Sequence[float]], ...] = (
    ("forgeline_time_to_first_token_seconds", "Arrival to first token", {}, TTFT_BUCKETS),
    ("forgeline_inter_token_latency_seconds", "Between chunks of a stream", {}, TPOT_BUCKETS),
    ("forgeline_time_per_output_token_seconds", "Decode time per token after the first", {}, TPOT_BUCKETS),
    ("forgeline_e2e_request_latency_seconds", "Arrival to last token", {}, E2E_BUCKETS),
    ("forgeline_request_queue_time_seconds", "Arrival to first scheduled", {}, E2E_BUCKETS),
    ("forgeline_request_prefill_time_seconds", "First scheduled to first token", {}, E2E_BUCKETS),
    ("forgeline_request_decode_time_seconds", "First to last token", {}, E2E_BUCKETS),
    ("nv_llm_input_token_len", "Prompt tokens", {"response_metric_type": "total_input_tokens"}, LENGTH_BUCKETS),
    ("nv_llm_output_token_len", "Output tokens", {"response_metric_type": "total_output_tokens"}, LENGTH_BUCKETS),
)


def _gauge_values(stats: Any, memory_bytes: Mapping[str, int]) -> dict[tuple[str, str], float]:
    requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
    batch, general = "nv_trt_llm_inflight_batcher_metrics", "nv_trt_llm_general_metrics"
    step = stats if stats.num_running else None  # what the last step held is over when nothing runs
    values: dict[tuple[str, str], float] = {
        (requests, "waiting"): stats.num_waiting,
        (requests, "context"): step.num_context_requests if step else 0,
        (requests, "scheduled"): step.num_scheduled_requests if step else 0,
        (requests, "max"): stats.max_num_seqs,
        (requests, "active"): stats.num_running + stats.num_waiting,
        (blocks, "fraction"): stats.num_used_blocks / stats.num_blocks,
        (blocks, "tokens_per"): stats.block_size,
        (blocks, "used"): stats.num_used_blocks,
        (blocks, "free"): stats.num_free_blocks,
        (blocks, "max"): stats.num_blocks,
        (batch, "micro_batch_id"): 0,  # one batch is in flight, never several
        (batch, "generation_requests"): step.num_generation_requests if step else 0,
        (batch, "total_context_tokens"): step.total_context_tokens if step else 0,
        (general, "iteration_counter"): stats.iteration,
        (general, "timestamp"): int(time.time()),
    }
    values["forgeline_step_time_error", "mixed"] = stats.step_time_error
    values |= {("forgeline_roofline_share", stage): share for stage, share in stats.roofline_share.items()}
    values |= {("nv_trt_llm_runtime_memory_metrics", kind): memory_bytes[kind] for kind in ("cpu", "gpu", "pinned")}
    return values


class TritonRegistry:
    """Instruments on Triton's metrics endpoint; `pb_utils` is triton_python_backend_utils inside a Python-backend process."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb_utils = pb_utils
        self._families: dict[str, Any] = {}

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
        return self._family("GAUGE", name, description).Metric(labels=dict(labels))

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Counter:
        return self._family("COUNTER", name, description).Metric(labels=dict(labels))

    def histogram(self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]) -> Histogram:
        return self._family("HISTOGRAM", name, description).Metric(labels=dict(labels), buckets=list(buckets))

    def close(self) -> None:
        self._families.clear()

    def _family(self, kind: str, name: str, description: str) -> Any:
        if name not in self._families:
            family = self._pb_utils.MetricFamily
            self._families[name] = family(name=name, description=description, kind=getattr(family, kind))
        return self._families[name]


class _Value:
    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        self.value += value


class _Buckets:
    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * len(buckets)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        self.sum += value
        for index, bound in enumerate(self.buckets):
            if value <= bound:
                self.counts[index] += 1


class TextRegistry:
    """Instruments of this process, rendered in the Prometheus text format."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[str, str, list[tuple[dict[str, str], _Value | _Buckets]]]] = {}
        self._lock = threading.Lock()

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
        return self._add("gauge", name, description, labels, _Value())

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Counter:
        return self._add("counter", name, description, labels, _Value())

    def histogram(self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]) -> Histogram:
        return self._add("histogram", name, description, labels, _Buckets(buckets))

    def close(self) -> None:
        with self._lock:
            self._families.clear()

    def render(self) -> str:
        lines: list[str] = []
        with self._lock:
            for name, (kind, description, metrics) in self._families.items():
                lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
                for labels, metric in metrics:
                    if isinstance(metric, _Value):
                        lines.append(f"{name}{_labels(labels)} {metric.value:.17g}")
                        continue
                    for bound, count in zip((*metric.buckets, math.inf), (*metric.counts, metric.count), strict=True):
                        lines.append(
                            f"{name}_bucket{_labels({**labels, 'le': '+Inf' if bound == math.inf else f'{bound:g}'})} {count}"
                        )
                    lines += [f"{name}_sum{_labels(labels)} {metric.sum:.17g}", f"{name}_count{_labels(labels)} {metric.count}"]
        return "\n".join(lines) + "\n"

    def _add(self, kind: str, name: str, description: str, labels: Mapping[str, str], metric: Any) -> Any:
        with self._lock:
            self._families.setdefault(name, (kind, description, []))[2].append((dict(labels), metric))
        return metric


def _labels(labels: Mapping[str, str]) -> str:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels.items()) + "}"
