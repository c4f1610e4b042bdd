import json
import random
from itertools import groupby

import pytest
import tiny_tokenizers as tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from runtime.errors import EngineError, EngineNotFound, InvalidRequest, UnsupportedFeature
from runtime.tokenizer import Tokenizer

CHAT = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HI = [{"role": "user", "content": " hi "}]


def save(directory, tokenizer=tiny.byte_level, **files):
    tokenizer()._backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


# --- loading ---


def test_missing_tokenizer_names_the_file(tmp_path):
    with pytest.raises(EngineNotFound, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe{}"])
def test_a_broken_file_is_named(tmp_path, name, content):
    save(tmp_path)
    path = tmp_path / f"{name}.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EngineError, match=f"{name}.json"):
        Tokenizer.load(tmp_path)


def test_special_tokens_come_from_the_configuration(tmp_path):
    tokenizer = Tokenizer.load(
        save(
            tmp_path,
            tokenizer_config__json={
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "pad_token": None,
                "additional_special_tokens": ["<extra>"],
                "add_prefix_space": False,
            },
        )
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (0, (1,), None)
    added = tokenizer.token_to_id("<extra>")
    assert added == tiny.byte_level().vocab_size == tokenizer.vocab_size - 1
    assert tokenizer.special_token_ids == {0, 1, added}
    assert tokenizer.encode("a<extra>") == [tokenizer.token_to_id("a"), added]


def test_generation_config_wins_and_may_name_several_ends(tmp_path):
    config = {
        "tokenizer_config__json": {"eos_token": "</s>"},
        "generation_config__json": {"eos_token_id": [1, 7], "pad_token_id": 0},
    }
    tokenizer = Tokenizer.load(save(tmp_path, **config))
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id, tokenizer.bos_token_id) == ((1, 7), 0, None)


def test_special_tokens_map_is_read_and_the_configuration_wins(tmp_path):
    maps = {"special_tokens_map__json": {"bos_token": "<s>", "eos_token": "<s>"}, "tokenizer_config__json": {"eos_token": "</s>"}}
    tokenizer = Tokenizer.load(save(tmp_path, **maps))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_a_token_named_special_in_the_configuration_only_is_special(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, tiny.byte_level, tokenizer_config__json={"eos_token": "!"}))
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.id_to_token(end) == "!"
    assert tokenizer.decode([tokenizer.token_to_id("a"), end]) == "a"
    assert tokenizer.decode([tokenizer.token_to_id("a"), end], skip_special_tokens=False) == "a!"


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = Backend.from_str(tiny.byte_level()._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The cat sat on the mat"
    assert Tokenizer.load(tmp_path).encode(text) == tiny.byte_level().encode(text)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, [1], []),  # what the file's own post-processor does
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_bos_token": False}, [], []),
    ],
)
def test_add_bos_and_eos_token_replace_the_post_processor(tmp_path, options, before, after):
    backend = Backend.from_str(tiny.byte_level()._backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **options}))
    tokenizer = Tokenizer.load(tmp_path)
    plain = tiny.byte_level().encode("cat", add_special_tokens=False)
    assert tokenizer.encode("cat") == before + plain + after
    assert tokenizer.encode("cat", add_special_tokens=False) == plain


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_an_unknown_decoder_is_refused_by_name(decoder):
    backend = Backend(models.BPE())
    backend.decoder = decoder
    with pytest.raises(UnsupportedFeature, match="supported decoders are ByteLevel"):
        Tokenizer(backend)


# --- encoding and decoding ---


@pytest.mark.parametrize("name", tiny.ALL)
def test_decode_equals_the_library_on_its_own_encodings(name):
    tokenizer = tiny.ALL[name]()
    texts = [*tiny.TEXT[:5], "", " ", "  two  spaces ", "x\ny\t", "<s>cat</s> <s> the </s>", "it's, isn't , do not ! ' a '"]
    for text in texts:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", [name for name in tiny.ALL if name not in ("sentencepiece", "gemma")])
def test_decode_equals_the_library_on_random_ids(name):
    tokenizer, rng = tiny.ALL[name](), random.Random(0)
    for _ in range(500):
        top = 260 if name == "byte_level" and rng.random() < 0.5 else tokenizer.vocab_size + 3  # mostly bytes; unknown ids
        ids = [rng.randrange(top) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_word_piece_cleans_up_each_token_as_the_library_does():
    words = [".", "?", "!", ",", "' ", "n't", "'m", "do not", "'s", "'ve", "'re", "##x", "a", "##' ", "b . c"]
    backend = Backend(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    tokenizer, rng = Tokenizer(backend), random.Random(0)
    assert tokenizer.decode([12, 0]) == "a."
    for _ in range(300):
        ids = [rng.randrange(len(words)) for _ in range(5)]
        assert tokenizer.decode(ids) == backend.decode(ids)


def text_of_bytes(data):
    """The characters that are valid, and U+FFFD for every other byte, by trying all lengths."""
    text = ""
    while data:
        for length in (1, 2, 3, 4, 0):
            try:
                char = data[:length].decode()
            except UnicodeDecodeError:
                continue
            if len(char) == 1:
                break
        text += char or "\ufffd"
        data = data[max(length, 1) :]
    return text


def test_random_bytes_among_tokens():
    """Equal to the library unless a run of byte tokens is partly valid, and to a plain definition even then."""
    tokenizer, rng = tiny.gemma(), random.Random(0)
    partly = 0
    for _ in range(3000):
        ids = [rng.choice([rng.randrange(258), rng.randrange(0xC2, 0xF8), rng.randrange(tokenizer.vocab_size)]) for _ in range(7)]
        expected, mixed = "", False
        for in_bytes, group in groupby((id for id in ids if id > 1), key=lambda id: id < 258):
            run = list(group)
            text = text_of_bytes(bytes(id - 2 for id in run)) if in_bytes else tokenizer._backend.decode(run)
            expected += text
            mixed |= in_bytes and set(text) > {"\ufffd"}
        assert tokenizer.decode(ids) == expected
        partly += mixed
        if not mixed:
            assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    assert 500 < partly < 2900


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("😀".encode(), "😀"),
        ("😀".encode()[:3], "\ufffd" * 3),  # one per byte, as the library
        (b"\xff\x80", "\ufffd" * 2),
        ("é".encode() + "😀".encode()[:2], "é" + "\ufffd" * 2),  # the library gives four: it drops the é
    ],
)
def test_byte_fallback(tail, expected):
    tokenizer = tiny.gemma()
    assert tokenizer.decode([byte + 2 for byte in tail]) == expected


