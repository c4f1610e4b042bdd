"""When the load generator sends: distributions against theory, and the driver on a clock that only moves when it waits."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy import stats

from runtime.bench.arrivals import Arrivals, closed_loop, open_loop, replay
from runtime.bench.driver import Finished, drive
from runtime.bench.records import Record
from runtime.bench.workload import Work
from runtime.errors import InvalidRequest

COUNT = 4000
P_VALUE = 0.01  # seeds are fixed, so a right process cannot fail by chance tomorrow


@dataclass
class Simulation:
    """Clock and client in one: every request takes `service` seconds, or what `services` says; time passes in `wait` only."""

    service: float = 0.0
    send_cost: float = 0.0
    time: float = 100.0
    running: list[tuple[float, int, Record]] = field(default_factory=list)
    most_running: int = 0

    def now(self) -> float:
        return self.time

    def start(self, record: Record, work: Work, finished: Finished) -> None:
        self.time += self.send_cost
        heapq.heappush(self.running, (self.time + self.service, record.index, record))
        self.most_running = max(self.most_running, len(self.running))

    def wait(self, finished: Finished, timeout: float | None) -> Record | None:
        until = float("inf") if timeout is None else self.time + timeout
        if self.running and self.running[0][0] <= until:
            self.time, _, record = heapq.heappop(self.running)
            record.moments.append(self.time)
            record.counts.append(1)
            return record
        assert timeout is not None, "the driver waits for ever"
        self.time = until
        return None

    def complete(self, record: Record) -> None:
        record.finish_reason = "length"

    def close(self) -> None: ...


def simulate(arrivals: Arrivals, count: int, **options: float) -> tuple[list[Record], Simulation]:
    simulation = Simulation(**options)  # type: ignore[arg-type]
    return drive(simulation, [Work([1], 1)] * count, arrivals, clock=simulation), simulation  # type: ignore[arg-type]


def gaps(moments: list[float]) -> np.ndarray:
    return np.diff([100.0, *moments])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sent_requests_are_a_poisson_process(seed: int) -> None:
    records, _ = simulate(open_loop(COUNT, 25.0, seed=seed), COUNT)
    sent = gaps([record.sent for record in records])
    assert stats.kstest(sent, stats.expon(scale=1 / 25).cdf).pvalue > P_VALUE
    # given their number, Poisson arrivals are uniform over the time they span
    moments = np.cumsum(sent)
    assert stats.kstest(moments[:-1] / moments[-1], stats.uniform.cdf).pvalue > P_VALUE
    assert stats.kstest(sent, stats.expon(scale=1 / 29).cdf).pvalue < P_VALUE, "the test would not notice a wrong rate"


@pytest.mark.parametrize("burstiness", [0.25, 3.0])
def test_sent_requests_have_gamma_gaps(burstiness: float) -> None:
    records, _ = simulate(open_loop(COUNT, 25.0, burstiness=burstiness, seed=4), COUNT)
    sent = gaps([record.sent for record in records])
    assert stats.kstest(sent, stats.gamma(burstiness, scale=1 / (25 * burstiness)).cdf).pvalue > P_VALUE
    assert stats.kstest(sent, stats.expon(scale=1 / 25).cdf).pvalue < P_VALUE


def test_seeds_repeat_and_differ() -> None:
    assert open_loop(8, 2.0, seed=1).times == open_loop(8, 2.0, seed=1).times
    assert open_loop(8, 2.0, seed=1).times != open_loop(8, 2.0, seed=2).times


def test_closed_loop_sends_when_a_slot_is_free() -> None:
    records, simulation = simulate(closed_loop(2), 5, service=3.0)
    assert [record.sent - 100 for record in records] == [0, 0, 3, 3, 6]
    assert [record.arrival for record in records] == [record.sent for record in records]
    assert simulation.most_running == 2


def test_open_loop_does_not_wait_for_answers_and_counts_from_the_moment_a_request_was_due() -> None:
    times = (0.0, 1.0, 1.5)
    records, simulation = simulate(Arrivals("replay", times, None), 3, service=10.0)
    assert [record.sent - 100 for record in records] == [0, 1, 1.5]
    assert simulation.most_running == 3
    limited, _ = simulate(Arrivals("replay", times, 1), 3, service=10.0)
    assert [record.sent - 100 for record in limited] == [0, 10, 20]
    assert [record.e2e for record in limited] == [10, 19, 28.5]  # waiting for the slot is part of it


def test_a_generator_that_lags_shows_in_sent_and_in_latency() -> None:
    records, _ = simulate(Arrivals("replay", (0.0, 0.5, 1.0), None), 3, service=1.0, send_cost=2.0)
    assert [record.sent - record.arrival for record in records] == [0, 1.5, 3]
    assert records[2].ttft == 6  # due at 1, sent at 4, which takes until 6, done at 7


def test_replay_starts_at_its_first_timestamp_and_speeds_up() -> None:
    assert replay([5.0, 6.0, 9.0], speed=2.0).times == (0.0, 0.5, 2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: open_loop(1, 0.0), "request rate is 0.0"),
        (lambda: open_loop(1, 1.0, burstiness=-1.0), "burstiness is -1.0"),
        (lambda: closed_loop(0), "concurrency is 0"),
        (lambda: replay([0.0, None]), "request 1 of the trace has no timestamp"),
        (lambda: replay([1.0, 0.0]), "go back in time"),
        (lambda: replay([0.0], speed=0.0), "speed is 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()  # type: ignore[operator]
