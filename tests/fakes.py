"""Stand-ins whose answers can be worked out on paper, and short ways to build a scheduler in a given state.

The fake model has one layer and keeps one number per slot, the state of the sequence up to there:

    state[-1] = 0    state[i] = (31·state[i-1] + token[i] + 1) mod 999983    next token = (state[0] + … + state[n-1]) mod V

Like attention it reads every slot of the sequence through the block table, and like attention's keys and values a slot depends
on all tokens before it. So a block that is shared, copied, freed or reused wrongly shows up as a wrong token. On top of that
FakeExecutor asserts that slots hold the position they are read for, and that a slot is written by one row at a time.

    tokens [1, 2], V = 97:   states 2, 31·2 + 2 + 1 = 65;   next = 67
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from runtime.batch import BatchBuilder, StepInputs
from runtime.block_pool import BlockPool
from runtime.executors.base import StepOutput
from runtime.loop import Loop, TokenOutput
from runtime.request import Request, SamplingParams
from runtime.sampler import SampledTokens
from runtime.scheduler import Scheduler
from runtime.step_cost import PromptPace

MODULUS = 999_983


def next_state(state: int, token: int) -> int:
    return (31 * state + token + 1) % MODULUS


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """The first `count` output tokens of the fake model run alone, with FakeSampler's shift by `seed`."""
    state = total = 0
    tokens = list(prompt)
    for token in tokens:
        state = next_state(state, token)
        total += state
    for _ in range(count):
        tokens.append((total + seed) % vocab_size)
        state = next_state(state, tokens[-1])
        total += state
    return tokens[len(prompt) :]


class FakeExecutor:
    """Executor of the fake model. `fail_with` is raised by the next `execute`, once."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocab_size: int = 97) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.min_prefill_tokens = 1
        self.states = np.zeros((num_blocks, block_size), np.int64)
        self.positions = np.full((num_blocks, block_size), -1, np.int64)
        self.fail_with: BaseException | None = None
        self.num_steps = 0
        self.num_copies = 0
        self.closed = False

    def execute(self, inputs: StepInputs) -> StepOutput:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.num_steps += 1
        _check_dtypes(inputs)
        size = self.block_size
        states, positions = self.states.reshape(-1), self.positions.reshape(-1)
        starts = inputs.query_start_loc.tolist()
        assert starts[0] == 0 and starts[-1] == len(inputs.input_ids)
        assert len(set(inputs.slot_mapping.tolist())) == len(inputs.slot_mapping), "two tokens are written to one slot"
        contexts: list[np.ndarray] = []
        for row, seq_len in enumerate(inputs.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            assert begin < end, f"row {row} is empty"
            blocks = inputs.block_table[row, : -(-seq_len // size)]
            slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)[:seq_len]
            first = seq_len - (end - begin)
            assert inputs.positions[begin:end].tolist() == list(range(first, seq_len)), f"row {row}: positions"
            assert inputs.slot_mapping[begin:end].tolist() == slots[first:].tolist(), f"row {row}: slots off the block table"
            assert positions[slots[:first]].tolist() == list(range(first)), f"row {row} reads slots of other positions"
            state = int(states[slots[first - 1]]) if first else 0
            for index, token in enumerate(inputs.input_ids[begin:end].tolist(), first):
                assert 0 <= token < self.vocab_size
                state = next_state(state, token)
                states[slots[index]], positions[slots[index]] = state, index
            contexts.append(slots)
        tokens: list[int] = []
        for place in inputs.logits_indices.tolist():
            row = int(np.searchsorted(inputs.query_start_loc, place, side="right")) - 1
            length = int(inputs.positions[place]) + 1
            tokens.append(int(states[contexts[row][:length]].sum()) % self.vocab_size)
        next_token = np.array(tokens, np.int64)
        logits = np.zeros((len(tokens), self.vocab_size), np.float32)
        logits[np.arange(len(tokens)), next_token] = 1.0
        return StepOutput(logits, next_token)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """All sources are read before any destination is written, as a parallel copy may do."""
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        assert len(set(targets)) == len(targets) and not set(sources) & set(targets)
        self.num_copies += len(copies)
        self.states[targets] = self.states[sources]
        self.positions[targets] = self.positions[sources]

    def kv_cache_bytes(self) -> int:
        return self.states.nbytes

    def close(self) -> None:
        self.closed = True


def _check_dtypes(inputs: StepInputs) -> None:
    for name, dtype in (("input_ids", "int64"), ("positions", "int64"), ("slot_mapping", "int32"), ("block_table", "int32"),
                        ("query_start_loc", "int32"), ("seq_lens", "int32"), ("logits_indices", "int64")):  # fmt: skip
        assert getattr(inputs, name).dtype == dtype, name


class FakeSampler:
    """Greedy, shifted by the request's seed, so that forks of one prompt diverge. Remembers whom it was told to forget."""

    def __init__(self, vocab_size: int = 97) -> None:
        self.vocab_size = vocab_size
        self.forgotten: list[Request] = []
        self.fail_with: Exception | None = None
        self.row_errors: dict[str, str] = {}  # by request id

    def validate(self, params: SamplingParams) -> None:
        pass

    def sample(self, output: StepOutput, requests: Sequence[Request]) -> SampledTokens:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        assert len(output.next_token) == len(requests)
        shifts = np.array([request.params.seed or 0 for request in requests], np.int64)
        token_ids = (output.next_token + shifts) % self.vocab_size
        errors = {row: self.row_errors[r.request_id] for row, r in enumerate(requests) if r.request_id in self.row_errors}
        token_ids[list(errors)] = -1
        return SampledTokens(token_ids, [None] * len(requests), errors)

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)


