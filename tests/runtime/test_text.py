import random

import pytest
import tiny_tokenizers as tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.request import SamplingParams
from runtime.text import IncrementalDetokenizer, StopStrings, TextStream

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
EXAMPLES = [
    "The cat 😀 sat 👨‍👩‍👧 on 👍🏽 the 🇫🇷 mat",
    "日本語の文章です。これは试验。𠮷野家",
    "Привет, мир! Ёжик",
    "e\u0301 n\u0303 \u0e01\u0e33 क्षि",  # combining marks
    "\u200d\u200d \ufeff \ufffd \x00 \x7f",
    " leading and  double   spaces ",
    "",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(EXAMPLES)


def groups(ids, rng):
    """`ids` cut at random, with empty groups too."""
    while ids:
        count = rng.choice([0, 1, 1, 1, 2, 5])
        yield ids[:count]
        ids = ids[count:]


def stream(detokenizer, ids, rng=None):
    deltas = [detokenizer.push(group) for group in (groups(ids, rng) if rng else [[id] for id in ids])]
    return [*deltas, detokenizer.flush()]


# --- IncrementalDetokenizer ---


@pytest.mark.parametrize("name", tiny.ALL)
@settings(UNHURRIED, max_examples=40)
@given(text=TEXTS, skip=st.booleans(), rng=st.randoms(use_true_random=False))
def test_deltas_of_encoded_text_add_up_to_the_full_decode(name, text, skip, rng):
    tokenizer = tiny.ALL[name]()
    ids = tokenizer.encode(text)
    full = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(IncrementalDetokenizer(tokenizer, (), skip), ids)) == full
    assert "".join(stream(IncrementalDetokenizer(tokenizer, (), skip), ids, rng)) == full


@pytest.mark.parametrize("name", tiny.ALL)
@settings(UNHURRIED, max_examples=40)
@given(data=st.data(), skip=st.booleans(), rng=st.randoms(use_true_random=False))
def test_deltas_of_any_ids_add_up_to_the_full_decode(name, data, skip, rng):
    tokenizer = tiny.ALL[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2) | st.integers(0, 257), max_size=20))
    assert "".join(stream(IncrementalDetokenizer(tokenizer, (), skip), ids, rng)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", tiny.ALL)
@settings(UNHURRIED, max_examples=40)
@given(prompt=TEXTS, text=TEXTS, skip=st.booleans())
@example(prompt="", text=" cat", skip=True)
def test_deltas_after_a_prompt_are_what_the_output_adds_to_the_full_decode(name, prompt, text, skip):
    tokenizer = tiny.ALL[name]()
    prompt_ids, ids = [0, *tokenizer.encode(prompt)], tokenizer.encode(text)
    before = tokenizer.decode(prompt_ids, skip)
    assert before + "".join(stream(IncrementalDetokenizer(tokenizer, prompt_ids, skip), ids)) == tokenizer.decode(
        prompt_ids + ids, skip
    )


def test_the_space_before_the_first_word_depends_on_the_prompt():
    tokenizer = tiny.sentencepiece()
    prompt, output = tokenizer.encode("The"), tokenizer.encode("cat")
    assert "".join(stream(IncrementalDetokenizer(tokenizer), output)) == "cat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, prompt), output)) == " cat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, [0]), output)) == "cat"  # <s> is not text …
    assert "".join(stream(IncrementalDetokenizer(tokenizer, [0], skip_special_tokens=False), output)) == " cat"  # … unless shown
    assert tokenizer.decode([0, *output], skip_special_tokens=False) == "<s> cat"


@pytest.mark.parametrize("make", [tiny.byte_level, tiny.gemma])
@pytest.mark.parametrize("char", ["é", "語", "𠮷"])
def test_only_an_unfinished_character_is_held_back(make, char):
    detokenizer = IncrementalDetokenizer(make())
    a, *data = [tuple(make().id_to_token_bytes(id) for id in range(258)).index(bytes([byte])) for byte in ("a" + char).encode()]
    assert [detokenizer.push([id]) for id in (a, *data, a, *data)] == [
        "a", *[""] * (len(data) - 1), char, "a", *[""] * (len(data) - 1), char
    ]  # fmt: skip
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(("make", "replacement"), [(tiny.byte_level, "\ufffd"), (tiny.gemma, "\ufffd\ufffd")])
def test_an_unfinished_character_ends_as_replacements(make, replacement):
    tokenizer = make()
    e2, nine = ([tokenizer.id_to_token_bytes(id) for id in range(258)].index(byte) for byte in (b"\xe2", b"\x96"))
    (the,) = {tokenizer.token_to_id(name) for name in ("Ġthe", "▁the")} - {None}
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in (e2, nine, the, e2, nine)] == ["", "", replacement + " the", "", ""]
    assert detokenizer.flush() == replacement
    assert tokenizer._backend.decode([e2, nine, the, e2, nine]) == f"{replacement} the{replacement}"


