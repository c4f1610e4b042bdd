"""Which tokens run in the next step: in-flight batching over a block pool. Pure Python; knows no tensors and no text.

Every request has `num_computed_tokens` that catches up with `num_tokens`. Chunked prefill, prefix hits, preemption by
recompute and forks are all this one rule with a different starting point. Owned by the loop, not thread-safe.

Rank       (priority, arrival): lower priority values first, first come first served within. Queues are kept in this order.
Step       running requests that lack one token (decodes), then the other running ones, then admissions, each in rank order,
           within max_num_batched_tokens and, while there are decodes, within the time that `pace` allows prompts.
Admission  never preempts, and needs room for the whole sequence and one token more, beside what the running requests still
           lack for theirs. The head of the queue is not overtaken, except by others while it waits to fork a computed prompt,
           or for a running request that computes most of its own; then its place in the batch is kept.
Preemption takes the lowest rank below the request that needs room; its blocks go back to the pool and it queues again at
           its old rank. A request with nobody below it keeps its blocks and pauses. So the highest-ranked request always
           moves on and ends, then the next: no starvation within a priority and no livelock.
Splitting  no part of a prompt is smaller than min_prefill_tokens, chunks and what a prefix hit leaves alike: where executors
           compute a single token in another way than several, a prompt has the same result however it was split.
Chunking   off: a prompt is never split, and the first prompt of a step runs whatever its length, even past the budget.
Static     policy "static", a baseline: requests are admitted in cohorts of max_num_seqs, the next when all have finished.

Units      tokens, unless the name says blocks
Raises     InvalidRequest, PromptTooLong, QueueFull from `add`; nothing from `schedule` and `update`
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.batch import ScheduledBatch
from runtime.block_pool import BlockPool
from runtime.errors import InvalidRequest, PromptTooLong, QueueFull
from runtime.prefix_reuse import PrefixReuse, waits_for_parent
from runtime.request import FinishReason, Request
from runtime.step_cost import PromptPace, StepAllowance


@dataclass
class SchedulerStats:
    """Counters since the start, then gauges of the last step. Read by metrics on other threads."""

    iteration: int = 0  # steps that had work
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, and found
    prefix_hits: int = 0
    prompt_tokens: int = 0  # of requests started
    generation_tokens: int = 0  # produced
    num_context_requests: int = 0  # rows of the last step that compute known tokens (prompts, recomputed outputs) …
    num_generation_requests: int = 0  # … and rows that add one token to an output
    num_context_tokens: int = 0
    num_generation_tokens: int = 0


class _Step:
    """A step's decision while it is being made."""

    def __init__(self, budget: int, allowance: StepAllowance | None) -> None:
        self.budget = budget
        self.allowance = allowance  # of time for prompts
        self.counts: dict[Request, int] = {}
        self.copies: dict[Request, tuple[int, int]] = {}
        self.preempted: list[Request] = []
        self.num_prefills = 0

    def take(self, request: Request, count: int) -> None:
        self.counts[request] = count
        self.budget -= count
        if self.allowance is not None and request.num_tokens - request.num_computed_tokens > 1:
            self.allowance.take(request.num_computed_tokens, count)

    def drop(self, request: Request) -> None:
        self.budget += self.counts.pop(request, 0)
        self.copies.pop(request, None)
        self.preempted.append(request)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queue_size: int = 4096,
        enable_chunked_prefill: bool = True,
        policy: str = "continuous",
        eos_token_ids: Iterable[int] = (),
        min_prefill_tokens: int = 1,
        pace: PromptPace | None = None,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0 and policy in ("continuous", "static")
        assert min_prefill_tokens >= 1 and 2 * min_prefill_tokens - 1 <= max_num_batched_tokens  # any prompt can be cut
        self.pool = pool
        self.reuse = PrefixReuse(pool, min_prefill_tokens)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_queue_size = max_queue_size
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.min_prefill_tokens = min_prefill_tokens
        self.pace = pace
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_num_tokens = min(max_model_len, pool.num_blocks * pool.block_size)  # of one sequence, prompt and output
        self.stats = SchedulerStats()
        self.running: list[Request] = []  # in rank order
        self.waiting: list[Request] = []
        self._rank: dict[Request, tuple[int, int]] = {}  # of every request that has not finished
        self._by_id: dict[str, Request] = {}
        self._cohort: set[Request] = set()  # policy "static" only
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._rank)

    # ---------------------------------------------------------------------------------------------------- requests

    def validate(self, request: Request) -> None:
        """Refuse what could never run. Looks at fixed numbers only, so any thread may call it before submitting."""
        n = request.num_prompt_tokens
        if n == 0:
            raise InvalidRequest("the prompt is empty but must have at least 1 token; check the input text or ids")
        if n >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {n} tokens but max_model_len={self.max_model_len} leaves room for {self.max_model_len - 1}; "
                "shorten the prompt, or build with a larger --max-model-len where the model allows it"
            )
        if n >= self.max_num_tokens:
            raise PromptTooLong(
                f"the prompt has {n} tokens but the KV cache of {self.pool.num_blocks} blocks of {self.pool.block_size} holds "
                f"{self.max_num_tokens - 1} and one output token; shorten the prompt or raise kv_cache_memory_bytes"
            )

    def add(self, request: Request) -> None:
        assert not request.is_finished and not request.block_table
        self.validate(request)
        if len(self._rank) >= self.max_queue_size:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting and {self.num_running} running, which is the limit of "
                f"max_queue_size={self.max_queue_size}; retry later or raise it"
            )
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use; choose another or wait for it to end")
        parent = request.fork_of
        if parent is not None:
            if not parent.is_finished and parent not in self._rank:
                raise InvalidRequest(f"request {request.request_id!r} forks {parent.request_id!r}, which must be submitted first")
            if (request.prompt_token_ids, request.cache_salt) != (parent.prompt_token_ids, parent.cache_salt):
                raise InvalidRequest(
                    f"request {request.request_id!r} forks {parent.request_id!r} but its prompt or cache_salt differs"
                )
        self._rank[request] = (request.priority, self._num_arrivals)
        self._num_arrivals += 1
        self._by_id[request.request_id] = request
        self._insert(self.waiting, request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        """End a request wherever it is and free its blocks. None if there is no such request (any more)."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.finish(request, reason)
        return request

    def finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        self._remove(self.running if request.block_table else self.waiting, request)
        del self._rank[request]
        del self._by_id[request.request_id]
        self._cohort.discard(request)
        self.pool.release(request.block_table)
        request.block_table = []
        request.finish_reason = reason
        request.error = error

    def _insert(self, queue: list[Request], request: Request) -> None:
        insort(queue, request, key=self._rank.__getitem__)

    def _remove(self, queue: list[Request], request: Request) -> None:
        index = bisect_left(queue, self._rank[request], key=self._rank.__getitem__)
        assert queue[index] is request
        del queue[index]

    # ---------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> ScheduledBatch:
        """Decide the next step and reserve its blocks. Before the next call `update` the batch, or `finish` its requests."""
        decodes = [request for request in self.running if request.num_tokens - request.num_computed_tokens == 1]
        prefills = [request for request in self.running if request.num_tokens - request.num_computed_tokens != 1]
        num_prompts = min(len(prefills) + len(self.waiting), self.max_num_seqs - len(decodes))
        allowance = self.pace.begin([each.num_computed_tokens for each in decodes], num_prompts) if self.pace else None
        step = _Step(self.max_num_batched_tokens, allowance)
        for request in decodes + prefills:
            if request not in step.preempted and (count := self._chunk(request, step)):
                count = self._reserve(request, count, step)
                if count:
                    step.take(request, count)
        if self.waiting and not step.preempted:
            self._admit(step)
        assert step.counts or not self._rank, "there is work but nothing can run"
        assert not ({source for source, _ in step.copies.values()} & {target for _, target in step.copies.values()})
        self._count(step)
        return ScheduledBatch(
            requests=tuple(step.counts),
            num_scheduled_tokens=tuple(step.counts.values()),
            copies=tuple(step.copies.values()),
            preempted=tuple(step.preempted),
        )

    def _chunk(self, request: Request, step: _Step) -> int:
        """Tokens to compute in this step, as far as the budget goes."""
        missing = request.num_tokens - request.num_computed_tokens
        if missing == 1:
            return max(0, min(1, step.budget))
        first_prefill = step.num_prefills == 0
        step.num_prefills += 1
        if self.enable_chunked_prefill:
            limit = min(missing, step.budget)
            return self._split(missing, step.allowance.most(request.num_computed_tokens, limit) if step.allowance else limit)
        return missing if first_prefill or missing <= step.budget else 0

    def _split(self, missing: int, limit: int) -> int:
        """The largest chunk within `limit` that leaves no part of the `missing` tokens smaller than min_prefill_tokens."""
        if missing <= limit:
            return missing
        count = min(limit, missing - self.min_prefill_tokens)
        return count if count >= self.min_prefill_tokens else 0

    def _reserve(self, request: Request, count: int, step: _Step) -> int:
        """Give the request blocks it may write for `count` tokens; for fewer, down to 0, when nobody is left to preempt."""
        pool, size = self.pool, self.pool.block_size
        first = request.num_computed_tokens
        index = first // size  # of the block that the first token is written to
        while True:
            table = request.block_table
            num_new = -(-(first + count) // size) - len(table)
            num_copies = int(index < len(table) and pool.num_references(table[index]) > 1)
            if num_new + num_copies <= pool.num_available:
                break
            if self._preempt_below(request, step):
                continue
            room = (len(table) + pool.num_available - num_copies) * size - first
            if room <= 0 or pool.num_available < num_copies or not self.enable_chunked_prefill:
                return 0
            count = self._split(request.num_tokens - first, min(count, room))
            if count == 0:
                return 0
        if index < len(table):
            block = table[index]
            writable = pool.make_writable(block)
            if writable != block:
                step.copies[request] = (block, writable)
                request.block_table = table = [*table[:index], writable, *table[index + 1 :]]
        if num_new:
            table.extend(pool.allocate(num_new))
        request.num_allocated_blocks += num_new + num_copies
        return count

    def _preempt_below(self, request: Request, step: _Step) -> bool:
        victim = self.running[-1]
        if self._rank[victim] <= self._rank[request]:
            return False
        self.running.pop()
        step.drop(victim)
        self.pool.release(victim.block_table)
        victim.block_table = []
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._insert(self.waiting, victim)
        return True

    # --------------------------------------------------------------------------------------------------- admission

    def _admit(self, step: _Step) -> None:
        if self.policy == "static":
            if not self._cohort:
                self._form_cohort()
            if len(self._cohort) == len(self.running):
                return
        promised = sum(self._num_lacking_blocks(request) for request in self.running)
        index = num_kept = 0
        while index < len(self.waiting) and len(self.running) + num_kept < self.max_num_seqs:
            if step.budget <= 0 and (self.enable_chunked_prefill or step.num_prefills):
                break
            request = self.waiting[index]
            if (self.policy == "static" and request not in self._cohort) or waits_for_parent(request):
                index += 1
                continue
            shared, computed = self.reuse.find(request)
            if self.reuse.is_in_flight(request, computed, step.counts):
                index += 1
                num_kept += 1
                promised += self._num_lacking_blocks(request)
                continue
            if not self._start(request, shared, computed, promised, step):
                break
            del self.waiting[index]
            self._insert(self.running, request)
            promised += self._num_lacking_blocks(request)

    def _form_cohort(self) -> None:
        for request in self.waiting:
            if len(self._cohort) == self.max_num_seqs:
                return
            parent = request.fork_of
            if parent is None or parent.is_finished or parent in self._cohort:
                self._cohort.add(request)

    def _num_lacking_blocks(self, request: Request) -> int:
        """Blocks that the sequence as known, with one token more, needs beyond its table."""
        return max(0, -(-(request.num_tokens + 1) // self.pool.block_size) - len(request.block_table))

    def _start(self, request: Request, shared: list[int], computed: int, promised: int, step: _Step) -> bool:
        """Move a waiting request onto its reusable blocks and schedule it, if all of it has room beside `promised` blocks."""
        pool, size = self.pool, self.pool.block_size
        num_revived = sum(pool.num_references(block) == 0 for block in shared)
        num_copies = int(computed % size > 0)
        needed = -(-(request.num_tokens + 1) // size) - len(shared) + num_copies
        if needed + num_revived + promised > pool.num_available:
            return False
        request.num_computed_tokens = computed
        count = self._chunk(request, step)
        if count == 0:
            request.num_computed_tokens = 0
            return False
        request.block_table = pool.fork(shared)
        reserved = self._reserve(request, count, step)
        assert reserved == count
        step.take(request, count)
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed
            self.stats.prompt_tokens += request.num_prompt_tokens
            if pool.enable_prefix_caching and request.fork_of is None:
                self.stats.prefix_queries += request.num_prompt_tokens
                self.stats.prefix_hits += computed
        return True

    # ------------------------------------------------------------------------------------------------------ update

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[Request]:
        """Record an executed batch: `token_ids` are the sampled tokens of the rows that produce one. Returns who finished."""
        finished: list[Request] = []
        tokens = iter(token_ids)
        for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            produces = request.num_computed_tokens + count == request.num_tokens
            token = next(tokens) if produces else None
            if request.finish_reason is not None:  # cancelled while the step ran
                continue
            request.num_computed_tokens += count
            self.reuse.publish(request, request.num_computed_tokens - count)
            if token is None:
                continue
            request.token_ids.append(token)
            self.stats.generation_tokens += 1
            reason = self._end(request, token)
            if reason is not None:
                self.finish(request, reason)
                finished.append(request)
        assert next(tokens, None) is None, "more tokens than rows that produce one"
        return finished

    def _end(self, request: Request, token: int) -> FinishReason | None:
        params, num_output = request.params, request.num_output_tokens
        if num_output >= params.min_tokens:
            is_eos = token in self.eos_token_ids and not params.ignore_eos
            if is_eos or token in params.stop_token_ids:
                return FinishReason.STOP
        if num_output >= params.max_tokens or request.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def _count(self, step: _Step) -> None:
        stats = self.stats
        stats.iteration += bool(step.counts)
        stats.num_generation_requests = sum(
            count == 1 and request.num_output_tokens > 0 for request, count in step.counts.items()
        )
        stats.num_context_requests = len(step.counts) - stats.num_generation_requests
        stats.num_generation_tokens = stats.num_generation_requests
        stats.num_context_tokens = sum(step.counts.values()) - stats.num_generation_tokens

    def check(self) -> None:
        """Assert the pool's invariant, with reference counts equal to the block tables of the running requests."""
        self.pool.check([request.block_table for request in self.running])
        assert set(self.running) | set(self.waiting) == set(self._rank)
        assert len(self.running) + len(self.waiting) == len(self._rank) == len(self._by_id)
        assert not any(request.block_table for request in self.waiting)
        for queue in (self.running, self.waiting):
            ranks = [self._rank[request] for request in queue]
            assert ranks == sorted(ranks)
