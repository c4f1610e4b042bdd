"""Rows that are worked on, edits of their logits, errors, logprobs. What is drawn: test_sampler_draws.py."""

import gc
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from sampler_steps import make_request, pick, softmax, step

from runtime.errors import InvalidRequest
from runtime.executors.base import StepOutput
from runtime.request import SamplingParams
from runtime.sampler import NOT_A_TOKEN, Sampler

pytestmark = pytest.mark.usefixtures("both_ways_to_choose")

# --- which rows are worked on ---


def test_plain_greedy_rows_take_the_engines_argmax_without_logits():
    output = StepOutput(logits=np.empty((0, 8), np.float32), next_token=np.array([5, 2]))
    sampled = Sampler(8).sample(output, [make_request(), make_request()])
    assert sampled.token_ids.tolist() == [5, 2]
    assert sampled.logprobs == [None, None]
    assert sampled.errors == {}


def test_a_mixed_batch_works_only_on_the_rows_that_need_it():
    logits = np.array([[0, 1, 2, 3]] * 3, np.float32)
    output = StepOutput(logits=logits, next_token=np.array([0, 3, 1]))  # rows 0 and 2 contradict their logits on purpose
    requests = [make_request(), make_request(logit_bias=((1, 5.0),)), make_request()]
    assert Sampler(4).sample(output, requests).token_ids.tolist() == [0, 1, 1]
    assert logits.tolist() == [[0, 1, 2, 3]] * 3  # the engine's buffer is not written to


def test_a_row_needs_logits_only_until_min_tokens_is_reached():
    output = StepOutput(logits=np.array([[0.0, 9.0, 1.0]], np.float32), next_token=np.array([0]))
    sampler = Sampler(3, eos_token_ids=[1])
    request = make_request(min_tokens=1)
    assert sampler.sample(output, [request]).token_ids.tolist() == [2]
    request.token_ids.append(2)
    assert sampler.sample(output, [request]).token_ids.tolist() == [0]


# --- edits of the logits ---


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [(2.0, 0), (2.01, 1)],  # 2 / 2 ties with 1, and the lower id wins a tie
)
def test_repetition_penalty_divides_positive_logits(penalty, expected):
    assert pick([2.0, 1.0, -9], prompt=[0], repetition_penalty=penalty) == expected
    assert pick([2.0, 1.0, -9], prompt=[2], output=[0, 0, 0], repetition_penalty=penalty) == expected  # once, however often


@pytest.mark.parametrize(("penalty", "expected"), [(1.5, 0), (1.51, 1)])
def test_repetition_penalty_multiplies_negative_logits(penalty, expected):
    assert pick([-1.0, -1.5, -9], prompt=[0], repetition_penalty=penalty) == expected


@pytest.mark.parametrize(("second", "expected"), [(1.5, 0), (1.51, 1)])
def test_frequency_penalty_counts_output_tokens(second, expected):
    assert pick([3.0, second], prompt=[0, 0, 0, 0], output=[0, 0, 0], frequency_penalty=0.5) == expected


@pytest.mark.parametrize(("second", "expected"), [(2.5, 0), (2.51, 1)])
def test_presence_penalty_is_the_same_however_often(second, expected):
    assert pick([3.0, second], prompt=[0, 0], output=[0, 0, 0], presence_penalty=0.5) == expected


def test_frequency_and_presence_ignore_the_prompt():
    assert pick([3.0, 2.9], prompt=[0, 0, 0], frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.01) == 0


def test_all_three_penalties_add_up():
    # 4 / 1.25 = 3.2, − 2 · 0.5 = 2.2, − 0.75 = 1.45
    arguments = {"output": [0, 0], "repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": 0.75}
    assert pick([4.0, 1.44], **arguments) == 0
    assert pick([4.0, 1.46], **arguments) == 1


