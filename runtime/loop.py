"""The only owner of a step: schedule → copy blocks → execute → sample → update → sink. Knows no text and no clients.

Threads   `submit`, `cancel` and `stop` may be called from any thread; everything else happens on the one that calls `run`.
Ends      every submitted request gets exactly one TokenOutput with a finish_reason: also when it is refused, cancelled, its
          step fails, or the loop stops. `request.error` then says why.
Failures  an exception while a batch runs ends the requests of that batch with FinishReason.ERROR, and the loop goes on, however
          often that happens: each failure ends at least one request, so a bad request cannot come back, and what cannot be
          cured here (a broken engine) shows in `times.failed_steps` to a supervisor that can restart the process. Any other
          exception is a broken invariant: all requests end with ERROR, `run` raises, and later submissions are refused.
Times     nanoseconds; `StageTimes` adds up where they went
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.batch import BatchBuilder, ScheduledBatch
from runtime.errors import InvalidRequest, QueueFull
from runtime.executors.base import Executor
from runtime.request import FinishReason, Request
from runtime.sampler import SampledTokens, Sampler, TokenLogprobs
from runtime.scheduler import Scheduler

log = logging.getLogger("forgeline.loop")


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a request, its end, or both. `token_id` is None when a request ends without a further token."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass
class StageTimes:
    """Nanoseconds by stage since the start, over `steps` executed steps. Read by metrics and bench on other threads."""

    steps: int = 0
    failed_steps: int = 0
    schedule_ns: int = 0  # taking submissions and cancellations included
    prepare_ns: int = 0
    execute_ns: int = 0  # copies included
    sample_ns: int = 0
    update_ns: int = 0
    sink_ns: int = 0
    output_ns: int = 0  # detokenizing and `on_output`, counted by the engine on its output thread


def _discard(outputs: list[TokenOutput]) -> None:
    """The sink of a loop whose caller reads the requests themselves."""


class Loop:
    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        sampler: Sampler,
        batch_builder: BatchBuilder,
        sink: Callable[[list[TokenOutput]], None] = _discard,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.sampler = sampler
        self.batch_builder = batch_builder
        self.sink = sink  # called once per step on the loop's thread; must not raise, and not block for long
        self.times = StageTimes()
        self._inbox: deque[Request | tuple[str, FinishReason]] = deque()
        self._open: set[Request] = set()  # taken from the inbox, end not yet delivered
        self._wake = threading.Condition()
        self._stopping = False
        self._closed = False

    # ------------------------------------------------------------------------------------------------- any thread

    def submit(self, request: Request) -> None:
        """Queue a request. A refusal arrives at the sink like every other end (on this thread once the loop has stopped)."""
        with self._wake:
            closed = self._closed
            if not closed:
                self._inbox.append(request)
                self._wake.notify()
        if closed:
            self.sink([_end(request, FinishReason.ERROR, "the loop has stopped; restart it or send the request elsewhere")])

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request before the next step; its blocks are free then. Unknown and finished requests are left alone."""
        with self._wake:
            if not self._closed:
                self._inbox.append((request_id, reason))
                self._wake.notify()

    def stop(self) -> None:
        """Make `run` return after the current step; what has not finished by then ends with FinishReason.CANCELLED."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # ------------------------------------------------------------------------------------------- the loop's thread

    def run(self) -> None:
        try:
            while not self._stopping:
                self.step()
                if not self.scheduler.has_work:
                    with self._wake:
                        self._wake.wait_for(lambda: self._inbox or self._stopping)
        except BaseException as error:
            self._close(FinishReason.ERROR, f"the loop failed ({type(error).__name__}: {error}); restart the server")
            raise
        for request in self._open:
            self.scheduler.cancel(request.request_id)
            self.sampler.forget(request)
        self._close(FinishReason.CANCELLED, "the loop was stopped")

    def step(self) -> bool:
        """Take what was submitted and cancelled, then run one batch. False when there was none."""
        outputs: list[TokenOutput] = []
        clock = time.perf_counter_ns
        start = clock()
        while self._inbox:
            self._take(self._inbox.popleft(), outputs)
        batch = self.scheduler.schedule()
        self.times.schedule_ns += clock() - start
        if batch:
            self._execute(batch, outputs)
        if outputs:
            start = clock()
            self._deliver(outputs)
            self.times.sink_ns += clock() - start
        return bool(batch)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        self.sink(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request)

    def _take(self, item: Request | tuple[str, FinishReason], outputs: list[TokenOutput]) -> None:
        if isinstance(item, Request):
            self._open.add(item)
            try:
                self._check(item)
                self.scheduler.add(item)
            except (InvalidRequest, QueueFull) as error:
                outputs.append(_end(item, FinishReason.ERROR, str(error)))
            return
        request = self.scheduler.cancel(*item)
        if request is not None:
            self.sampler.forget(request)
            outputs.append(TokenOutput(request, finish_reason=request.finish_reason))

    def _check(self, request: Request) -> None:
        """Whatever is wrong with a request, of the wrong type for instance, is the fault of that request alone."""
        try:
            self._check_token_ids(request.prompt_token_ids)
            self.sampler.validate(request.params)
        except InvalidRequest:
            raise
        except Exception as error:
            log.exception("request %s cannot be read", request.request_id)
            raise InvalidRequest(
                f"the request cannot be read ({type(error).__name__}: {error}); check its token ids and parameters"
            ) from error

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self.executor.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidRequest(f"the prompt has token id {wrong} but the model's are in [0, {vocab_size}); check the tokenizer")

    def _execute(self, batch: ScheduledBatch, outputs: list[TokenOutput]) -> None:
        """Run a scheduled batch and append what came of it to `outputs`."""
        times, clock = self.times, time.perf_counter_ns
        rows = [request for row, request in enumerate(batch.requests) if batch.samples(row)]
        now = time.time_ns()
        for request in batch.requests:
            if request.timings.first_scheduled_ns == 0:
                request.timings.first_scheduled_ns = now
        try:
            start = clock()
            inputs = self.batch_builder.build(batch)
            times.prepare_ns += (prepared := clock()) - start
            if batch.copies:
                self.executor.copy_blocks(batch.copies)
            step_output = self.executor.execute(inputs)
            times.execute_ns += (executed := clock()) - prepared
            sampled = self.sampler.sample(step_output, rows) if rows else None
            times.sample_ns += (done := clock()) - executed
        except Exception as error:
            log.exception("a step of %d requests failed", len(batch.requests))
            times.failed_steps += 1
            for request in batch.requests:
                self._fail(request, f"the step failed: {type(error).__name__}: {error}", outputs)
            return
        if self.scheduler.pace is not None:
            counts = zip(batch.requests, batch.num_scheduled_tokens, strict=True)
            self.scheduler.pace.cost.observe(
                ((request.num_computed_tokens, count) for request, count in counts), (done - start) * 1e-9
            )
        start = clock()
        self._update(batch, rows, sampled, outputs)
        times.update_ns += clock() - start
        times.steps += 1

    def _update(
        self, batch: ScheduledBatch, rows: list[Request], sampled: SampledTokens | None, outputs: list[TokenOutput]
    ) -> None:
        if sampled is None:
            self.scheduler.update(batch, ())
            return
        for row, error in sampled.errors.items():
            self._fail(rows[row], error, outputs)
        token_ids = sampled.token_ids.tolist()
        finished = self.scheduler.update(batch, token_ids)
        now = time.time_ns()
        for row, (request, token_id, logprobs) in enumerate(zip(rows, token_ids, sampled.logprobs, strict=True)):
            if row in sampled.errors:
                continue
            timings = request.timings
            timings.last_token_ns = now
            timings.first_token_ns = timings.first_token_ns or now
            outputs.append(TokenOutput(request, token_id, logprobs, request.finish_reason))
        for request in finished:
            self.sampler.forget(request)

    def _fail(self, request: Request, error: str, outputs: list[TokenOutput]) -> None:
        self.scheduler.finish(request, FinishReason.ERROR, error)
        self.sampler.forget(request)
        outputs.append(TokenOutput(request, finish_reason=FinishReason.ERROR))

    def _close(self, reason: FinishReason, error: str) -> None:
        """Report the end of whatever is open and refuse what comes later. Leaves the scheduler alone: it may be what broke."""
        with self._wake:
            self._closed = True
            self._open.update(item for item in self._inbox if isinstance(item, Request))
            self._inbox.clear()
        if self._open:
            self._deliver([_end(request, reason, error) for request in self._open])


def _end(request: Request, reason: FinishReason, error: str) -> TokenOutput:
    request.finish_reason, request.error = reason, error
    return TokenOutput(request, finish_reason=reason)
