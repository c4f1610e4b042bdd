"""TensorRTExecutor on a GPU that exists on paper: the right tokens through padding, buckets, graphs and two steps under way."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from fake_tensorrt import (
    BLOCK,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    VOCAB,
    WIDTH,
    Rig,
    placed,
    step,
    token_after,
)
from fakes import FakeSampler, Recorder, expected_tokens, make_request, make_scheduler, next_state

from runtime.batch import BatchBuilder
from runtime.contract import INPUT_DTYPES
from runtime.executors import tensorrt_step
from runtime.executors.cuda import Cuda
from runtime.executors.tensorrt import runs
from runtime.executors.tensorrt_buckets import Buckets
from runtime.executors.tensorrt_step import StepShape
from runtime.loop import Loop
from runtime.request import FinishReason
from runtime.sampler import Sampler

SHAPES = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (64, 8, 8), (100, 8, 8)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_step_worked_out_on_paper(rig: Rig) -> None:
    # states 2, 31·2 + 2 + 1 = 65, sum 67; and state 6, 6
    output = rig.executor().execute(step([([1, 2], 0, [3]), ([5], 0, [7])]))
    assert output.next_token.tolist() == [67, 6]
    assert next_state(0, 5) == 6


@pytest.mark.parametrize(
    "lengths, shape",
    [
        ([1], (1, 1, 1)),
        ([1] * 3, (4, 4, 4)),
        ([1] * 5, (8, 8, 8)),
        ([2], (64, 8, 8)),
        ([60, 4], (64, 8, 8)),
        ([60, 4, 1], (100, 8, 8)),
        ([50, 50], (100, 8, 8)),
        ([9, 8, 7, 6, 5, 4, 3, 2], (64, 8, 8)),  # no sequence is left to own the padding
    ],
)
def test_steps_are_padded_into_the_smallest_bucket(rig: Rig, lengths: list[int], shape: tuple[int, int, int]) -> None:
    executor = rig.executor()
    rig.engine.shapes_run.clear()
    prompts = [[(17 * row + i) % VOCAB for i in range(length)] for row, length in enumerate(lengths)]
    output = executor.execute(step(placed(prompts)))
    assert rig.engine.shapes_run == [shape]
    assert output.next_token.tolist() == [token_after(prompt) for prompt in prompts]


def test_steps_above_the_top_bucket_run_eagerly_at_their_own_size(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Buckets.__init__.__kwdefaults__, "largest_mixed", 64)
    executor = rig.executor()
    rig.engine.shapes_run.clear()
    tokens: list[list[int]] = []
    for lengths in ([60, 30], [64, 3], [60, 30], [2]):
        prompts = [[(length + i) % VOCAB for i in range(length)] for length in lengths]
        calls = rig.calls_of(lambda prompts=prompts: tokens.append(executor.execute(step(placed(prompts))).next_token.tolist()))
        assert tokens.pop() == [token_after(prompt) for prompt in prompts]
        assert ("cudaGraphLaunch" in calls) == (sum(lengths) <= 64)
    assert rig.engine.shapes_run == [(90, 8, 8), (67, 8, 8), (90, 8, 8), (64, 8, 8)]
    again = step(placed([[7] * 60, [7] * 30]))
    assert "set_input_shape" in rig.calls_of(lambda: executor.execute(step(placed([[7] * 60, [7] * 6]))))
    assert "set_input_shape" in rig.calls_of(lambda: executor.execute(again))
    assert "set_input_shape" not in rig.calls_of(lambda: executor.execute(again))


def test_a_step_that_wants_no_logits_and_one_that_wants_several_of_a_row(rig: Rig) -> None:
    executor = rig.executor()
    assert executor.execute(step([([1, 2, 3], 0, [5])], wanted=[])).next_token.tolist() == []
    output = executor.execute(step([([4, 5], 3, [5, 9])], wanted=[0, 1]))
    assert output.next_token.tolist() == [token_after([1, 2, 3, 4]), token_after([1, 2, 3, 4, 5])]


def test_logits_are_fetched_when_they_are_read(rig: Rig) -> None:
    executor = rig.executor()
    output = executor.execute(step([([1, 2], 0, [3]), ([5], 0, [7])]))
    assert not output.logits_at_hand
    assert output.logits.shape == (2, VOCAB)
    assert output.logits.argmax(-1).tolist() == [67, 6]
    assert rig.calls_of(lambda: output.logits) == []
    late = executor.execute(step([([5], 0, [8])]))
    executor.execute(step([([5], 0, [9])]))
    with pytest.raises(AssertionError, match="before the next step"):
        _ = late.logits


def test_tokens_of_a_step_stay_when_later_steps_run(rig: Rig) -> None:
    executor = rig.executor()
    first = executor.execute(step([([1, 2], 0, [3])])).next_token
    for _ in range(3):
        executor.execute(step([([5], 0, [7])]))
    assert first.tolist() == [67]


def test_plain_greedy_never_moves_logits_and_other_rows_do(rig: Rig) -> None:
    executor, sampler = rig.executor(), Sampler(VOCAB)
    requests = [make_request("a", [1, 2]), make_request("b", [5])]
    output = executor.execute(step([([1, 2], 0, [3]), ([5], 0, [7])]))
    assert rig.calls_of(lambda: sampler.sample(output, requests)) == []
    requests[1] = make_request("c", [5], logprobs=1)
    output = executor.execute(step([([1, 2], 0, [3]), ([5], 0, [7])]))
    copied = rig.calls_of(lambda: sampler.sample(output, requests))
    assert copied == ["cudaHostAlloc", "cudaMemcpyAsync", "cudaStreamSynchronize"]


@pytest.mark.parametrize(
    "shape, starts",
    [
        (StepShape(8, 4, 4), [0, 2, 3, 4, 8]),  # what remains goes to the last of them
        (StepShape(4, 6, 4), [0, 2, 3, 4, 4, 4, 4]),
        (StepShape(8, 2, 4), [0, 2, 3]),  # no sequence is unused: nobody owns tokens 3 to 7
    ],
)
def test_padding_is_one_token_for_each_unused_sequence_while_they_last(shape: StepShape, starts: list[int]) -> None:
    inputs = step([([1, 2], 0, [3]), ([5], 4, [7, 8])])
    lengths = shape.vector_lengths()
    views = {name: np.full(lengths[name], -7, dtype) for name, dtype in INPUT_DTYPES.items() if name in lengths}
    tensorrt_step.fill_vectors(views, inputs, shape)
    assert views["query_start_loc"].tolist() == starts
    tokens, seqs = shape.num_tokens - 3, shape.num_seqs - 2
    assert views["input_ids"].tolist() == [1, 2, 5] + [0] * tokens
    assert views["positions"].tolist() == [0, 1, 4] + [0] * tokens
    assert views["slot_mapping"].tolist() == [12, 13, 32] + [-1] * tokens
    assert views["seq_lens"].tolist() == [2, 5] + [0] * seqs
    assert views["logits_indices"].tolist() == [1, 2, 0, 0]


def test_one_decode_is_one_copy_in_one_graph_one_copy_out(rig: Rig) -> None:
    executor = rig.executor()
    executor.execute(step([([1, 2], 0, [3])]))
    assert rig.calls_of(lambda: executor.execute(step([([9], 2, [3])]))) == [
        "cudaMemcpyAsync", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize",
    ]  # fmt: skip


def test_the_block_table_is_sent_only_as_far_as_it_changed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = rig.executor()
    sent: list[int] = []
    original = Cuda.to_device
    monkeypatch.setattr(
        Cuda,
        "to_device",
        lambda self, target, source, size, stream: sent.append(size) or original(self, target, source, size, stream),
    )
    vectors = 6 * 256  # a bucket of 4: each of six vectors in one line
    for blocks, rows_sent in (([[1], [2], [3]], 3), ([[1], [2], [3]], 0), ([[1], [4], [3]], 2), ([[1], [4]], 0)):
        executor.execute(step([([7], 0, row) for row in blocks] + ([([7], 0, [9])] if len(blocks) == 2 else [])))
        expected = vectors + 4 * WIDTH * (3 if len(blocks) == 2 else rows_sent)
        assert sent.pop() == expected


def test_whole_requests_through_the_loop_give_the_tokens_of_the_paper_model(rig: Rig) -> None:
    """Chunked prefill, decodes, forks that copy blocks, preemption: 30 requests of random lengths in too small a pool."""
    rng = random.Random(5)
    executor = rig.executor(num_blocks=24)
    scheduler = make_scheduler(24, BLOCK, 100, max_num_seqs=8, max_model_len=BLOCK * WIDTH)
    recorder = Recorder()
    loop = Loop(executor, scheduler, FakeSampler(VOCAB), BatchBuilder(BLOCK, 100), recorder)  # type: ignore[arg-type]
    loaded = rig.gpu.used_bytes()
    requests = []
    for number in range(30):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        parent = requests[-1] if number % 5 == 4 else None
        if parent is not None:
            prompt = list(parent.prompt_token_ids)
        requests.append(
            make_request(f"r{number}", prompt, max_tokens=rng.randint(1, 20), seed=number if parent else None, fork_of=parent)
        )
        loop.submit(requests[-1])
    for _ in range(2000):
        if not loop.step() and not scheduler.has_work:
            break
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH, request.error
        wanted = expected_tokens(list(request.prompt_token_ids), request.params.max_tokens, VOCAB, request.params.seed or 0)
        assert recorder.tokens[request] == wanted
    assert set(rig.engine.shapes_run) <= set(SHAPES)
    assert rig.gpu.used_bytes() == loaded, "a step allocated memory"
    assert scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("max_num_batched_tokens", [100, 64])
def test_more_requests_than_the_top_bucket_and_prompts_as_long_as_can_be(rig: Rig, max_num_batched_tokens: int) -> None:
    """Whole or in chunks, every shape is within a profile; what does not fit a sequence never reaches the executor."""
    longest = BLOCK * WIDTH
    executor = rig.executor()
    scheduler = make_scheduler(NUM_BLOCKS, BLOCK, max_num_batched_tokens, max_num_seqs=MAX_NUM_SEQS, max_model_len=longest)
    recorder = Recorder()
    builder = BatchBuilder(BLOCK, max_num_batched_tokens)
    loop = Loop(executor, scheduler, FakeSampler(VOCAB), builder, recorder)  # type: ignore[arg-type]
    rig.engine.shapes_run.clear()
    short = [make_request(f"r{number}", [number], max_tokens=4) for number in range(MAX_NUM_SEQS + 1)]
    prompt = [number % VOCAB for number in range(longest - 1)]
    long = make_request("long", prompt, max_tokens=5)
    longer = make_request("longer", [*prompt, 1], max_tokens=1)
    for request in (*short, long, longer):
        loop.submit(request)
    for _ in range(100):
        if not loop.step() and not scheduler.has_work:
            break
    for request, tokens in [*((each, 4) for each in short), (long, 1)]:
        assert request.finish_reason is FinishReason.LENGTH, request.error
        assert recorder.tokens[request] == expected_tokens(list(request.prompt_token_ids), tokens, VOCAB, 0)
    assert longer.finish_reason is FinishReason.ERROR
    assert f"has {longest} tokens but max_model_len={longest} leaves room for {longest - 1}" in str(longer.error)
    assert (MAX_NUM_SEQS,) * 3 in rig.engine.shapes_run
    assert set(rig.engine.shapes_run) <= set(SHAPES)


def test_copied_blocks_hold_what_their_sources_held_in_every_layer(rig: Rig) -> None:
    executor = rig.executor()
    executor.execute(step([([1, 2, 3, 4, 5], 0, [3, 4])]))
    executor.copy_blocks([(3, 10), (4, 11)])
    executor.copy_blocks([])
    output = executor.execute(step([([6], 5, [3, 4]), ([7], 5, [10, 11])]))
    assert output.next_token.tolist() == [token_after([1, 2, 3, 4, 5, 6]), token_after([1, 2, 3, 4, 5, 7])]


# ------------------------------------------------------------------------------------------------------------- pipelining


def test_tokens_go_from_step_to_step_on_the_device(rig: Rig) -> None:
    """The host starts each step before it has seen the token the step reads, and always sends 0 in its place."""
    executor = rig.executor()
    prompts = [[1, 2, 3], [4], [5, 6]]
    blocks = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    executor.submit(step([(prompt, 0, row) for prompt, row in zip(prompts, blocks, strict=True)]))
    found: list[list[int]] = []
    for number in range(8):
        rows = [([0], len(prompt) + number, row) for prompt, row in zip(prompts, blocks, strict=True)]
        executor.submit(step(rows), feedback=[(0, 0), (1, 1), (2, 2)])
        found.append(executor.collect().next_token.tolist())
    found.append(executor.collect().next_token.tolist())
    for prompt, tokens in zip(prompts, zip(*found, strict=True), strict=True):
        assert list(tokens) == expected_tokens(prompt, 9, VOCAB)


def test_feedback_follows_rows_that_move(rig: Rig) -> None:
    executor = rig.executor()
    executor.submit(step([([1, 2], 0, [3]), ([5], 0, [7]), ([8], 0, [9])]))  # tokens 67, 6, 9
    executor.submit(step([([0], 1, [9]), ([11], 0, [12]), ([0], 2, [3])]), feedback=[(0, 2), (2, 0)])
    assert executor.collect().next_token.tolist() == [67, 6, 9]
    assert executor.collect().next_token.tolist() == [token_after([8, 9]), token_after([11]), token_after([1, 2, 67])]


def test_an_unchanged_batch_is_fed_back_in_one_copy() -> None:
    assert runs([(0, 0), (1, 1), (2, 2)]) == [(0, 0, 3)]
    assert runs([(0, 1), (1, 2), (4, 3), (5, 0)]) == [(0, 1, 2), (4, 3, 1), (5, 0, 1)]
    assert runs([]) == []


def test_a_third_step_has_to_wait(rig: Rig) -> None:
    executor = rig.executor()
    for block in (3, 4):
        executor.submit(step([([1], 0, [block])]))
    with pytest.raises(AssertionError, match="third"):
        executor.submit(step([([1], 0, [5])]))
