"""From engine outputs to Triton responses: one Reply per Triton request.

Streaming      one response per token or, as chunks.py decides, a few of them (the first at once, the rest with the end), text as
               a delta; the last carries Triton's final flag
Not streaming  one response per sequence, each complete. A model that is not decoupled may answer only once, so there all
               sequences come in one response: text_output [n]
Tensors        only those the client requested and that carry something; a batch dimension where the classic backend has one
Threads        `on_output` runs on the engine's output thread, `fail` may come from any other
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.metrics import EngineMetrics
from runtime.request import FinishReason
from runtime.serving.chunks import Chunks
from runtime.serving.requests import Generation

if TYPE_CHECKING:
    from runtime.engine import Output

CLIENT, STOP, TIMEOUT, SHUTDOWN = "client", "stop", "timeout", "shutdown"  # who cancelled
SHUTTING_DOWN = "the server is shutting down; send the request to another server"


class Tensors:
    """Makes Triton tensors. Small integers recur in every chunk, so their tensors are kept."""

    def __init__(self, pb_utils: Any, batched: bool) -> None:
        self._tensor = pb_utils.Tensor
        self._scalar = (1, 1) if batched else (1,)
        self._lead: tuple[int, ...] = (1,) if batched else ()
        self.small = functools.lru_cache(maxsize=1024)(self.integer)  # for numbers that recur

    def texts(self, name: str, texts: Sequence[str]) -> Any:
        return self._tensor(name, np.array([text.encode("utf-8") for text in texts], dtype=np.object_))

    def integer(self, name: str, value: int) -> Any:
        return self._tensor(name, np.full(self._scalar, value, dtype=np.int32))

    def time(self, name: str, value: int) -> Any:
        return self._tensor(name, np.full(self._scalar, value, dtype=np.int64))

    def real(self, name: str, value: float) -> Any:
        return self._tensor(name, np.full(self._scalar, value, dtype=np.float32))

    def per_sequence(self, name: str, values: Sequence[float]) -> Any:
        return self._tensor(name, np.array(values, dtype=np.float32).reshape(*self._lead, len(values)))

    def per_token(self, name: str, rows: Sequence[Sequence[float]]) -> Any:
        array = np.zeros((len(rows), max(map(len, rows))), dtype=np.float32)
        for row, values in enumerate(rows):
            array[row, : len(values)] = values
        return self._tensor(name, array.reshape(*self._lead, *array.shape))


class _Sequence:
    """What is known of one sequence; in a stream, of its next chunk."""

    def __init__(self, row: int, index: int, text: str) -> None:
        self.row, self.index = row, index
        self.parts = [text] if text else []
        self.num_tokens = 0
        self.logprobs: list[float] = []
        self.last: Output | None = None

    def add(self, output: Output) -> None:
        self.parts.append(output.text)
        self.num_tokens += len(output.token_ids)
        self.logprobs.extend(entry.logprob for entry in output.logprobs)
        self.last = output


class Reply:
    def __init__(
        self,
        *,
        sender: Any,
        pb_utils: Any,
        tensors: Tensors,
        generations: Sequence[Generation],
        wanted: frozenset[str],
        decoupled: bool,
        chunks: Chunks,
        metrics: EngineMetrics,
        on_end: Callable[[Reply], None],
    ) -> None:
        self._sender = sender
        self.engine_ids: list[str] = []
        self.cancelled_by = ""
        self.closed = False
        self.last_asked = time.monotonic()  # about its client
        timeouts = [generation.timeout_s for generation in generations if generation.timeout_s]
        self.deadline = time.monotonic() + min(timeouts) if timeouts else 0.0
        self._pb_utils = pb_utils
        self._tensors = tensors
        self._generations = generations
        self._wanted = wanted
        self._one_response = not decoupled
        self._chunks = chunks
        self.streams = any(generation.stream for generation in generations)
        self._metrics = metrics
        self._on_end = on_end
        self._lock = threading.Lock()
        self._open = {
            (row, index): _Sequence(row, index, generation.prompt if generation.include_prompt else "")
            for row, generation in enumerate(generations)
            for index in range(generation.n)
        }
        self._complete: list[_Sequence] = []
        self._last_chunk: dict[tuple[int, int], float] = {}

    def on_output(self, row: int, output: Output) -> None:
        finish = output.finish_reason
        if finish is not None:  # counted also when nobody is left to be told
            self._metrics.request_ended(output.timings, finish, output.num_prompt_tokens, output.num_output_tokens)
        with self._lock:
            if self.closed:
                return
            key = (row, output.index)
            sequence = self._open[key]
            sequence.add(output)
            if finish is not None:
                if finish is FinishReason.ERROR:
                    return self._error(output.error or "the engine failed", "INTERNAL")
                if finish is FinishReason.CANCELLED and self.cancelled_by != STOP:
                    return self._error(*self._why_cancelled())
                del self._open[key]
            if self._generations[row].stream:
                now, before = time.perf_counter(), self._last_chunk.get(key)
                if finish is None and before is not None and not self._chunks.due(sequence.num_tokens, now - before):
                    return
                if before is not None:
                    self._metrics.gap(now - before)
                self._last_chunk[key] = now
                self._send([sequence])
                if finish is None:
                    self._open[key] = _Sequence(row, output.index, "")
            elif finish is not None:
                self._complete.append(sequence)
                if not self._one_response:
                    self._send([sequence])
                elif not self._open:
                    self._send(sorted(self._complete, key=lambda done: (done.row, done.index)))

    @property
    def unfinished(self) -> bool:
        """Whether sequences of this request are still in the engine."""
        return bool(self._open)

    def client_has_gone(self) -> bool:
        """Asked under the lock that sending holds: Triton crashes when it is asked after, or during, the final response."""
        with self._lock:
            return not self.closed and self._sender.is_cancelled()

    def fail(self, message: str, code: str) -> None:
        """End the request with an error; nothing when it has ended already."""
        with self._lock:
            if not self.closed:
                self._error(message, code)

    def _why_cancelled(self) -> tuple[str, str]:
        if self.cancelled_by == CLIENT:
            return "the client cancelled the request", "CANCELLED"
        if self.cancelled_by == TIMEOUT:
            return "the request's timeout passed before it was complete; raise timeout or lower max_tokens", "UNAVAILABLE"
        return SHUTTING_DOWN, "UNAVAILABLE"

    def _error(self, message: str, code: str) -> None:
        error = self._pb_utils.TritonError(message, getattr(self._pb_utils.TritonError, code))
        self._transmit(self._pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)

    def _send(self, sequences: Sequence[_Sequence]) -> None:
        response = self._pb_utils.InferenceResponse(self._encode(sequences))
        self._transmit(response, final=not self._open)

    def _transmit(self, response: Any, *, final: bool) -> None:
        try:
            self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        except BaseException:
            final = True  # nothing more can be said to this client
            raise
        finally:
            if final:
                self.closed = True
                self._on_end(self)

    def _encode(self, sequences: Sequence[_Sequence]) -> list[Any]:
        wanted, make = self._wanted, self._tensors
        first = sequences[0]
        generation = self._generations[first.row]
        last = first.last
        assert last is not None
        tensors = []
        if "text_output" in wanted:
            tensors.append(make.texts("text_output", ["".join(sequence.parts) for sequence in sequences]))
        if generation.return_num_output_tokens and "num_output_tokens" in wanted:
            tensors.append(make.small("num_output_tokens", sum(sequence.num_tokens for sequence in sequences)))
        if generation.return_num_input_tokens and "num_input_tokens" in wanted:
            tensors.append(make.small("num_input_tokens", last.num_prompt_tokens))
        if len(self._generations) > 1 and "batch_index" in wanted:
            tensors.append(make.small("batch_index", first.row))
        if generation.n > 1 and len(sequences) == 1 and "sequence_index" in wanted:
            tensors.append(make.small("sequence_index", first.index))
        if generation.return_log_probs:
            if "cum_log_probs" in wanted:
                sums = [sequence.last.cum_logprob for sequence in sequences if sequence.last is not None]
                tensors.append(make.per_sequence("cum_log_probs", sums))
            if "output_log_probs" in wanted:
                tensors.append(make.per_token("output_log_probs", [sequence.logprobs for sequence in sequences]))
        if last.finish_reason is not None:
            if "finish_reason" in wanted:
                reasons = [sequence.last.finish_reason for sequence in sequences if sequence.last is not None]
                tensors.append(make.texts("finish_reason", [reason.value for reason in reasons if reason is not None]))
            if generation.return_perf_metrics:
                tensors.extend(self._performance(last))
        return tensors

    def _performance(self, output: Output) -> list[Any]:
        make, times = self._tensors, output.timings
        tensors: dict[str, tuple[Callable[[str, Any], Any], float]] = {
            "kv_cache_alloc_new_blocks": (make.integer, output.num_allocated_blocks),
            "kv_cache_reused_blocks": (make.integer, output.num_reused_blocks),
            "kv_cache_alloc_total_blocks": (make.integer, output.num_total_blocks),
            "arrival_time_ns": (make.time, times.arrival_ns),
            "first_scheduled_time_ns": (make.time, times.first_scheduled_ns),
            "first_token_time_ns": (make.time, times.first_token_ns),
            "last_token_time_ns": (make.time, times.last_token_ns),
            "acceptance_rate": (make.real, 0.0),
            "total_accepted_draft_tokens": (make.integer, 0),
            "total_draft_tokens": (make.integer, 0),
        }
        return [build(name, value) for name, (build, value) in tensors.items() if name in self._wanted]
