"""What requests ask for: prompts and output lengths from distributions with a fixed seed, or from a trace file.

Lengths   128 | uniform:min=64,max=256 | normal:mean=128,std=32 | lognormal:median=64,sigma=0.9; each with optional min=, max=
Traces    JSONL, one request a line:
              prompt | text_input | input_ids | input_length    the prompt, or how long a random one is
              output_length | output_tokens | max_tokens        tokens to generate
              timestamp                                         milliseconds (Mooncake's and aiperf's traces)
              hash_ids                                          one id per 512 prompt tokens; equal ids, equal tokens
          `task_id` is accepted and not used; any other key is refused.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.errors import InvalidRequest

HASH_BLOCK = 512  # tokens per hash id
MAX_WORDS = 4096  # of the vocabulary, in random text
FIRST_ORDINARY_ID = 64  # random prompts leave out what tokenizers put first: special tokens
_KEYS = {
    "length": {"value"},
    "uniform": {"min", "max"},
    "normal": {"mean", "std", "min", "max"},
    "lognormal": {"median", "sigma", "min", "max"},
}
_NEEDED = {"uniform": {"min", "max"}, "normal": {"mean", "std"}, "lognormal": {"median", "sigma"}}
_PROMPT, _OUTPUT = ("prompt", "text_input", "input_ids", "input_length"), ("output_length", "output_tokens", "max_tokens")
_TRACE_KEYS = {*_PROMPT, *_OUTPUT, "timestamp", "hash_ids", "task_id"}


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Work:
    """One request to be made."""

    prompt: str | list[int]
    max_tokens: int
    timestamp: float | None = None  # seconds, in a trace


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, at least 1. `parse` reads the form above, which `str` gives back."""

    text: str
    kind: str
    values: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        if text.isdecimal() and int(text) > 0:
            return cls(text, "length", {"value": float(text)})
        kind, _, rest = text.partition(":")
        values: dict[str, float] = {}
        try:
            for pair in rest.split(","):
                name, _, value = pair.partition("=")
                values[name] = float(value)
        except ValueError:
            values = {}
        if kind not in _NEEDED or not _NEEDED[kind] <= set(values) <= _KEYS[kind] or not all(map(math.isfinite, values.values())):
            raise InvalidRequest(
                f"the length {text!r} must be a number above 0, uniform:min=A,max=B, normal:mean=A,std=B or "
                "lognormal:median=A,sigma=B, the last two with min= and max= if wanted"
            )
        low, high = values.get("min", 1.0), values.get("max", math.inf)
        if not 1 <= low <= high or values.get("std", 0) < 0 or values.get("sigma", 0) < 0 or values.get("median", 1) <= 0:
            raise InvalidRequest(f"the length {text!r} needs 1 ≤ min ≤ max, a median above 0, and std and sigma of at least 0")
        return cls(text, kind, values)

    def draw(self, rng: random.Random) -> int:
        v = self.values
        if self.kind == "length":
            return int(v["value"])
        if self.kind == "uniform":
            return rng.randint(int(v["min"]), int(v["max"]))
        drawn = rng.gauss(v["mean"], v["std"]) if self.kind == "normal" else rng.lognormvariate(math.log(v["median"]), v["sigma"])
        return max(1, round(min(max(drawn, v.get("min", 1.0)), v.get("max", math.inf))))

    def __str__(self) -> str:
        return self.text