def test_special_tokens_in_text_are_special_unless_split(tmp_path):
    assert tiny.byte_level().encode("<s>a", add_special_tokens=False) == [0, tiny.byte_level().token_to_id("a")]
    split = Tokenizer.load(save(tmp_path, tokenizer_config__json={"split_special_tokens": True, "bos_token": "<s>"}))
    ids = split.encode("<s>a", add_special_tokens=False)
    assert 0 not in ids
    assert split.decode(ids) == "<s>a"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_a_lone_surrogate_is_refused(text):
    with pytest.raises(InvalidRequest, match=r"character \d is the lone surrogate U\+D"):
        tiny.byte_level().encode(text)


def test_token_bytes():
    tokenizer = tiny.byte_level()
    assert [tokenizer.id_to_token_bytes(id) for id in tokenizer.encode("é", add_special_tokens=False)] in (
        [b"\xc3", b"\xa9"],
        ["é".encode()],
    )
    assert tokenizer.id_to_token_bytes(tokenizer.token_to_id("<tool call>")) == b"<tool call>"
    assert tokenizer.id_to_token_bytes(10**6) == b""
    assert tokenizer.id_to_token_bytes(-1) == b""
    assert tiny.gemma().id_to_token_bytes(2 + 0xE2) == b"\xe2"
    assert tiny.gemma().id_to_token_bytes(tiny.gemma().token_to_id("▁t")) == b" t"


# --- chat templates ---


def test_chat_template_with_trimmed_blocks_and_special_tokens(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, tokenizer_config__json={"eos_token": "</s>", "chat_template": CHAT}))
    assert tokenizer.apply_chat_template(HI) == "<|user|>hi</s>\n<|assistant|>"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == "<|user|>hi</s>\n"


def test_the_template_file_wins_and_named_templates_are_chosen_by_tools(tmp_path):
    listed = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "with {{ tools | length }} tools"}]
    tokenizer = Tokenizer.load(save(tmp_path, chat_template__jinja="file", tokenizer_config__json={"chat_template": listed}))
    assert tokenizer.apply_chat_template(HI) == "file"
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}]) == "with 1 tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert Tokenizer.load(tmp_path).apply_chat_template(HI, tools=[{"name": "f"}]) == "other"


def render(source, messages=HI, **kwargs):
    return Tokenizer(Backend(models.BPE()), {"bos_token": "<s>"}, chat_templates={"default": source}).apply_chat_template(
        messages, **kwargs
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}", "<s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": " hi "}'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),  # neither HTML nor ASCII escapes
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ 1 + 1 }}{% endgeneration %}!", "2!"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_rely_on(source, expected):
    assert render(source) == expected


def test_template_arguments_and_absent_values():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ 'tool_calls' in messages[0] }}", [{**HI[0], "tool_calls": None}]) == "False"
    assert render("{{ messages[0].reasoning_content }}", [{**HI[0], "reasoning": "so"}]) == "so"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (HI[0], "non-empty list"),
        (["hi"], r"messages\[0\] is str"),
        ([{"role": "user", "content": object()}], r"messages\[0\].content is of type object"),
        ([HI[0], {"role": "system", "content": "x"}], "system must come first"),
        ([{"content": "x"}], "refuses these messages"),
        ([{"role": 3, "content": ["x"]}], "refuses these messages"),
    ],
)
def test_messages_the_template_cannot_take_are_refused(messages, reason):
    source = CHAT.replace("message['content'] | trim", "'' + message['content']").replace(
        "message['role'] }}", "message['role'] + '' }}"
    )
    with pytest.raises(InvalidRequest, match=reason):
        render(source, messages)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ range(10**9) | list }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_templates_run_in_a_sandbox(source):
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render(source)


def test_no_or_broken_template():
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        tiny.byte_level().apply_chat_template(HI)
    assert not tiny.byte_level().chat_template
    with pytest.raises(UnsupportedFeature, match="error in line 2"):
        render("\n{% for %}")
    with pytest.raises(UnsupportedFeature, match="continue_final_message"):
        render("x", continue_final_message=True)


def test_tiny_llama_round_trip():
    tokenizer = tiny.tiny_llama()
    for text in tiny.TEXT[:5]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_equals_transformers(tmp_path):
    model_zoo = pytest.importorskip("builder.model_zoo")
    transformers = pytest.importorskip("transformers")
    path = model_zoo.smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        id for id, token in theirs.added_tokens_decoder.items() if token.special
    }
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> 你好 😀"}]
    for chat in (messages, messages[1:]):
        prompt = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(chat) == prompt
        assert ours.encode(prompt, add_special_tokens=False) == theirs.encode(prompt, add_special_tokens=False)
    rng = random.Random(0)
    for text in tiny.TEXT[:5]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    for _ in range(500):
        ids = [rng.randrange(ours.vocab_size) for _ in range(8)]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
