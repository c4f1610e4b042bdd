from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from fake_triton import FakeTokenizer, scalar, text_request

from runtime.errors import InvalidRequest, UnsupportedFeature
from runtime.request import SamplingParams
from runtime.serving.requests import Defaults, decode, is_stop
from runtime.serving.tensors import INPUTS, OUTPUTS, UNAVAILABLE

TYPES: dict[str, Any] = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64, "STRING": np.object_,
                         "FP16": np.float16, "UINT8": np.uint8}  # fmt: skip
SPECS = {spec.name: spec for spec in INPUTS}


def defaults(**changes: Any) -> Defaults:
    base = Defaults(tokenizer=FakeTokenizer(), vocab_size=100, eos_token_ids=(1, 2), max_num_seqs=8, batched=True)
    return dataclasses.replace(base, **changes)


def one(parameters: dict[str, Any] | None = None, *, base: Defaults | None = None, **values: Any) -> Any:
    """Decode one request; a value given as a plain number or list becomes the tensor its specification says."""
    inputs = text_request()
    for name, value in values.items():
        array = np.array(value, dtype=TYPES[SPECS[name].data_type])
        inputs[name] = array.reshape(1, -1)
    generations = decode(inputs, parameters or {}, base or defaults())
    assert len(generations) == 1
    return generations[0]


def test_a_bare_request_is_greedy_and_echoes_the_prompt() -> None:
    generation = one()
    assert generation.prompt == "hi"
    assert generation.params == SamplingParams(max_tokens=4)
    assert (generation.n, generation.priority, generation.cache_salt, generation.stream) == (1, 0, "", False)
    assert generation.include_prompt and generation.add_special_tokens


def test_every_input_reaches_the_engine() -> None:
    generation = one(
        max_tokens=9, num_return_sequences=3, stop_words=[b"END", b""], top_k=40, top_p=0.9, temperature=0.7, min_tokens=2,
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, seed=2**63 + 1, min_p=0.1, priority=-3,
        cache_salt=b"tenant", ignore_eos=True, skip_special_tokens=False, include_stop_in_output=True, return_log_probs=True,
        add_special_tokens=False, exclude_input_in_output=True, return_perf_metrics=True, return_num_input_tokens=True,
        return_num_output_tokens=True, stream=True,
    )  # fmt: skip
    assert generation.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=2**63 + 1, logprobs=0, stop=("END",), ignore_eos=True, skip_special_tokens=False,
        include_stop_in_output=True,
    )  # fmt: skip
    assert (generation.n, generation.priority, generation.cache_salt) == (3, -3, "tenant")
    assert generation.stream and not generation.include_prompt and not generation.add_special_tokens
    assert generation.return_log_probs and generation.return_perf_metrics
    assert generation.return_num_input_tokens and generation.return_num_output_tokens


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 1.0}, 0.0),  # what classic clients always send
        ({"temperature": 0.0, "top_p": 0.5}, 0.0),
        ({"top_k": 1, "temperature": 0.8}, 0.0),
        ({"top_k": 1, "top_p": 0.8}, 0.0),
        ({"top_k": 0}, 0.0),
        ({"temperature": 0.8}, 0.8),
        ({"top_p": 1.0}, 1.0),  # the OpenAI front end's defaults
        ({"top_p": 1.0, "temperature": 1.0}, 1.0),
        ({"top_k": 2}, 1.0),
    ],
)
def test_greedy_or_sampled(inputs: dict[str, float], temperature: float) -> None:
    assert one(**inputs).params.temperature == temperature


def test_a_stream_never_repeats_the_prompt() -> None:
    assert not one(stream=True).include_prompt
    assert not one(stream=True, exclude_input_in_output=False).include_prompt


def test_the_model_configuration_speaks_where_the_request_is_silent() -> None:
    base = defaults(exclude_input_in_output=True, skip_special_tokens=False, add_special_tokens=False)
    generation = one(base=base)
    assert not (generation.include_prompt or generation.params.skip_special_tokens or generation.add_special_tokens)
    assert one(base=base, exclude_input_in_output=False).include_prompt


@pytest.mark.parametrize(
    ("end_id", "stop_token_ids", "ignore_eos"), [(1, (), False), (2, (), False), (50, (50,), True), (-1, (), True)]
)
def test_end_id(end_id: int, stop_token_ids: tuple[int, ...], ignore_eos: bool) -> None:
    params = one(end_id=end_id).params
    assert (params.stop_token_ids, params.ignore_eos) == (stop_token_ids, ignore_eos)


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    assert one(bad_words=[b"ab", b"", b" c"]).params.bad_words_ids == ((97, 98), (32, 97, 98), (32, 99))