def test_a_prompt_that_begins_with_bytes_is_text_too():
    tokenizer = tiny.sentencepiece()
    prompt, output = [byte + 2 for byte in "é".encode()], tokenizer.encode("cat")
    assert tokenizer.decode(prompt + output) == "é cat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, prompt), output)) == " cat"


def test_a_prompt_that_ends_inside_a_character_does_not_touch_the_output():
    tokenizer = tiny.byte_level()
    byte = [tokenizer.id_to_token_bytes(id) for id in range(258)].index(b"\xe2")
    detokenizer = IncrementalDetokenizer(tokenizer, [byte])
    assert stream(detokenizer, tokenizer.encode("a", add_special_tokens=False)) == ["a", ""]


def test_special_tokens_are_shown_or_not():
    tokenizer = tiny.byte_level()
    ids = [0, *tokenizer.encode("cat", add_special_tokens=False), 1]
    assert "".join(stream(IncrementalDetokenizer(tokenizer, (), True), ids)) == "cat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, (), False), ids)) == "<s>cat</s>"


# --- StopStrings ---


def cut(text, stops, include=False):
    """The definition: up to the least position of any stop string; of several there, the shortest."""
    found = min(((text.find(stop), len(stop)) for stop in stops if stop in text), default=None)
    return text if found is None else text[: found[0] + include * found[1]]


def certain(text, stops):
    """How much of a text without stop strings can be shown: up to where one may have begun."""
    return min(start for start in range(len(text) + 1) if start == len(text) or any(s.startswith(text[start:]) for s in stops))


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(UNHURRIED, max_examples=500)
@given(text=st.text("abc", max_size=25), stops=STOPS, include=st.booleans(), rng=st.randoms(use_true_random=False))
@example(text="xabc", stops=["abc", "b"], include=False, rng=random.Random(0))
@example(text="xabab", stops=["abc", "bab", "ba"], include=True, rng=random.Random(0))
@example(text="xabc", stops=["abb", "b", "bc"], include=True, rng=random.Random(0))
@example(text="aabaaabaaac", stops=["aabaaac"], include=False, rng=random.Random(0))
def test_text_is_cut_at_the_first_stop_string_however_it_arrives(text, stops, include, rng):
    expected = cut(text, stops, include)
    finder, shown, seen = StopStrings(stops, include), "", ""
    for group in groups(text, rng):
        shown += finder.push(group)
        seen += group
        if not any(stop in seen for stop in stops):
            assert not finder.stopped
            assert shown == seen[: certain(seen, stops)]  # no part of a stop string, and all else
        assert expected.startswith(shown)
    shown += finder.flush()
    assert shown == expected
    assert finder.stopped == any(stop in text for stop in stops)
    assert finder.push("more") == finder.flush() == "" or not finder.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["a S", "T", "OP b"], ["a ", "", ""]),  # across pieces
        (["STOP"], ["a ST", "ART"], ["a ", "START"]),  # not one after all
        (["aab"], ["aaa", "ab"], ["a", "a"]),  # overlaps itself
        (["</s>", "User:"], ["x<", "/User:"], ["x", "</"]),  # several
        (["ab", "abc"], ["xa", "b"], ["x", ""]),  # one a prefix of another: the shorter is complete first
        (["abc", "ab"], ["xa", "bc"], ["x", ""]),
        (["abc", "b"], ["xab", "c"], ["x", ""]),  # b is complete, but abc starts earlier
        (["abc", "b"], ["xab", "d"], ["x", "a"]),  # abc did not come: b it is
        (["\n\n"], ["one\n", "two\n", "\n", "three"], ["one", "\ntwo", "", ""]),
        (["é"], ["caf", "é"], ["caf", ""]),
    ],
)
def test_stop_strings(stops, pieces, expected):
    finder = StopStrings(stops)
    assert [finder.push(piece) for piece in pieces] == expected


def test_flush_decides_what_was_open():
    finder = StopStrings(["abc", "b"])
    assert (finder.push("xab"), finder.stopped) == ("x", False)
    assert (finder.flush(), finder.stopped) == ("a", True)
    finder = StopStrings(["abc"])
    assert (finder.push("xab"), finder.flush(), finder.stopped) == ("x", "ab", False)


def test_a_stop_string_completed_while_not_armed_is_text():
    finder = StopStrings(["aa"])
    assert finder.push("aa", armed=False) == "a"
    assert (finder.push("a"), finder.stopped) == ("", True)  # its second a begins another
    finder = StopStrings(["ab"])
    assert (finder.push("xab", armed=False), finder.push("-ab"), finder.stopped) == ("xab", "-", True)


# --- TextStream ---


def letters(text):
    """One token per character."""
    tokenizer = tiny.byte_level()
    return [tokenizer.token_to_id(char) for char in text]


