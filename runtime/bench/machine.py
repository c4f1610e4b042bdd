"""What this machine can do at most: memory read bandwidth by working-set size, fp32 and int8 operations per second.

Measured once with every core this process may use and kept in $XDG_CACHE_HOME/forgeline/machine/, one file per machine name.
Every figure is the best of several tries, since other work can only lower it. An engine that is seen to go faster than a figure
has proven it too low: `Peaks.raised` lifts it (an old measurement on a busy machine, or units that machine_code.py does not use,
such as AMX).

Units    bytes per second, operations per second (a multiply-add is two), working sets in bytes
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.bench.files import replace_text
from runtime.bench.machine_code import Kernel, fp32_kernel, int8_kernel, read_kernel
from runtime.config import machine_name
from runtime.contract import cache_root

log = logging.getLogger("forgeline.bench")

WORKING_SETS = tuple(1 << power for power in range(19, 30))  # 512 KiB … 512 MiB over all cores
TRIES = 7
TRY_S = 0.02
SCHEMA = 1
Function = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Peaks:
    machine: str
    read_bandwidth: tuple[tuple[int, float], ...]  # (working set, bytes/s), sizes ascending
    fp32_ops: float  # 0: not known
    int8_ops: float
    kernels: tuple[str, ...] = ()
    raised_by: float = 1.0  # > 1: an engine went that much faster than what was measured

    def bandwidth_for(self, num_bytes: float) -> float:
        """Of the largest measured working set that is no larger: never too low for `num_bytes`. 0: not known."""
        if not self.read_bandwidth:
            return 0.0
        fitting = [rate for size, rate in self.read_bandwidth if size <= num_bytes]
        return fitting[-1] if fitting else self.read_bandwidth[0][1]

    @property
    def memory_bandwidth(self) -> float:
        """Of the largest working set: main memory's."""
        return self.read_bandwidth[-1][1] if self.read_bandwidth else 0.0

    def raised(self, factor: float) -> Peaks:
        assert factor >= 1
        return dataclasses.replace(
            self,
            read_bandwidth=tuple((size, rate * factor) for size, rate in self.read_bandwidth),
            fp32_ops=self.fp32_ops * factor,
            int8_ops=self.int8_ops * factor,
            raised_by=self.raised_by * factor,
        )


def peaks(*, again: bool = False) -> Peaks:
    """Of this machine: from the cache, else measured now (a few seconds) and cached."""
    name = machine_name()
    if not again and (found := load_cached()) is not None:
        return found
    measured = measure(name)
    store(measured)
    return measured


def load_cached() -> Peaks | None:
    name = machine_name()
    try:
        data = json.loads(_cache_file(name).read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA or data["machine"] != name:
            return None
        data["read_bandwidth"] = tuple((int(size), float(rate)) for size, rate in data["read_bandwidth"])
        data["kernels"] = tuple(data["kernels"])
        return Peaks(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(found: Peaks) -> None:
    """Into the cache, by a rename; a cache that cannot be written costs a measurement next time."""
    path = _cache_file(found.machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"schema": SCHEMA, **dataclasses.asdict(found)}, indent=2))
    except OSError as error:
        log.warning("the machine's peaks cannot be cached in %s (%s)", path.parent, error)


def measure(name: str) -> Peaks:
    threads = len(os.sched_getaffinity(0))
    used: list[str] = []

    def load(kernel: Kernel | None) -> Function | None:
        try:
            function = kernel.load() if kernel is not None else None
        except OSError as error:
            log.warning("this system does not let memory be executed (%s), so the machine's peaks are not known", error)
            return None
        if kernel is not None:
            used.append(kernel.name)
        return function

    def arithmetic(kernel: Kernel | None) -> float:
        function = load(kernel)
        return _best_rate(function, [0] * threads, 1000, 1000 * kernel.work_per_iteration) if kernel and function else 0.0

    bandwidth: list[tuple[int, float]] = []
    if (read := read_kernel()) is not None and (function := load(read)) is not None:
        blocks = [np.ones(WORKING_SETS[-1] // threads, np.uint8) for _ in range(threads)]
        pointers = [block.ctypes.data for block in blocks]
        for size in WORKING_SETS:
            iterations = size // threads // read.work_per_iteration
            bandwidth.append((size, _best_rate(function, pointers, iterations, iterations * read.work_per_iteration)))
    for index in range(len(bandwidth) - 2, -1, -1):  # what a larger set can do a smaller one can
        bandwidth[index] = (bandwidth[index][0], max(bandwidth[index][1], bandwidth[index + 1][1]))
    fp32_ops, int8_ops = arithmetic(fp32_kernel()), arithmetic(int8_kernel())
    return Peaks(name, tuple(bandwidth), fp32_ops, max(fp32_ops, int8_ops), tuple(used))


def _best_rate(function: Function, pointers: list[int], iterations: int, work_per_round: int) -> float:
    """Work per second of one thread per pointer, all at once, in tries of about TRY_S."""
    rounds = 1
    while (seconds := _together(function, pointers, iterations, rounds)) < TRY_S:
        rounds = max(rounds + 1, min(rounds * 16, int(rounds * 1.2 * TRY_S / max(seconds, 1e-7))))
    seconds = min([seconds, *(_together(function, pointers, iterations, rounds) for _ in range(TRIES))])
    return len(pointers) * rounds * work_per_round / seconds


def _together(function: Function, pointers: list[int], iterations: int, rounds: int) -> float:
    """Seconds from the first start to the last end, on the threads' own clocks."""
    barrier = threading.Barrier(len(pointers))
    spans: list[tuple[float, float]] = []

    def run(pointer: int) -> None:
        barrier.wait()
        start = time.perf_counter()
        function(pointer, iterations, rounds)
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=run, args=(pointer,)) for pointer in pointers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _cache_file(name: str) -> Path:
    return cache_root() / "machine" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
