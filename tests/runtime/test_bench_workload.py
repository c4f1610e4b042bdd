"""Prompts and lengths of the load generator; text of exact token counts with the tiny Llama's tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.workload import Lengths, Prompts, Work, random_work, read_trace
from runtime.errors import InvalidRequest
from runtime.tokenizer import Tokenizer

TINY = Path(__file__).parent.parent / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def ids(**options: Any) -> Prompts:
    return Prompts(**{"vocab_size": 1000, "tokenizer": None, "as_text": False, **options})


def draws(text: str, count: int = 2000) -> list[int]:
    rng, lengths = random.Random(0), Lengths.parse(text)
    return [lengths.draw(rng) for _ in range(count)]


def test_length_distributions() -> None:
    assert set(draws("17", 10)) == {17}
    assert set(draws("uniform:min=3,max=5")) == {3, 4, 5}
    normal = draws("normal:mean=100,std=10")
    assert abs(sum(normal) / len(normal) - 100) < 1 and 5 < sum(value > 110 for value in normal) / 20 < 30
    lognormal = sorted(draws("lognormal:median=24,sigma=0.9,max=200"))
    assert 22 <= lognormal[1000] <= 26 and lognormal[-1] == 200 and lognormal[0] >= 1
    assert sum(value > 24 * 2.46 for value in lognormal) / 2000 == pytest.approx(0.159, abs=0.03)  # one sigma


@pytest.mark.parametrize(
    "text", ["0", "-3", "x", "uniform:min=5", "uniform:min=5,max=3", "normal:mean=1,std=-1", "lognormal:median=0,sigma=1",
             "uniform:min=1,max=2,mean=1", "normal:mean=1,std=nan", "uniform:min=0,max=4"],
)  # fmt: skip
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="length"):
        Lengths.parse(text)


def test_random_prompts_share_exactly_the_prefix() -> None:
    prompts = ids(shared=6)
    first, second = prompts.make(10), prompts.make(12)
    assert len(first) == 10 and len(second) == 12
    assert first[:6] == second[:6] and first[6:] != second[6:10]
    assert len(ids(shared=6).make(4)) == 4
    assert all(64 <= token < 1000 for token in first)
    assert ids(seed=1).make(8) == ids(seed=1).make(8) != ids(seed=2).make(8)


def test_text_prompts_have_exactly_the_tokens_asked_for(tokenizer: Tokenizer) -> None:
    prompts = ids(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, as_text=True, shared=5)
    texts = [prompts.make(length) for length in (8, 9, 31, 64)]
    assert [len(tokenizer.encode(text)) for text in texts] == [8, 9, 31, 64]  # type: ignore[arg-type]
    encoded = [tokenizer.encode(text) for text in texts]  # type: ignore[arg-type]
    assert encoded[0][:5] == encoded[3][:5] and encoded[2][8:] != encoded[3][8:31]


class Framed:
    """One token a word, and one special token before and after every text. Ids 64 … 103 are the words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [64 + (ord(word[0]) - 97) * 2 + (len(word) - 3) for word in text.split() if len(word) > 2]
        return [0, *ids, 1] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(chr(97 + (token - 64) // 2) * (3 + (token - 64) % 2) for token in ids)


def test_special_tokens_count_towards_the_length_of_text() -> None:
    prompts = ids(vocab_size=104, tokenizer=Framed(), as_text=True)
    text = prompts.make(8)
    assert isinstance(text, str) and len(text.split()) == 6 and len(Framed().encode(text)) == 8
    with pytest.raises(InvalidRequest, match="no text has 2 tokens"):
        prompts.make(2)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="need a tokenizer"):
        ids(as_text=True)


def test_random_work_repeats_with_its_seed() -> None:
    lengths = Lengths.parse("uniform:min=2,max=9")
    once, again = (random_work(ids(seed=3), 5, lengths, lengths, seed=3) for _ in range(2))
    assert once == again and len({work.max_tokens for work in once}) > 1


def trace(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + "\n")
    return path


def test_traces_of_every_form(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "trace.jsonl",
        {"task_id": 1, "prompt": "hello", "output_tokens": 3},
        {"text_input": "world", "timestamp": 1500},
        {"input_ids": [70, 71], "max_tokens": 2},
        {"input_length": 4, "output_length": 5, "timestamp": 2000},
        "",
        {"input_length": 600, "hash_ids": [7, 8]},
        {"input_length": 600, "hash_ids": [7, 9]},
    )
    works = read_trace(path, ids(), default_output=Lengths.parse("11"))
    assert works[:3] == [Work("hello", 3), Work("world", 11, 1.5), Work([70, 71], 2)]
    assert len(works[3].prompt) == 4 and (works[3].max_tokens, works[3].timestamp) == (5, 2.0)
    first, second = works[4].prompt, works[5].prompt
    assert len(first) == 600 and first[:512] == second[:512] and first[512:] != second[512:]
    assert len(read_trace(path, ids(), default_output=Lengths.parse("11"), limit=2)) == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", ":1 is not JSON"),
        ({"prompt": "a", "temperature": 1}, "keys among"),
        ({"output_length": 3}, "exactly one of"),
        ({"input_length": 600, "hash_ids": [1]}, "1 hash_ids cover 512 tokens but input_length is 600"),
        ("", "holds no request"),
    ],
)
def test_traces_that_are_not_understood_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_trace(trace(tmp_path / "bad.jsonl", entry), ids(), default_output=Lengths.parse("1"))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.jsonl cannot be read \(No such file"):
        read_trace(tmp_path / "none.jsonl", ids(), default_output=Lengths.parse("1"))
