"""A loaded engine: text in, streams of text out. Puts bundle, executor, scheduler, loop and tokenizer together.

Threads   caller: tokenizes and submits │ loop: steps (loop.py) │ output: detokenizes, finds stop strings, calls `on_output`
          The output thread drains everything that has piled up and merges it per sequence, so a consumer that lags gets
          several tokens in one Output and never delays a step. First tokens go out before anything else of the same drain.
Ends      every submitted sequence gets exactly one Output with a finish_reason
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from runtime.batch import BatchBuilder
from runtime.bench.roofline import LiveRoofline
from runtime.block_pool import BlockPool
from runtime.config import ResolvedConfig, RuntimeConfig, resolve
from runtime.contract import TOKENIZER_DIR, Manifest, load_manifest
from runtime.errors import InvalidRequest, QueueFull
from runtime.executors import kv_cache_free_bytes, load_executor
from runtime.executors.base import Executor
from runtime.loop import Loop, TokenOutput
from runtime.padding import padded_length
from runtime.prompt import check_length, checked_ids
from runtime.request import FinishReason, Request, SamplingParams, Timings
from runtime.sampler import Sampler, TokenLogprobs
from runtime.scheduler import Scheduler
from runtime.step_cost import PromptPace
from runtime.text import TextStream
from runtime.tokenizer import Tokenizer

log = logging.getLogger("forgeline.engine")


@dataclass(frozen=True)
class Output:
    """What became known of one sequence since its previous Output. Counts are cumulative; text, ids and logprobs are new."""

    request_id: str
    index: int  # of the sequence, when n > 1
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cum_logprob: float
    finish_reason: FinishReason | None
    error: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_allocated_blocks: int
    num_reused_blocks: int
    num_total_blocks: int
    timings: Timings


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for metrics; counters grow, the rest are gauges."""

    num_running: int
    num_waiting: int
    num_context_requests: int
    num_generation_requests: int
    num_scheduled_requests: int
    max_num_seqs: int
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    iteration: int
    total_context_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    kv_cache_bytes: int
    step_time_error: float = 0.0  # of what max_itl_stretch expected of recent steps, as a share of their time
    roofline_share: Mapping[str, float] = field(default_factory=dict)  # by stage, of the steps since the last snapshot


class _Sequence:
    """Output-thread state of one sequence."""

    def __init__(self, request: Request, user_id: str, index: int, stream: TextStream, on_output: Callable[[Output], None]):
        self.request = request
        self.user_id = user_id
        self.index = index
        self.stream = stream
        self.on_output = on_output
        self.num_output_tokens = 0
        self.cum_logprob = 0.0
        self.started = False
        self.done = False


