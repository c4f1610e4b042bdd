"""Runs a workload through a client: sends what is due, keeps what came back. One thread; clients answer from theirs.

Nothing here happens per token: a client appends two numbers per chunk to a Record and hands it over once, at its end.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from runtime.bench.arrivals import Arrivals
from runtime.bench.records import Record
from runtime.bench.workload import Work

Finished = queue.SimpleQueue[Record]


class Client(Protocol):
    """Implementations: InProcessClient, TritonGrpcClient, TritonHttpClient."""

    def start(self, record: Record, work: Work, finished: Finished) -> None:
        """Send a request without waiting; put `record` into `finished` at its end, also when it fails."""
        ...

    def complete(self, record: Record) -> None:
        """Fill in what was put off until the run was over, so that it did not disturb it."""
        ...

    def close(self) -> None: ...


class WallClock:
    """Real time. Tests have one of their own."""

    now = staticmethod(time.perf_counter)

    def wait(self, finished: Finished, timeout: float | None) -> Record | None:
        """The next request to end; None when `timeout` seconds pass before one does."""
        try:
            return finished.get(timeout=timeout)
        except queue.Empty:
            return None


class Progress:
    """One line on a terminal; silent elsewhere."""

    PERIOD_S = 0.2

    def __init__(self, total: int, label: str, *, quiet: bool = False) -> None:
        self._total, self._label = total, label
        self._on = not quiet and sys.stderr.isatty()
        self._shown = -self.PERIOD_S
        self._begin = time.monotonic()
        self._tokens = 0

    def update(self, done: int, record: Record) -> None:
        if not self._on:
            return
        self._tokens += record.num_output_tokens
        now = time.monotonic()
        if now - self._shown >= self.PERIOD_S or done == self._total:
            self._shown = now
            filled = 24 * done // self._total
            rate = self._tokens / max(now - self._begin, 1e-9)
            line = f"\r{self._label:<12}|{'█' * filled}{' ' * (24 - filled)}| {done}/{self._total} {rate:.0f} tok/s"
            print(line, end="\n" if done == self._total else "", file=sys.stderr, flush=True)


def drive(
    client: Client,
    works: Sequence[Work],
    arrivals: Arrivals,
    *,
    clock: WallClock | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """All requests, in the order of `works`. Moments are of `clock`; those of an open loop count from the moment it was due."""
    clock = clock or WallClock()
    finished: Finished = queue.SimpleQueue()
    limit = arrivals.concurrency or len(works)
    times = arrivals.times
    assert times is None or len(times) == len(works)
    records: list[Record] = []
    done = 0
    begin = clock.now()
    while done < len(works):
        now = clock.now()
        while len(records) < len(works) and len(records) - done < limit:
            index = len(records)
            due = begin + times[index] if times is not None else now
            if due > now:
                break
            record = Record(index, due, works[index].max_tokens)
            records.append(record)
            record.sent = clock.now()
            if times is None:
                record.arrival = record.sent
            client.start(record, works[index], finished)
            now = clock.now()
        waiting_for_time = times is not None and len(records) < len(works) and len(records) - done < limit
        timeout = max(0.0, begin + times[len(records)] - clock.now()) if waiting_for_time and times is not None else None
        ended = clock.wait(finished, timeout)
        if ended is not None:
            done += 1
            if progress is not None:
                progress.update(done, ended)
    for record in records:
        client.complete(record)
    return records
