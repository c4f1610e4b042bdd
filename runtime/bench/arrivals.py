"""When requests arrive: all at once as slots come free (closed loop), or at moments fixed beforehand (open loop).

    closed loop   `concurrency` requests in flight; the next starts when one ends
    poisson       open loop, exponential gaps of mean 1 / rate
    gamma         open loop, gamma gaps of the same mean; `burstiness` is the shape: 1 is Poisson, below 1 comes in bursts
    replay        open loop, the timestamps of a trace, sped up by `speed`

Units    seconds since the start of the run
Source   the meaning of burstiness is vLLM's: shape = burstiness, scale = 1 / (rate · burstiness)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.errors import InvalidRequest


@dataclass(frozen=True)
class Arrivals:
    """`times` None: closed loop. `concurrency` None: no limit on requests in flight."""

    kind: str
    times: tuple[float, ...] | None
    concurrency: int | None
    rate: float | None = None  # requests per second, as asked for
    burstiness: float | None = None

    @property
    def is_open_loop(self) -> bool:
        return self.times is not None


def closed_loop(concurrency: int) -> Arrivals:
    if concurrency < 1:
        raise InvalidRequest(f"concurrency is {concurrency} but must be at least 1")
    return Arrivals("closed loop", None, concurrency)


def open_loop(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0, concurrency: int | None = None) -> Arrivals:
    """`count` arrivals of a renewal process; the first comes one gap after the start."""
    for name, value in (("request rate", rate), ("burstiness", burstiness)):
        if not 0 < value < float("inf"):
            raise InvalidRequest(f"{name} is {value} but must be a finite number above 0")
    gaps = np.random.Generator(np.random.PCG64(seed)).gamma(burstiness, 1.0 / (rate * burstiness), count)
    kind = "poisson" if burstiness == 1.0 else "gamma"
    return Arrivals(kind, tuple(np.cumsum(gaps).tolist()), concurrency, rate, burstiness)


def replay(timestamps: Sequence[float | None], *, speed: float = 1.0, concurrency: int | None = None) -> Arrivals:
    """The moments of a trace, the first one at 0."""
    if any(moment is None for moment in timestamps):
        missing = next(index for index, moment in enumerate(timestamps) if moment is None)
        raise InvalidRequest(f"request {missing} of the trace has no timestamp; give --request-rate or --concurrency instead")
    moments = [float(moment) for moment in timestamps if moment is not None]
    if sorted(moments) != moments:
        raise InvalidRequest("the timestamps of the trace go back in time; sort its lines by timestamp")
    if not speed > 0:
        raise InvalidRequest(f"speed is {speed} but must be above 0")
    first = moments[0] if moments else 0.0
    return Arrivals("replay", tuple((moment - first) / speed for moment in moments), concurrency)
