"""Text to calibrate with: a plain text file, JSON lines of texts, prompts or chats, or the built-in sample.

    .jsonl, .json, .ndjson   one object per line: {"text": …} or {"prompt": …}, {"messages": [{"role", "content"}, …]} through the
                             model's chat template, or just a string
    any other                the whole file

Windows   `context` tokens each, at most `samples`; with BOS in front where the model's tokenizer puts it
Raises    BuildError for an empty or too short text, lines that are not UTF-8 or not such objects
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.data import calibration_text
from builder.observe import windows_of
from runtime.errors import BuildError, ForgelineError
from runtime.tokenizer import Tokenizer

CONTEXT = 512
SAMPLES = 32
MIN_TOKENS = 128
LINES = (".jsonl", ".json", ".ndjson")  # suffixes, in either case

Entry = str | list[dict[str, Any]]  # a text, or a chat


@dataclass(frozen=True)
class CalibrationSet:
    windows: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for window in self.windows:
            digest.update(np.array([len(window), *window], np.int64).tobytes())
        return digest.hexdigest()


def load(path: Path | None, tokenizer: Tokenizer, *, samples: int = SAMPLES, context: int = CONTEXT) -> CalibrationSet:
    """`path` None: the built-in text."""
    entries = [(0, calibration_text())] if path is None else read(path)
    token_ids: list[int] = []
    for number, entry in entries:
        try:
            text = entry if isinstance(entry, str) else tokenizer.apply_chat_template(entry, add_generation_prompt=False)
        except ForgelineError as error:
            raise BuildError(f"line {number} of the calibration data {path} cannot be rendered: {error}") from error
        try:
            token_ids += tokenizer.encode(text, add_special_tokens=False)
        except ForgelineError as error:
            raise BuildError(f"the calibration data {path} cannot be tokenized: {error}") from None
    if len(token_ids) < MIN_TOKENS:
        raise BuildError(
            f"the calibration text {path} has {len(token_ids)} tokens but at least {MIN_TOKENS} are needed; give a longer one, "
            "or leave --calibration-data out to use the built-in text"
        )
    windows = list(windows_of(token_ids, context, added_bos(tokenizer)))
    step = max(1, len(windows) // samples)  # spread over the whole text
    return CalibrationSet(tuple(tuple(window) for window in windows[::step][:samples]))


def added_bos(tokenizer: Tokenizer) -> int | None:
    """The BOS token when the tokenizer puts it before a text by itself: then the model was trained with it."""
    ids = tokenizer.encode("a")
    return tokenizer.bos_token_id if ids and ids[0] == tokenizer.bos_token_id else None


def read(path: Path) -> Sequence[tuple[int, Entry]]:
    """What the file holds, each with the number of its line.  Raises  BuildError, as above but for the length"""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BuildError(
            f"the calibration data {path} cannot be read ({error.strerror}); give a readable .txt or .jsonl file"
        ) from error
    if lines:
        lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BuildError(
                f"line {number} of the calibration data {path} is not UTF-8 (byte {error.start} is 0x{line[error.start]:02X}); "
                "convert the file to UTF-8"
            ) from None
    if path.suffix.lower() not in LINES:
        return [(1, "".join(texts))]
    return [(number, _entry(path, number, line)) for number, line in enumerate(texts, 1) if line.strip()]


def _entry(path: Path, number: int, line: str) -> Entry:
    where = f"line {number} of the calibration data {path}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise BuildError(f"{where} is not JSON ({reason}); a {path.suffix} file has one JSON value per line") from None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for key in ("text", "prompt"):
            if isinstance(entry.get(key), str):
                return str(entry[key])
        if isinstance(entry.get("messages"), list):
            for index, message in enumerate(entry["messages"]):
                _check_message(message, f"{where}: messages[{index}]")
            return list(entry["messages"])
        for key, kind in (("text", "a string"), ("prompt", "a string"), ("messages", "a list")):
            if key in entry:
                raise BuildError(f'{where} has a "{key}" of type {type(entry[key]).__name__} but it must be {kind}')
    raise BuildError(f'{where} has no "text", "prompt" or "messages"; give each line one of them')


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise BuildError(f"{where} is of type {type(message).__name__} but must be an object with a role and content")
    if not isinstance(message.get("role"), str):
        raise BuildError(f'{where} has no "role", a string such as "user"')
    content = message.get("content")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        raise BuildError(f'{where} has no "content", a string or a list of parts')
