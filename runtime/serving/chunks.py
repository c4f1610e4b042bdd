"""When the new tokens of a stream leave: a response costs server, backend and client the same whether it holds one token or four.

interval   a number: that many tokens in each response
           None: one token while at most STREAMS_PER_CORE streams per core are open, then 2, 3, up to MOST, as long as no response
           is expected later than LONGEST_S after the one before. Where a step takes half of that each token leaves by itself.
Either way the first token leaves at once and the last ones with the end (responses.py).
"""

from __future__ import annotations

import os

STREAMS_PER_CORE = 4
MOST = 4
LONGEST_S = 0.25  # about as long as a reader's eye rests on a word


class Chunks:
    """Shared by the streams of a model, which counts in `streams` how many are open."""

    def __init__(self, interval: int | None, cores: int | None = None) -> None:
        self._interval = interval
        self._streams_at_once = STREAMS_PER_CORE * (cores or len(os.sched_getaffinity(0)))
        self.streams = 0

    def due(self, num_tokens: int, seconds: float) -> bool:
        """Whether a stream sends now its `num_tokens` of the `seconds` since its last response."""
        if self._interval is not None:
            return num_tokens >= self._interval
        wanted = min(MOST, -(-self.streams // self._streams_at_once))
        return num_tokens >= wanted or seconds * (num_tokens + 1) > LONGEST_S * num_tokens
