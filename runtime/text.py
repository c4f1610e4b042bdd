"""One output's text as it streams: detokenized, cut at its first stop string, never showing part of one.

Which stop string ends a text does not depend on how the text was cut into tokens: the one that starts earliest, and of those
starting together the shortest, being complete first. So the result is the text up to the least `text.find(stop)`. Characters
that may begin a stop string are held back until that is decided.

Units    a token counts when it is pushed, also while its text is held back. The last one to count is the one that completed the
         stop string; in the rare case that another stop string might have begun earlier, the one that settled it
Source   vLLM and OpenAI likewise leave the stop string out unless asked; vLLM takes the first one in the list that has appeared
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.detokenizer import HasPieces, IncrementalDetokenizer
from runtime.request import SamplingParams

__all__ = ["IncrementalDetokenizer", "StopStrings", "TextDelta", "TextStream"]


@dataclass(frozen=True)
class TextDelta:
    text: str
    token_count: int  # of the tokens pushed, those that count: all, or up to the one that settled the stop
    stopped: bool  # a stop string ended the text


def _borders(pattern: str) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt)."""
    borders = [0, 0]
    length = 0
    for char in pattern[1:]:
        while length and pattern[length] != char:
            length = borders[length]
        length += pattern[length] == char
        borders.append(length)
    return borders


class StopStrings:
    """Finds the first stop string in text that arrives in pieces; O(1) per character and stop string."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self.stopped = False
        self._match: tuple[int, int] | None = None  # (start, length) of the best complete one; another may yet start earlier
        self._include = include_in_output
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text so far ends with
        self._first = re.compile("|".join(re.escape(char) for char in sorted({stop[0] for stop in stops})) or "(?!)")
        self._held = ""
        self._num_released = 0  # characters before `_held`
        self._end = 0  # characters seen

    def push(self, text: str, armed: bool = True) -> str:
        """The text that became certain. While not `armed` no stop string can be completed."""
        if self.stopped:
            return ""
        self._held += text
        offset = self._end
        index = 0
        while index < len(text):
            if not any(self._matched):  # skip to where a stop string can begin
                found = self._first.search(text, index)
                if found is None:
                    break
                index = found.start()
            self._end = offset + index + 1
            self._advance(text[index], armed)
            index += 1
            if self._match is not None and self._earliest_open() >= self._match[0]:
                return self._stop()
        self._end = offset + len(text)
        return self._release(self._earliest_open())

    def flush(self) -> str:
        """The text ends here: no stop string can begin any earlier than a complete one."""
        if self.stopped:
            return ""
        return self._stop() if self._match is not None else self._release(self._end)

    def _advance(self, char: str, armed: bool) -> None:
        for i, (stop, borders) in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = borders[length]
            length += stop[length] == char
            if length == len(stop):
                candidate = (self._end - length, length)
                if armed and (self._match is None or candidate < self._match):
                    self._match = candidate
                length = borders[length]
            self._matched[i] = length

    def _earliest_open(self) -> int:
        """Where the earliest unfinished stop string starts; the end of the text when there is none."""
        return self._end - max(self._matched, default=0)

    def _release(self, end: int) -> str:
        count = end - self._num_released
        text, self._held = self._held[:count], self._held[count:]
        self._num_released = end
        return text

    def _stop(self) -> str:
        assert self._match is not None
        start, length = self._match
        self.stopped = True
        text = self._release(start + length if self._include else start)
        self._held = ""
        return text


class TextStream:
    """Tokens in, text out, for one request. `min_tokens` tokens must be out before a stop string counts."""

    def __init__(self, params: SamplingParams, tokenizer: HasPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_in_output) if params.stop else None
        self._silent = frozenset() if params.include_stop_in_output else frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finished: bool = False) -> TextDelta:
        """Tokens that stop a request (`stop_token_ids`) add no text unless stop strings are included in the output."""
        if self._stops is None:
            text = self._detokenizer.push([id for id in token_ids if id not in self._silent])
            if finished:
                text += self._detokenizer.flush()
            return TextDelta(text, len(token_ids), False)
        text, count = "", 0
        for id in token_ids:
            if self._stops.stopped:
                break
            count += 1
            self._num_tokens += 1
            text += self._find_stop("" if id in self._silent else self._detokenizer.push([id]))
        if finished:
            text += self._find_stop(self._detokenizer.flush()) + self._stops.flush()
        return TextDelta(text, count, self._stops.stopped)

    def _find_stop(self, text: str) -> str:
        assert self._stops is not None
        return self._stops.push(text, armed=self._num_tokens >= self._min_tokens)