def run(text, finished=True, **params):
    """(text, tokens that count, stopped) of one token per character, pushed one by one."""
    stream = TextStream(SamplingParams(max_tokens=100, **params), tiny.byte_level())
    deltas = [stream.push([id], finished and i == len(text) - 1) for i, id in enumerate(letters(text))]
    return "".join(delta.text for delta in deltas), sum(delta.token_count for delta in deltas), deltas[-1].stopped


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, ("xabcabd", 7, False)),
        ({"stop": ("abd",)}, ("xabc", 7, True)),
        ({"stop": ("abc",)}, ("x", 4, True)),
        ({"stop": ("abc",), "include_stop_in_output": True}, ("xabc", 4, True)),
        ({"stop": ("abd", "ca")}, ("xab", 5, True)),
        ({"stop": ("abd", "bc"), "include_stop_in_output": True}, ("xabc", 4, True)),
        ({"stop": ("abq", "b")}, ("xa", 4, True)),  # the c settled that it is not abq
        ({"stop": ("q",)}, ("xabcabd", 7, False)),
        ({"stop": ("abdz",)}, ("xabcabd", 7, False)),  # begun, never complete
        ({"stop": ("ab",), "min_tokens": 3}, ("x", 3, True)),
        ({"stop": ("ab",), "min_tokens": 4}, ("xabc", 6, True)),  # the first ab came too early
        ({"stop": ("ab",), "min_tokens": 7}, ("xabcabd", 7, False)),
    ],
)
def test_text_and_token_counts(params, expected):
    assert run("xabcabd", **params) == expected


@pytest.mark.parametrize(("skip", "expected"), [(True, "xa"), (False, "x<s>a</s>")])
def test_special_tokens_in_a_stream(skip, expected):
    x, a = letters("xa")
    stream = TextStream(SamplingParams(skip_special_tokens=skip), tiny.byte_level())
    assert stream.push([x, 0, a, 1], finished=True).text == expected


def test_an_unfinished_request_holds_its_last_characters():
    assert run("xab", finished=False, stop=("abc",)) == ("x", 3, False)
    assert run("xab", finished=True, stop=("abc",)) == ("xab", 3, False)


def test_several_tokens_at_once_are_cut_after_the_one_that_stops():
    stream = TextStream(SamplingParams(stop=("ab",)), tiny.byte_level())
    delta = stream.push(letters("xabcabd"))
    assert (delta.text, delta.token_count, delta.stopped) == ("x", 3, True)
    delta = stream.push(letters("more"), finished=True)
    assert (delta.text, delta.token_count, delta.stopped) == ("", 0, True)


def test_finishing_without_a_token_flushes():
    for stop in ((), ("ab",)):
        stream = TextStream(SamplingParams(stop=stop), tiny.byte_level())
        byte = [tiny.byte_level().id_to_token_bytes(id) for id in range(258)].index(b"\xe2")
        assert stream.push([*letters("xa"), byte]).text == ("x" if stop else "xa")
        delta = stream.push([], finished=True)
        assert (delta.text, delta.token_count, delta.stopped) == ("a\ufffd" if stop else "\ufffd", 0, False)


@pytest.mark.parametrize("stop", [(), ("q",)])
def test_stop_tokens_add_text_only_when_stops_are_included(stop):
    assert run("xay", stop=stop, stop_token_ids=(letters("y")[0],)) == ("xa", 3, False)
    assert run("xay", stop=stop, stop_token_ids=(letters("y")[0],), include_stop_in_output=True) == ("xay", 3, False)


@pytest.mark.parametrize("name", tiny.ALL)
@settings(UNHURRIED, max_examples=60)
@given(data=st.data(), include=st.booleans(), rng=st.randoms(use_true_random=False))
def test_streamed_text_is_the_full_decode_cut_at_its_first_stop(name, data, include, rng):
    """Stop strings taken from the text itself, so that they begin and end inside tokens."""
    tokenizer = tiny.ALL[name]()
    prompt = tokenizer.encode("The cat")
    ids = tokenizer.encode(data.draw(TEXTS))
    full = "".join(stream(IncrementalDetokenizer(tokenizer, prompt), ids))
    starts = data.draw(st.lists(st.tuples(st.integers(0, max(len(full) - 1, 0)), st.integers(1, 4)), min_size=1, max_size=3))
    stops = tuple(full[start : start + length] or "q" for start, length in starts)
    params = SamplingParams(stop=stops, include_stop_in_output=include)
    expected = cut(full, stops, include)
    results = []
    for cuts in ([[id] for id in ids], list(groups(ids, rng)), [ids]):
        out, shown, count = TextStream(params, tokenizer, prompt), "", 0
        for i, group in enumerate(cuts or [[]]):
            delta = out.push(group, finished=i == len(cuts) - 1 or not cuts)
            shown += delta.text
            count += delta.token_count
            assert expected.startswith(shown)
        results.append((shown, count, delta.stopped))
    assert results[0][0] == expected
    assert results == results[:1] * 3
    assert results[0][2] == any(stop in full for stop in stops)