class Engine:
    """Thread-safe. Use as a context manager, or call `close`."""

    def __init__(self, manifest: Manifest, config: ResolvedConfig, tokenizer: Tokenizer, loop: Loop) -> None:
        self.manifest = manifest
        self.config = config
        self.tokenizer = tokenizer
        self.loop = loop
        self.roofline: LiveRoofline | None = None
        self._lock = threading.Lock()
        self._sequences: dict[str, _Sequence] = {}  # by internal request id
        self._user_ids: dict[str, list[str]] = {}
        self._internal_ids = itertools.count()  # of sequences; no name that a client chooses can collide with them
        self._outputs: queue.SimpleQueue[list[TokenOutput] | None] = queue.SimpleQueue()
        self._closed = False
        loop.sink = self._outputs.put
        self._loop_thread = threading.Thread(target=loop.run, name="forgeline-loop", daemon=True)
        self._output_thread = threading.Thread(target=self._drain_forever, name="forgeline-output", daemon=True)
        self._output_thread.start()
        self._loop_thread.start()

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: RuntimeConfig | None = None) -> Engine:
        """Raises  EngineError and its kinds when the bundle does not fit this machine, InvalidRequest for bad options."""
        config = config or RuntimeConfig()
        manifest = load_manifest(path, verify_checksums=config.verify_checksums)
        resolved = resolve(config, manifest, kv_cache_free_bytes(manifest))
        with ThreadPoolExecutor(1) as beside:  # compiling keeps one core busy
            reading = beside.submit(Tokenizer.load, Path(path) / TOKENIZER_DIR)
            executor = load_executor(path, manifest, resolved)
        tokenizer = reading.result()
        roofline = LiveRoofline.load(Path(path), manifest)
        if roofline is not None:
            executor = roofline.attach(executor)
        _check_step(resolved, executor)
        pool = BlockPool(executor.num_blocks, executor.block_size, enable_prefix_caching=resolved.enable_prefix_caching)
        scheduler = Scheduler(
            pool,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            max_queue_size=resolved.max_queue_size,
            policy=resolved.scheduling_policy,
            enable_chunked_prefill=resolved.enable_chunked_prefill,
            eos_token_ids=manifest.model.eos_token_ids,
            min_prefill_tokens=executor.min_prefill_tokens,
            pace=_pace(resolved, manifest),
        )
        sampler = Sampler(manifest.model.vocab_size, eos_token_ids=manifest.model.eos_token_ids)
        builder = BatchBuilder(executor.block_size, resolved.max_num_batched_tokens)
        engine = cls(manifest, resolved, tokenizer, Loop(executor, scheduler, sampler, builder))
        engine.roofline = roofline
        return engine

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        on_output: Callable[[Output], None],
    ) -> str:
        """Start a request and return its id. `on_output` runs on the output thread and must not block for long.

        Raises  InvalidRequest, PromptTooLong, QueueFull; nothing has been queued then.
        """
        if self._closed:
            raise QueueFull("the engine is shutting down; send the request to another server")
        most = self.config.max_queue_size
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
            raise InvalidRequest(f"n is {n!r} but must be at least 1 and at most max_queue_size={most}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequest(f"priority is {priority!r} but must be a whole number")
        for name, value, kind in (
            ("params", params, SamplingParams), ("cache_salt", cache_salt, str), ("request_id", request_id or "", str),
        ):  # fmt: skip
            if not isinstance(value, kind):
                raise InvalidRequest(f"{name} is {value!r} but must be of type {kind.__name__}")
        ids = self.encode(prompt) if isinstance(prompt, str) else checked_ids(prompt, self.manifest.model.vocab_size)
        user_id = request_id or uuid.uuid4().hex
        sequences: list[_Sequence] = []
        for index in range(n):
            own = params if index == 0 or params.seed is None else _with_seed(params, params.seed + index)
            request = Request(
                str(next(self._internal_ids)), ids if index == 0 else list(ids), own, priority=priority, cache_salt=cache_salt,
                fork_of=sequences[0].request if index else None,
            )  # fmt: skip
            sequences.append(_Sequence(request, user_id, index, TextStream(own, self.tokenizer, ids), on_output))
        self.loop.scheduler.validate(sequences[0].request)
        self.loop.sampler.validate(params)
        with self._lock:  # nothing below may raise after the first registration
            if len(self._sequences) + n > most:
                raise QueueFull(f"{len(self._sequences)} requests are queued or running and the limit is {most}; retry later")
            if user_id in self._user_ids:
                raise InvalidRequest(f"request id {user_id!r} is already in use; choose another or wait for it to end")
            self._user_ids[user_id] = [sequence.request.request_id for sequence in sequences]
            self._sequences.update((sequence.request.request_id, sequence) for sequence in sequences)
        for sequence in sequences:
            self.loop.submit(sequence.request)
        return user_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids.  Raises  InvalidRequest; PromptTooLong, before tokenizing, for text that cannot fit."""
        check_length(text, self.config.max_model_len, lambda: self.tokenizer.max_token_bytes)
        return self.tokenizer.encode(text, add_special_tokens)

    def cancel(self, request_id: str) -> None:
        """End a request with FinishReason.CANCELLED and free its blocks before the next step; unknown ids do nothing."""
        with self._lock:
            internal = list(self._user_ids.get(request_id, ()))
        for name in internal:
            self.loop.cancel(name, FinishReason.CANCELLED)

    def stats(self) -> EngineStats:
        scheduler, pool = self.loop.scheduler, self.loop.scheduler.pool
        counters = scheduler.stats
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_context_requests=counters.num_context_requests,
            num_generation_requests=counters.num_generation_requests,
            num_scheduled_requests=counters.num_context_requests + counters.num_generation_requests,
            max_num_seqs=self.config.max_num_seqs,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_free_blocks=pool.num_blocks - pool.num_used,
            num_cached_blocks=pool.num_cached,
            block_size=pool.block_size,
            iteration=counters.iteration,
            total_context_tokens=counters.num_context_tokens,
            num_preemptions=counters.num_preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            kv_cache_bytes=self.loop.executor.kv_cache_bytes(),
            step_time_error=scheduler.pace.cost.error if scheduler.pace is not None else 0.0,
            roofline_share=self.roofline.read() if self.roofline is not None else {},
        )

    def is_healthy(self) -> bool:
        return not self._closed and self._loop_thread.is_alive() and self._output_thread.is_alive()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel what is left, deliver the last outputs, stop the threads, free the executor. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ids = list(self._user_ids)
        for user_id in ids:
            self.cancel(user_id)
        deadline = time.monotonic() + timeout
        while self._sequences and time.monotonic() < deadline and self._loop_thread.is_alive():
            time.sleep(0.002)
        self.loop.stop()
        self._loop_thread.join(max(0.1, deadline - time.monotonic()))
        self._outputs.put(None)
        self._output_thread.join(max(0.1, deadline - time.monotonic()))
        self.loop.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ output thread

    def _drain_forever(self) -> None:
        stop = False
        while not stop:
            steps = [self._outputs.get()]
            while True:
                try:
                    steps.append(self._outputs.get_nowait())
                except queue.Empty:
                    break
            stop = None in steps
            start = time.perf_counter_ns()
            self._deliver(output for step in steps if step is not None for output in step)
            self.loop.times.output_ns += time.perf_counter_ns() - start

    def _deliver(self, outputs: Iterable[TokenOutput]) -> None:
        grouped: dict[str, list[TokenOutput]] = {}
        for output in outputs:
            grouped.setdefault(output.request.request_id, []).append(output)
        pairs = [(self._sequences[name], group) for name, group in grouped.items() if name in self._sequences]
        pairs.sort(key=lambda pair: pair[0].started)
        for sequence, group in pairs:
            if sequence.done:  # ended by a stop string; the loop's answer to our cancel arrives here
                self._forget(sequence, group)
                continue
            try:
                sequence.on_output(self._advance(sequence, group))
            except Exception:
                log.exception("the consumer of request %s failed; the request is cancelled", sequence.user_id)
                sequence.done = True
                self.loop.cancel(sequence.request.request_id, FinishReason.CANCELLED)
            self._forget(sequence, group)

    def _advance(self, sequence: _Sequence, group: list[TokenOutput]) -> Output:
        request = sequence.request
        sequence.started = True
        token_ids = [output.token_id for output in group if output.token_id is not None]
        finish = group[-1].finish_reason
        delta = sequence.stream.push(token_ids, finished=finish is not None)
        kept = delta.token_count
        if delta.stopped:
            if finish is None:
                self.loop.cancel(request.request_id, FinishReason.STOP)
            finish = FinishReason.STOP
        logprobs = tuple(output.logprobs for output in group[:kept] if output.logprobs is not None)
        sequence.num_output_tokens += kept
        sequence.cum_logprob += sum(entry.logprob for entry in logprobs)
        sequence.done = finish is not None
        cached_blocks = request.num_cached_tokens // self.loop.scheduler.pool.block_size
        return Output(
            request_id=sequence.user_id,
            index=sequence.index,
            text=delta.text,
            token_ids=tuple(token_ids[:kept]),
            logprobs=logprobs,
            cum_logprob=sequence.cum_logprob,
            finish_reason=finish,
            error=request.error if finish is FinishReason.ERROR else "",
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_allocated_blocks=request.num_allocated_blocks,
            num_reused_blocks=cached_blocks,
            num_total_blocks=request.num_allocated_blocks + cached_blocks,
            timings=request.timings,
        )

    def _forget(self, sequence: _Sequence, group: list[TokenOutput]) -> None:
        """Drop the sequence once the loop has reported its end (which follows a stop string by one step)."""
        if group[-1].finish_reason is None:
            return
        with self._lock:
            self._sequences.pop(sequence.request.request_id, None)
            names = self._user_ids.get(sequence.user_id, [])
            if sequence.request.request_id in names:
                names.remove(sequence.request.request_id)
            if not names:
                self._user_ids.pop(sequence.user_id, None)


def _check_step(config: ResolvedConfig, executor: Executor) -> None:
    """Raises InvalidRequest when a prompt could not be cut into parts that both fit a step and the executor takes."""
    least = 2 * executor.min_prefill_tokens - 1
    if config.max_num_batched_tokens < least:
        executor.close()
        raise InvalidRequest(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is too small for this engine, which computes prompts in "
            f"parts of at least {executor.min_prefill_tokens} tokens; raise it to at least {least}"
        )


def _pace(config: ResolvedConfig, manifest: Manifest) -> PromptPace | None:
    if config.max_itl_stretch == math.inf:
        return None
    return PromptPace(config.max_itl_stretch, padded_length if manifest.target == "cpu" else int)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(params, seed=seed % 2**64)