def test_bias_comes_before_penalties():
    # (1 + 3) / 2 = 2, not 1 / 2 + 3 = 3.5
    assert pick([1.0, 2.5], prompt=[0], logit_bias=((0, 3.0),), repetition_penalty=2.0) == 1
    assert pick([1.0, 1.75], prompt=[0], logit_bias=((0, 3.0),), repetition_penalty=2.0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_incremental_counts_equal_counts_from_scratch(seed):
    """Over 150 steps with preemptions and tokens taken back, a sampler that keeps state agrees with one that has none."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(300)
    kinds = [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.6, "presence_penalty": -0.4},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 1.0, "seed": 5},
        {"presence_penalty": 1.9, "logit_bias": ((7, 2.0),)},
    ]
    requests = [make_request(rng.integers(0, 300, 80).tolist(), **kind) for kind in kinds]
    for _ in range(150):
        batch = [requests[i] for i in rng.permutation(4)[: rng.integers(1, 5)]]
        output = step(rng.normal(0, 2, (len(batch), 300)))
        kept = sampler.sample(output, batch).token_ids
        assert kept.tolist() == Sampler(300).sample(output, batch).token_ids.tolist()
        for request, token in zip(batch, kept.tolist(), strict=True):
            request.token_ids.append(token)
            if rng.random() < 0.1:
                request.num_computed_tokens, request.block_table = 0, []  # preempted
            if rng.random() < 0.1:
                del request.token_ids[max(80, request.num_tokens - 3) :]
                sampler.sample(step(np.zeros((1, 300))), [request])  # seen while it is short


def test_min_tokens_masks_end_and_stop_tokens():
    logits = [9.0, 8.0, 7.0, 1.0]
    assert pick(logits, eos=[0], min_tokens=2, stop_token_ids=(1,)) == 2
    assert pick(logits, eos=[0], min_tokens=2, stop_token_ids=(1,), output=[3]) == 2
    assert pick(logits, eos=[0], min_tokens=2, stop_token_ids=(1,), output=[3, 3]) == 0
    assert pick(logits, eos=[0], min_tokens=2, ignore_eos=True) == 1


def test_bad_words_mask_what_would_complete_them():
    logits = [9.0, 8.0, 7.0, 6.0]
    assert pick(logits, bad_words_ids=((0,),)) == 1
    assert pick(logits, bad_words_ids=((3, 1, 0),), prompt=[2], output=[3, 1]) == 1
    assert pick(logits, bad_words_ids=((3, 1, 0),), prompt=[2, 3], output=[1]) == 1  # begun in the prompt
    assert pick(logits, bad_words_ids=((3, 1, 0),), prompt=[2], output=[1, 3]) == 0
    assert pick(logits, bad_words_ids=((3, 1, 0),), prompt=[1], output=[]) == 0  # longer than the text
    assert pick(logits, bad_words_ids=((0,), (2, 1)), prompt=[2]) == 2


def test_masks_beat_any_bias():
    assert pick([0.0, 1.0], bad_words_ids=((0,),), logit_bias=((0, 1e4),)) == 1


# --- errors ---


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_broken_logits_ends_in_an_error_and_spares_the_others(params, bad):
    logits = [[0.0, 1.0, 3.0], [bad] * 3, [5.0, 1.0, 3.0]]
    sampled = Sampler(3).sample(step(logits), [make_request(**params, top_k=1) for _ in range(3)])
    assert sampled.token_ids.tolist() == [2, NOT_A_TOKEN, 0]
    assert list(sampled.errors) == [1]
    assert "NaN or infinite logits" in sampled.errors[1]
    assert sampled.logprobs[1] is None


def test_a_single_nan_is_found_in_a_row_that_is_worked_on():
    sampled = Sampler(3).sample(
        StepOutput(np.array([[0.0, math.nan, 3.0]], np.float32), np.array([2])), [make_request(temperature=1.0)]
    )
    assert list(sampled.errors) == [0]


@pytest.mark.parametrize("token", [-1, 3])
def test_an_argmax_outside_the_vocabulary_is_an_error(token):
    sampled = Sampler(3).sample(StepOutput(np.empty((0, 3), np.float32), np.array([token, 1])), [make_request(), make_request()])
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 1]
    assert list(sampled.errors) == [0]


@pytest.mark.parametrize("token", [-1, 3])
def test_a_row_without_an_argmax_spares_those_that_are_drawn(token):
    good = step([[0.0, 1.0, 2.0]] * 2)
    output = StepOutput(good.logits, np.array([token, 2]), good.choose)
    sampled = Sampler(3).sample(output, [make_request(temperature=1.0, top_k=1) for _ in range(2)])
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 2]
    assert list(sampled.errors) == [0]


def test_a_kernel_that_fails_ends_only_the_rows_that_need_it(caplog):
    def fail(*_):
        raise MemoryError("no memory to sample")

    output = StepOutput(np.array([[0.0, 1.0, 2.0]] * 3, np.float32), np.array([2, 2, 2]), fail)
    sampled = Sampler(3).sample(output, [make_request(temperature=1.0), make_request(), make_request(presence_penalty=1.0)])
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 2, 2]
    assert "could not be chosen (MemoryError: no memory to sample)" in sampled.errors[0] and list(sampled.errors) == [0]
    assert "could not be sampled in place" in caplog.text


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_excluding_every_token_is_an_error_and_spares_the_others(params):
    requests = [make_request(bad_words_ids=((0,), (1,)), **params), make_request(bad_words_ids=((1,),), **params)]
    sampled = Sampler(2).sample(step([[1, 2], [1, 2]]), requests)
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 0]
    assert "exclude every token" in sampled.errors[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": ((4, 1.0),)}, "logit_bias names token 4 but the model's token ids are 0 to 3"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias names token -1"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias names token 1 twice"),
        ({"bad_words_ids": ((1, 9),)}, "bad_words_ids names token 9"),
        ({"bad_words_ids": ((),)}, "empty sequence"),
        ({"stop_token_ids": (4,)}, "stop_token_ids names token 4"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params, message):
    sampler = Sampler(4)
    with pytest.raises(InvalidRequest, match=message):
        sampler.validate(SamplingParams(**params))
    sampled = sampler.sample(step([[0, 1, 2, 3]] * 2), [make_request(**params), make_request()])
    assert message in sampled.errors[0]
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 3]


def test_valid_ids_pass():
    Sampler(4).validate(SamplingParams(logit_bias=((0, 1.0), (3, 1.0)), bad_words_ids=((3, 0),), stop_token_ids=(3,)))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_parameters_that_make_logits_infinite_end_their_own_row(params):
    """Within the bounds of SamplingParams it takes logits that no model has."""
    logits = [[3e38, 1.0, 2.0], [0.0, 3.0, 1.0]]
    requests = [make_request([0], repetition_penalty=0.01, **params), make_request(**params, bad_words_ids=((0,), (2,)))]
    sampled = Sampler(3).sample(step(logits), requests)
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 1]
    assert list(sampled.errors) == [0]
    assert sampled.errors[0].startswith(
        "repetition_penalty=0.01, frequency_penalty=0.0, presence_penalty=0.0 and logit_bias make"
    )


@pytest.mark.parametrize("fault", ["seed", "prompt"])
def test_a_row_that_raises_ends_alone_and_the_others_get_their_tokens(fault, caplog):
    guilty = make_request([0], temperature=1.0, seed=1, repetition_penalty=1.5)
    if fault == "seed":
        object.__setattr__(guilty.params, "seed", 2**70)  # past the checks of SamplingParams
    else:
        guilty.prompt_token_ids[0] = guilty.token_ids[0] = 400  # not in the vocabulary
    others = [make_request(temperature=1.0, seed=n, repetition_penalty=1.3, logprobs=1) for n in range(3)]
    greedy = make_request()
    logits = np.random.default_rng(0).normal(0, 1, (5, 400))
    batch = [others[0], guilty, others[1], greedy, others[2]]
    sampled = Sampler(400).sample(step(logits), batch)
    assert list(sampled.errors) == [1]
    assert sampled.errors[1].startswith("this request's next token could not be chosen (")
    alone = [pick(logits[row], temperature=1.0, seed=n, repetition_penalty=1.3) for n, row in enumerate((0, 2, 4))]
    assert sampled.token_ids.tolist() == [alone[0], NOT_A_TOKEN, alone[1], logits[3].argmax(), alone[2]]
    assert [entry is not None for entry in sampled.logprobs] == [True, False, True, False, True]
    assert "5 rows" not in caplog.text and "4 rows could not be sampled together" in caplog.text


def test_parameters_of_the_wrong_shape_end_their_own_row():
    guilty = make_request()
    object.__setattr__(guilty.params, "bad_words_ids", (5,))
    sampled = Sampler(4).sample(step([[0, 1, 2, 3]] * 2), [guilty, make_request()])
    assert sampled.token_ids.tolist() == [NOT_A_TOKEN, 3]
    assert "'int' object is not iterable" in sampled.errors[0]


def test_what_a_message_names_exists():
    from builder.cli import parser
    from runtime import sampler

    commands = parser()._subparsers._group_actions[0].choices
    named = re.findall(r"`builder (\w+)", sampler.BROKEN_LOGITS)
    assert named == ["inspect"] and named[0] in commands


@pytest.mark.parametrize("top_k", [4, 5, 2**70])
def test_a_top_k_beyond_the_vocabulary_is_off(top_k, caplog):
    for seed in range(20):
        off, narrow = make_request(seed=seed, temperature=1.0, top_k=top_k), make_request(seed=seed, temperature=1.0, top_k=1)
        sampled = Sampler(4).sample(step([[0, 0, 0, 0], [0, 1, 0, 0]]), [off, narrow])
        assert sampled.token_ids.tolist() == [pick([0.0] * 4, seed=seed, temperature=1.0), 1]
    assert not caplog.records


def test_bad_words_that_share_their_last_token_but_one():
    words = ((1, 0), (2, 1, 2), (3, 1, 3), (2, 2, 1))
    assert pick([9.0, 7.0, 8.0, 6.0], bad_words_ids=words, prompt=[2, 1]) == 1  # 0 and 2 are banned, 3 is not
    assert pick([9.0, 7.0, 8.0, 6.0], bad_words_ids=words, prompt=[3, 1]) == 2  # 0 and 3
    assert pick([9.0, 7.0, 8.0, 6.0], bad_words_ids=words, prompt=[1, 2]) == 0


# --- logprobs ---


def test_logprobs_are_of_the_raw_distribution():
    logits = [0.5, 2.0, -1.0, 2.0, 0.0]
    expected = np.log(softmax(logits))
    request = make_request(
        [1], logprobs=3, temperature=0.3, top_k=1, repetition_penalty=1.9, bad_words_ids=((3,),), logit_bias=((2, 50.0),)
    )
    (entry,) = Sampler(5).sample(step([logits]), [request]).logprobs
    assert entry.token_id == 2
    assert entry.logprob == pytest.approx(expected[2], abs=1e-6)  # float32 sums
    assert [id for id, _ in entry.top] == [1, 3, 0]  # ties by id
    assert [value for _, value in entry.top] == pytest.approx(expected[[1, 3, 0]], abs=1e-6)


@pytest.mark.parametrize(("wanted", "got"), [(0, 0), (1, 1), (4, 4), (20, 4)])
def test_as_many_logprobs_as_asked_for_and_possible(wanted, got):
    requests = [make_request(), make_request(logprobs=wanted), make_request(logprobs=2)]
    sampled = Sampler(4).sample(step([[0, 3, 1, 2]] * 3), requests)
    assert sampled.logprobs[0] is None
    assert [id for id, _ in sampled.logprobs[1].top] == [1, 3, 2, 0][:got]
    assert [id for id, _ in sampled.logprobs[2].top] == [1, 3]
    assert sampled.logprobs[1].token_id == 1


def test_top_logprobs_of_a_wide_vocabulary():
    logits = np.random.default_rng(0).normal(0, 4, (3, 5000)).astype(np.float32)
    sampled = Sampler(5000).sample(step(logits), [make_request(logprobs=n) for n in (20, 1, 7)])
    for row, n in enumerate((20, 1, 7)):
        assert [id for id, _ in sampled.logprobs[row].top] == np.argsort(-logits[row], kind="stable")[:n].tolist()
        assert all(first[1] >= second[1] for first, second in pairwise(sampled.logprobs[row].top))


# --- state ---


def test_state_ends_with_the_request():
    sampler = Sampler(4)
    requests = [make_request(temperature=1.0) for _ in range(3)]
    sampler.sample(step(np.zeros((3, 4))), requests)
    assert len(sampler._states) == 3
    sampler.forget(requests[0])
    sampler.forget(requests[0])
    assert len(sampler._states) == 2
    del requests
    gc.collect()
    assert len(sampler._states) == 0
