"""What was seen of one request, on the client's clock.

TTFT   arrival to the first chunk that holds a token         E2E   arrival to the last chunk
TPOT   (E2E − TTFT) / (output tokens − 1)                     ITL   each gap between two chunks; one chunk may hold several tokens
Units  seconds of the client's monotonic clock, counts in tokens
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class Record:
    index: int
    arrival: float  # open loop: when it was due, so that a generator that lags cannot hide waiting; closed loop: when it was sent
    max_tokens: int
    sent: float = 0.0
    moments: list[float] = field(default_factory=list)  # of chunks that hold tokens
    counts: list[int] = field(default_factory=list)  # tokens in each
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # None: the server does not say
    finish_reason: str = ""
    error: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)  # queue, prefill, decode as the engine saw them

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.moments)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.moments[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """None when there is no second token."""
        tokens = self.num_output_tokens
        return (self.e2e - self.ttft) / (tokens - 1) if tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.moments)]