class FixedPace(PromptPace):
    """For whom a step takes 10 ms, and 1 ms more for each token after the first, whatever was measured."""

    def __init__(self, max_stretch: float) -> None:
        super().__init__(max_stretch)
        for rows in ([(0, 1)], [(9, 1)] * 4, [(0, 3)], [(9, 3)], [(0, 9)], [(9, 64)]):
            self.cost.observe(rows, 9e-3 + 1e-3 * sum(count for _, count in rows))
        self.cost.observe = lambda *_: None  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"FixedPace({self.max_stretch})"


def make_request(
    request_id: str, prompt: Iterable[int], *, priority: int = 0, salt: str = "", fork_of: Request | None = None, **params: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": 16, **params})
    return Request(request_id, list(prompt), sampling, priority=priority, cache_salt=salt, fork_of=fork_of)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    *,
    max_num_seqs: int = 8,
    max_model_len: int = 1024,
    enable_prefix_caching: bool = True,
    **options: Any,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **options,
    )


def _next_id(scheduler: Scheduler) -> str:
    return f"r{scheduler._num_arrivals}"


def add_prompt(scheduler: Scheduler, num_tokens: int, *, first_token: int = 100, **options: Any) -> Request:
    """A waiting request whose prompt is first_token, first_token + 1, …"""
    request = make_request(_next_id(scheduler), range(first_token, first_token + num_tokens), **options)
    scheduler.add(request)
    return request


def add_decoding(scheduler: Scheduler, num_computed_tokens: int, *, first_token: int = 200, **options: Any) -> Request:
    """A running request with that many tokens computed and one more known, its first output token (7).

    It is put into this state without a step, so nothing else moves and nothing enters the prefix cache.
    """
    request = add_prompt(scheduler, num_computed_tokens, first_token=first_token, **options)
    scheduler._remove(scheduler.waiting, request)
    scheduler._insert(scheduler.running, request)
    request.block_table = scheduler.pool.allocate(-(-num_computed_tokens // scheduler.pool.block_size))
    request.num_computed_tokens = num_computed_tokens
    request.token_ids.append(7)
    return request


def run_step(scheduler: Scheduler, token: int = 7) -> list[Request]:
    """One step in which every row that produces a token produces `token`."""
    batch = scheduler.schedule()
    return scheduler.update(batch, [token] * sum(map(batch.samples, range(len(batch.requests)))))


def finish_all(scheduler: Scheduler, max_steps: int = 200) -> None:
    """Run until every request has ended; no block stays used."""
    for _ in range(max_steps):
        if not scheduler.has_work:
            break
        run_step(scheduler)
        scheduler.check()
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


class Recorder:
    """A sink that keeps tokens and ends, and asserts that each request ends once, and says nothing after that."""

    def __init__(self) -> None:
        self.tokens: dict[Request, list[int]] = {}
        self.ended: dict[Request, TokenOutput] = {}

    def __call__(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request not in self.ended, f"{output.request} speaks after its end"
            if output.token_id is not None:
                self.tokens.setdefault(output.request, []).append(output.token_id)
            if output.finish_reason is not None:
                self.ended[output.request] = output


def make_loop(scheduler: Scheduler, *, vocab_size: int = 97) -> tuple[Loop, FakeExecutor, Recorder]:
    """A loop over the fake model and sampler, sized to the scheduler's pool, that reports to the recorder."""
    executor = FakeExecutor(scheduler.pool.num_blocks, scheduler.pool.block_size, vocab_size)
    recorder = Recorder()
    builder = BatchBuilder(scheduler.pool.block_size, scheduler.max_num_batched_tokens)
    return Loop(executor, scheduler, FakeSampler(vocab_size), builder, recorder), executor, recorder  # type: ignore[arg-type]