def test_as_many_words_as_allowed() -> None:
    words = [b"%d" % n for n in range(1024)]
    params = one(bad_words=words, embedding_bias_words=words, embedding_bias_weights=[0.5] * 1024).params
    assert len(params.bad_words_ids) == 2048 and len(params.logit_bias) == 10
    assert len(one(stop_words=[*words[:64], *[b""] * 9]).params.stop) == 64  # padding of a batch does not count
    assert len(one(bad_words=[b"x" * 16384]).params.bad_words_ids) == 2


def test_bias_adds_up_over_the_tokens_of_all_words() -> None:
    params = one(embedding_bias_words=[b"ab", b"b"], embedding_bias_weights=[1.5, -0.5]).params
    assert params.logit_bias == ((97, 1.5), (98, 1.0))


def test_older_names() -> None:
    params = one(min_length=3, random_seed=5).params
    assert (params.min_tokens, params.seed) == (3, 5)
    assert one(min_length=3, min_tokens=3).params.min_tokens == 3
    with pytest.raises(InvalidRequest, match="min_tokens is 2 but min_length, its older name, is 3"):
        one(min_length=3, min_tokens=2)


def test_request_parameters_stand_in_for_tensors() -> None:
    generation = one(
        {"priority": "4", "cache_salt": "a", "min_p": 0.25, "ignore_eos": True, "timeout": 1_500_000, "id": "42"}, temperature=0.5
    )
    assert (generation.priority, generation.cache_salt, generation.timeout_s) == (4, "a", 1.5)
    assert generation.params.min_p == 0.25 and generation.params.ignore_eos
    with pytest.raises(InvalidRequest, match="priority is given both as a tensor and as a request parameter"):
        one({"priority": 1}, priority=1)


def test_a_batch_has_one_generation_per_row() -> None:
    inputs = {
        "text_input": np.array([[b"a"], [b"b"]], dtype=object),
        "max_tokens": np.array([[3], [5]], dtype=np.int32),
        "stop_words": np.array([[b"x", b"y"], [b"z", b""]], dtype=object),
    }
    first, second = decode(inputs, {}, defaults())
    assert (first.prompt, first.params.max_tokens, first.params.stop) == ("a", 3, ("x", "y"))
    assert (second.prompt, second.params.max_tokens, second.params.stop) == ("b", 5, ("z",))


def test_without_a_batch_dimension() -> None:
    inputs = {"text_input": np.array([b"a"], dtype=object), "max_tokens": np.array([3], dtype=np.int32),
              "stop_words": np.array([b"x", b"y"], dtype=object)}  # fmt: skip
    (generation,) = decode(inputs, {}, defaults(batched=False))
    assert (generation.prompt, generation.params.stop) == ("a", ("x", "y"))


