"""Random arrivals, forks, cancels, failures and priorities on a small pool: nothing leaks, nothing vanishes, tokens are right.

After each step every block is free, referenced or cached exactly once, reference counts equal the block tables, no block is in
tables of two salts, and the highest-ranked running request has moved on. Each request ends once, with the tokens it gives when
run alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import FixedPace, expected_tokens, make_loop, make_request, make_scheduler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from runtime.request import FinishReason, Request

VOCAB = 97
EOS = 3
DOCUMENTS = [[(17 * document + 5 * i + i * i) % VOCAB for i in range(48)] for document in range(3)]


class World:
    """A loop over the fake model, and everything that must hold of it."""

    def __init__(self, **options: Any) -> None:
        options = {
            "num_blocks": 16,
            "block_size": 4,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 6,
            "max_model_len": 60,
        } | options
        self.scheduler = make_scheduler(eos_token_ids=(EOS,), **options)
        self.loop, self.executor, self.recorder = make_loop(self.scheduler, vocab_size=VOCAB)
        self.requests: list[Request] = []
        self.cancelled: set[Request] = set()
        self.exposed: set[Request] = set()  # were live when a step failed

    @property
    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]

    def submit(self, prompt: Sequence[int], **options: Any) -> None:
        request = make_request(f"r{len(self.requests)}", prompt, **options)
        self.requests.append(request)
        self.loop.submit(request)

    def fork(self, parent: Request, seed: int, max_tokens: int, priority: int) -> None:
        self.submit(
            parent.prompt_token_ids,
            fork_of=parent, salt=parent.cache_salt, seed=seed, max_tokens=max_tokens, priority=priority,
        )  # fmt: skip

    def cancel(self, request: Request) -> None:
        self.cancelled.add(request)
        self.loop.cancel(request.request_id)

    def step(self, fail: bool = False) -> None:
        if fail:
            self.executor.fail_with = RuntimeError("the engine hiccuped")
            self.exposed.update(self.live)
        top = self.scheduler.running[0] if self.scheduler.running else None
        before = top.num_computed_tokens if top else 0
        self.loop.step()
        self.executor.fail_with = None
        self.scheduler.check()
        if top is not None and not top.is_finished:
            assert top.num_computed_tokens > before, f"{top} ranks highest and did not move"
        salts: dict[int, str] = {}
        for request in self.scheduler.running:
            for block in request.block_table:
                assert salts.setdefault(block, request.cache_salt) == request.cache_salt, "a block is shared between salts"
        stats = self.scheduler.stats
        if self.scheduler.enable_chunked_prefill:
            assert stats.num_context_tokens + stats.num_generation_tokens <= self.scheduler.max_num_batched_tokens
        assert stats.num_context_requests + stats.num_generation_requests <= self.scheduler.max_num_seqs

    def finish(self) -> None:
        for _ in range(100 * len(self.requests) + 1):
            self.step()
            if not self.scheduler.has_work:
                break
        pool = self.scheduler.pool
        assert (pool.num_used, pool.num_free + pool.num_cached) == (0, pool.num_blocks)
        assert set(self.recorder.ended) == set(self.requests)  # that none ends twice is the recorder's to say
        for request in self.requests:
            self.check_end(request)

    def check_end(self, request: Request) -> None:
        room = self.scheduler.max_num_tokens - request.num_prompt_tokens
        alone = expected_tokens(request.prompt_token_ids, min(request.params.max_tokens, room), VOCAB, request.params.seed or 0)
        reason = FinishReason.LENGTH
        if EOS in alone:
            alone, reason = alone[: alone.index(EOS) + 1], FinishReason.STOP
        tokens = self.recorder.tokens.get(request, [])
        assert tokens == request.output_token_ids
        if request.finish_reason is FinishReason.CANCELLED:
            assert request in self.cancelled
            assert tokens == alone[: len(tokens)]
        elif request.finish_reason is FinishReason.ERROR:
            assert request in self.exposed and request.error == "the step failed: RuntimeError: the engine hiccuped"
            assert tokens == alone[: len(tokens)]
        else:
            assert (tokens, request.finish_reason) == (alone, reason)


def random_steps(world: World, num_steps: int, seed: int, load: float) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        while rng.random() < load and len(world.live) < 25:
            live = world.live
            max_tokens, priority = rng.choice([1, 2, 5, 12, 40]), rng.choice([0, 0, 0, 1, -1])
            if live and rng.random() < 0.3:
                world.fork(rng.choice(live), rng.randrange(5), max_tokens, priority)
                continue
            shared = rng.choice(DOCUMENTS)[: rng.randrange(1, 40)]
            tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 9]))]
            world.submit([*shared, *tail], priority=priority, salt=rng.choice(["", "", "t"]), max_tokens=max_tokens)
        if world.live and rng.random() < 0.05:
            world.cancel(rng.choice(world.live if rng.random() < 0.8 else world.requests))
        world.step(fail=rng.random() < 0.003)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """The loop logs a traceback for every step that is made to fail."""
    caplog.set_level(logging.CRITICAL, "forgeline.loop")


def test_10_000_random_steps():
    world = World()
    random_steps(world, 10_000, seed=1, load=0.25)
    world.finish()
    stats, reasons = world.scheduler.stats, [request.finish_reason for request in world.requests]
    assert stats.iteration > 9_000
    assert stats.num_preemptions > 200
    assert stats.prefix_hits > 2_000
    assert world.executor.num_copies > 50
    assert all(reasons.count(reason) > 20 for reason in FinishReason)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
        {"policy": "static"},
        {"policy": "static", "enable_chunked_prefill": False, "enable_prefix_caching": False},
        {"block_size": 1, "num_blocks": 60},
        {"block_size": 32, "num_blocks": 3},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 6},
        {"pace": FixedPace(1.05)},  # a prompt gets MIN_CHUNK tokens a step
        {"pace": FixedPace(2.0), "max_num_batched_tokens": 48},
        {"num_blocks": 15},  # exactly one sequence of max_model_len
    ],
    ids=str,
)
def test_random_steps_under_other_choices(options):
    world = World(**options)
    random_steps(world, 600, seed=2, load=0.25)
    world.finish()


class Machine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shrinks what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_blocks=6, block_size=2, max_num_batched_tokens=5, max_num_seqs=3, max_model_len=12)

    @rule(
        document=st.integers(0, 1), shared=st.integers(1, 11), tail=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        salt=st.sampled_from(["", "t"]), priority=st.integers(0, 1), max_tokens=st.integers(1, 12),
    )  # fmt: skip
    def submit(self, document: int, shared: int, tail: list[int], salt: str, priority: int, max_tokens: int) -> None:
        prompt = [*DOCUMENTS[document][:shared], *tail][:11]
        self.world.submit(prompt, salt=salt, priority=priority, max_tokens=max_tokens)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), seed=st.integers(0, 2), max_tokens=st.integers(1, 6), priority=st.integers(0, 1))
    def fork(self, data: st.DataObject, seed: int, max_tokens: int, priority: int) -> None:
        self.world.fork(data.draw(st.sampled_from(self.world.live)), seed, max_tokens, priority)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.requests)))

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    def teardown(self) -> None:
        self.world.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),  # the machine shares two cores
)  # fmt: skip