class Prompts:
    """Random prompts of exact length: token ids, or text that the tokenizer turns into that many ids (special tokens counted).

    Two prompts share nothing but the first `shared` tokens, so a prefix cache finds exactly those.
    """

    def __init__(self, *, vocab_size: int, tokenizer: Encoder | None, as_text: bool, shared: int = 0, seed: int = 0) -> None:
        if as_text and tokenizer is None:
            raise InvalidRequest("prompts as text need a tokenizer; name the engine the server runs, e.g. `runtime bench ENGINE`")
        self._rng = random.Random(seed)
        self._low = min(FIRST_ORDINARY_ID, vocab_size // 2)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._as_text = as_text
        self._words = _words(tokenizer, self._low, vocab_size) if as_text and tokenizer is not None else []
        self._prefix = self._draw(self._rng, shared)

    def make(self, length: int) -> str | list[int]:
        ids = self._prefix[:length] + self._draw(self._rng, length - min(len(self._prefix), length))
        return self._to_text(ids) if self._as_text else ids

    def from_hashes(self, hash_ids: Sequence[int], length: int) -> str | list[int]:
        if self._as_text:
            raise InvalidRequest("a trace with hash_ids needs prompts of token ids; run it in process, without --url")
        ids = [token for block in hash_ids for token in self._draw(random.Random(f"block-{block}"), HASH_BLOCK)]
        if len(ids) < length:
            raise InvalidRequest(f"{len(hash_ids)} hash_ids cover {len(ids)} tokens but input_length is {length}")
        return ids[:length]

    def _draw(self, rng: random.Random, count: int) -> list[int]:
        if self._words:
            return [rng.choice(self._words) for _ in range(count)]
        return [rng.randrange(self._low, self._vocab_size) for _ in range(count)]

    def _to_text(self, ids: list[int]) -> str:
        """Text of len(ids) tokens: words whose ids stay apart, shortened until the special tokens fit in."""
        assert self._tokenizer is not None
        length, keep = len(ids), len(ids)
        while keep > 0:
            text = self._tokenizer.decode(ids[:keep])
            excess = len(self._tokenizer.encode(text)) - length
            if excess <= 0:
                return text
            keep -= excess
        raise InvalidRequest(f"no text has {length} tokens with this tokenizer, its special tokens take them all; ask for more")


def _words(tokenizer: Encoder, low: int, vocab_size: int) -> list[int]:
    """Ids of whole words with a space before them: such ids survive decoding and encoding, in any order."""
    found: list[int] = []
    for token in range(low, vocab_size):
        word = tokenizer.decode([token]).strip()
        if re.fullmatch(r"[a-z]{3,}", word):
            if tokenizer.encode(f"a {word} {word}", add_special_tokens=False)[-2:] == [token, token]:
                found.append(token)
            if len(found) == MAX_WORDS:
                break
    if len(found) < 16:
        raise InvalidRequest(f"the tokenizer has {len(found)} whole words, too few for random text; use a trace with prompts")
    return found


def random_work(prompts: Prompts, count: int, inputs: Lengths, outputs: Lengths, *, seed: int = 0) -> list[Work]:
    rng = random.Random(f"lengths-{seed}")
    return [Work(prompts.make(inputs.draw(rng)), outputs.draw(rng)) for _ in range(count)]


def read_trace(path: Path, prompts: Prompts, *, default_output: Lengths, seed: int = 0, limit: int | None = None) -> list[Work]:
    """Raises  InvalidRequest with the line's number for what is not understood."""
    rng = random.Random(f"lengths-{seed}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"the trace {path} cannot be read ({error.strerror})") from error
    works = [_work(entry, f"{path}:{number}", prompts, default_output, rng) for number, entry in _entries(path, lines, limit)]
    if not works:
        raise InvalidRequest(f"the trace {path} holds no request")
    return works


def _entries(path: Path, lines: list[str], limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    taken = 0
    for number, line in enumerate(lines, 1):
        if not line.strip() or taken == limit:
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{path}:{number} is not JSON ({error})") from error
        if not isinstance(entry, dict) or not set(entry) <= _TRACE_KEYS:
            raise InvalidRequest(f"{path}:{number} must be an object with keys among {', '.join(sorted(_TRACE_KEYS))}")
        taken += 1
        yield number, entry


def _work(entry: dict[str, Any], place: str, prompts: Prompts, default_output: Lengths, rng: random.Random) -> Work:
    given = [name for name in _PROMPT if name in entry and not (name == "input_length" and "prompt" in entry)]
    if len(given) != 1:
        raise InvalidRequest(f"{place} must have exactly one of {', '.join(_PROMPT)}")
    value = entry[given[0]]
    if given[0] == "input_length":
        prompt = prompts.from_hashes(entry["hash_ids"], int(value)) if "hash_ids" in entry else prompts.make(int(value))
    else:
        prompt = value
    outputs = [entry[name] for name in _OUTPUT if name in entry]
    timestamp = entry.get("timestamp")
    return Work(prompt, int(outputs[0]) if outputs else default_output.draw(rng), None if timestamp is None else timestamp / 1e3)
