"""What is wrong with a prompt, found before anything is spent on it. Knows no tokenizer and no engine.

Raises   InvalidRequest, PromptTooLong
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

from runtime.errors import InvalidRequest, PromptTooLong


def check_length(text: str, max_model_len: int, max_token_bytes: Callable[[], int]) -> None:
    """Refuse text that cannot fit by its length: a second per megabyte of tokenizing would hold up everybody.

    `max_token_bytes` is asked for only when the text has more characters than fit tokens.
    """
    if len(text) <= max_model_len:
        return
    num_bytes, longest = len(text.encode("utf-8", "surrogatepass")), max_token_bytes()
    if num_bytes > max_model_len * longest:
        raise PromptTooLong(
            f"the prompt has {num_bytes} bytes but max_model_len={max_model_len} tokens of at most {longest} bytes hold "
            f"{max_model_len * longest}; shorten the prompt, or build with a larger --max-model-len where the model allows it"
        )


def checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """The prompt as a list of int."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidRequest(f"the prompt is of type {type(prompt).__name__} but must be text or a list of token ids")
    ids = list(prompt)
    if not set(map(type, ids)) <= {int}:
        for id in ids:
            if isinstance(id, bool) or not isinstance(id, Integral):
                raise InvalidRequest(f"the prompt has the token id {id!r} but must be made of whole numbers")
        ids = [int(id) for id in ids]
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise InvalidRequest(f"the prompt has token id {wrong} but the model's are in [0, {vocab_size}); check the tokenizer")
    return ids