NEUTRAL: dict[str, Any] = {
    "length_penalty": 1.0, "return_context_logits": False, "return_generation_logits": False, "decoder_text_input": b"",
    "image_input": [], "image_bytes_input": [], "image_url_input": [b""], "video_bytes_input": [], "prompt_embedding_table": [],
    "prompt_table_extra_id": [0], "prompt_vocab_size": 0, "lora_task_id": 0, "lora_weights": [], "lora_config": [],
    "guided_decoding_guide_type": b"", "guided_decoding_guide": b"", "num_draft_tokens": 0, "use_draft_logits": False,
}  # fmt: skip
USED: dict[str, Any] = {
    "length_penalty": 0.5, "return_context_logits": True, "return_generation_logits": True, "decoder_text_input": b"x",
    "image_input": [1.0], "image_bytes_input": [1], "image_url_input": [b"", b"u"], "video_bytes_input": [0],
    "prompt_embedding_table": [0.0], "prompt_table_extra_id": [0, 1], "prompt_vocab_size": 1, "lora_task_id": 1,
    "lora_weights": [0.0], "lora_config": [0], "guided_decoding_guide_type": b"json", "guided_decoding_guide": b"{}",
    "num_draft_tokens": 2, "use_draft_logits": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_what_is_not_available_is_refused_when_used(name: str) -> None:
    assert one(**{name: NEUTRAL[name]}).params == SamplingParams(max_tokens=4)
    with pytest.raises(UnsupportedFeature, match=rf"^{name} is not available: .+[;,] "):
        one(**{name: USED[name]})


def test_every_input_is_served_or_refused_by_name() -> None:
    """A tensor in the table that nothing reads would be ignored in silence."""
    read: set[str] = set()

    class Recording(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

        def __contains__(self, name: object) -> bool:
            read.add(str(name))
            return super().__contains__(name)

    decode(Recording(text_request()), {}, defaults())
    is_stop(Recording())
    assert {spec.name for spec in INPUTS} <= read
    assert len({spec.name for spec in INPUTS}) == len(INPUTS) and len({spec.name for spec in OUTPUTS}) == len(OUTPUTS)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0 but must be at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5 but must be at least 1"),
        ({"temperature": float("nan")}, "temperature is nan but must be a finite number ≥ 0"),
        ({"temperature": -0.1}, "temperature is -0.1 but must be a finite number ≥ 0"),
        ({"top_p": 0.0}, "top_p is 0.0 but must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p is 1.5 but must be in (0, 1]"),
        ({"top_k": -2}, "top_k is -2 but must be -1 or 0 (off) or at least 1"),
        ({"min_tokens": 5}, "min_tokens is 5 but must be in [0, max_tokens=4]"),
        ({"num_return_sequences": 9}, "num_return_sequences is 9 but must be in [1, 8] (max_num_seqs)"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0 but must be in [1, 8] (max_num_seqs)"),
        ({"beam_width": 4},
         "beam_width is 4 but this runtime decodes one beam; send 1, or num_return_sequences for several samples"),
        ({"end_id": 100}, "end_id is 100 but must be a token id in [0, 100), or -1 for none"),
        ({"pad_id": -2}, "pad_id is -2 but must be a token id in [0, 100), or -1"),
        ({"embedding_bias_words": [b"a"]},
         "embedding_bias_words holds 1 words but embedding_bias_weights 0; send one weight per word"),
        ({"stop_words": [b"x"] * 65}, "stop_words holds 65 words but at most 64 are allowed; send fewer"),
        ({"bad_words": [b"x"] * 1025}, "bad_words holds 1025 words but at most 1024 are allowed; send fewer"),
        ({"bad_words": [b"x" * 8193, b"y" * 8192]},
         "bad_words holds 16385 bytes of text but at most 16384 are allowed; send fewer or shorter"),
        ({"embedding_bias_words": [b"x"] * 1025, "embedding_bias_weights": [1.0] * 1025},
         "embedding_bias_words holds 1025 words but at most 1024 are allowed; send fewer"),
        ({"embedding_bias_words": [b"a", b"a"], "embedding_bias_weights": [3e38, 3e38]},
         "the bias of token 97 is 6e+38 but must be in [-10000, 10000]"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40 but must be in [0.01, 100]"),
        ({"max_tokens": [3, 4]}, "max_tokens holds 2 values but takes one; send one request for each"),
        ({"stop_words": [b"\xff"]}, "stop_words is not UTF-8: byte 0xff at offset 0 is not valid; encode the text as UTF-8"),
    ],
)  # fmt: skip
def test_bad_values(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        one(**inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (text_request(b"caf\xe9"), "text_input is not UTF-8: byte 0xe9 at offset 3 is not valid; encode the text as UTF-8"),
        ({"max_tokens": scalar(1, np.int32)}, "text_input is missing; text_input and max_tokens are required"),
        ({"text_input": scalar(b"hi", object)}, "max_tokens is missing; text_input and max_tokens are required"),
        (
            text_request() | {"text_input": np.array([[b"a", b"b"]], dtype=object)},
            "text_input holds 2 values but takes one; send one request for each",
        ),
    ],
)
def test_bad_requests(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        decode(inputs, {}, defaults())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 3}, "unknown request parameter 'best_of'; known are priority, cache_salt, min_p, "),
        ({"temperature": 0.5}, "unknown request parameter 'temperature'; it is an input tensor, send it as one"),
        ({"priority": 1.5}, "priority is 1.5 but must be a whole number"),
        ({"priority": "high"}, "priority is 'high' but must be a number"),
        ({"ignore_eos": "maybe"}, "ignore_eos is 'maybe' but must be true or false"),
        ({"cache_salt": 3}, "cache_salt is 3 but must be a string"),
        ({"timeout": -1}, "timeout is -1 microseconds but must be at least 0 (none)"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}"):
        one(parameters)


def test_float32_inputs_are_the_decimal_numbers_the_client_wrote() -> None:
    assert one(top_p=0.95, temperature=0.7).params.top_p == 0.95


def test_stop_asks_to_cancel() -> None:
    assert is_stop({"stop": np.array([[True]])})
    assert not is_stop({"stop": np.array([[False]])}) and not is_stop({})
