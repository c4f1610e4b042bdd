"""TensorRTExecutor on a GPU that exists on paper: right tokens through padding and graphs, and the rules of capture.

fake_cuda.py and fake_tensorrt.py fail a step the moment a rule is broken; the tests at the end break the executor on purpose.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeCudaRuntime, RuleBroken
from fake_tensorrt import (
    BLOCK,
    NUM_BLOCKS,
    NUM_LAYERS,
    SLOT_BYTES,
    VOCAB,
    WIDTH,
    FakeContext,
    FakeEngine,
    FakeTensorRT,
    Rig,
    make_manifest,
)
from fakes import FakeSampler, Recorder, expected_tokens, make_request, make_scheduler, next_state

from builder.targets.buckets import token_buckets
from runtime.batch import BatchBuilder, StepInputs
from runtime.contract import KVSpec, Manifest
from runtime.errors import EngineError, ManifestMismatch, UnsupportedFeature
from runtime.executors import tensorrt_context, tensorrt_load, tensorrt_step
from runtime.executors.cuda import Cuda
from runtime.executors.tensorrt import TensorRTExecutor, runs
from runtime.executors.tensorrt_buckets import Buckets, mixed_sizes
from runtime.executors.tensorrt_pools import LAYOUT, RESERVE_BYTES, check_fits
from runtime.loop import Loop
from runtime.request import FinishReason

SHAPES = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (64, 8, 8), (100, 8, 8)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def step(rows: list[tuple[list[int], int, list[int]]], wanted: list[int] | None = None) -> StepInputs:
    """`rows` are (new tokens, tokens cached, blocks); logits of the last token of each row unless `wanted` says which."""
    ids, positions, slots, starts, lens = [], [], [], [0], []
    table = np.zeros((len(rows), max(len(blocks) for _, _, blocks in rows)), np.int32)
    for row, (tokens, cached, blocks) in enumerate(rows):
        table[row, : len(blocks)] = blocks
        for position, token in enumerate(tokens, cached):
            ids.append(token)
            positions.append(position)
            slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(ids))
        lens.append(cached + len(tokens))
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int32),
        block_table=table,
        query_start_loc=np.array(starts, np.int32),
        seq_lens=np.array(lens, np.int32),
        logits_indices=np.array([end - 1 for end in starts[1:]] if wanted is None else wanted, np.int64),
    )


def placed(prompts: list[list[int]]) -> list[tuple[list[int], int, list[int]]]:
    """Rows of new sequences, each in blocks of its own, from the last block down."""
    rows, free = [], list(range(NUM_BLOCKS))
    for prompt in prompts:
        rows.append((prompt, 0, [free.pop() for _ in range(-(-len(prompt) // BLOCK))]))
    return rows


def token_after(tokens: list[int]) -> int:
    return expected_tokens(tokens, 1, VOCAB)[0]


# ------------------------------------------------------------------------------------------------------------------ steps


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


# ---------------------------------------------------------------------------------------------------------------- loading


def test_loading_captures_every_bucket_after_a_plain_run(rig: Rig) -> None:
    executor = rig.executor()
    calls = rig.gpu.calls
    assert rig.engine.shapes_run == SHAPES  # each once for real
    assert calls.count("execute_async_v3") == 2 * len(SHAPES)
    assert calls.count("cudaGraphUpload") == len(SHAPES)
    assert rig.registered == [rig.directory]
    assert calls.index("load_weights_async") < calls.index("cudaMalloc"), "weights are on their way while memory is allocated"
    assert executor.kv_cache_bytes() == NUM_BLOCKS * BLOCK * 2 * NUM_LAYERS * SLOT_BYTES


def test_closing_gives_everything_back(rig: Rig) -> None:
    executor = rig.executor()
    _ = executor.execute(step([([1], 0, [3])])).logits
    executor.execute(step(placed([[1] * 40, [1] * 40])))
    executor.close()
    assert rig.gpu.device == {} and rig.gpu.host == {}


def test_a_context_that_cannot_be_captured_runs_without_a_graph(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeContext, "is_stream_capturable", lambda self, stream: False, raising=False)
    executor = rig.executor()
    assert executor.execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]
    assert "cudaGraphLaunch" not in rig.gpu.calls
    assert "without a CUDA graph" in caplog.text


@pytest.mark.parametrize(
    "facts, gpu, error, message",
    [
        ({"libraries": {"tensorrt": "11.3.0"}}, {}, ManifestMismatch, r"built with tensorrt 11\.3\.0 but 11\.4\.0 is installed"),
        ({"plugin_sha256": "badbad"}, {}, ManifestMismatch, r"attention plugin badbad but .* has c0ffee; rebuild"),
        ({}, {"num_devices": 0}, EngineError, r"needs an NVIDIA GPU \(sm80, sm89\) but CUDA finds none"),
        ({}, {"capability": 90}, ManifestMismatch, r"for sm80, sm89 but this GPU, Paper GPU, is sm90; .*--target-arch sm90"),
        ({"weight_bytes": 9 << 30}, {}, ManifestMismatch, r"weights need 9216 MiB but 7936 of the GPU's 8192 MiB are free"),
        ({"max_num_seqs": 32}, {}, ManifestMismatch, r"plan takes steps of 8 sequences and 100 tokens but the manifest says 32"),
        ({"buckets": (1, 16)}, {}, ManifestMismatch, r"no optimization profile of the plan allows a step of"),
        ({"kv_cache": KVSpec("u4", "f16", BLOCK, LAYOUT, 64)}, {}, ManifestMismatch, r"KV cache holds u4 but this runtime knows"),
        ({"kv_cache": KVSpec("f16", "f8", BLOCK, LAYOUT, 64)}, {}, ManifestMismatch, r"built for 64 bytes .* lays out 24"),
        ({"kv_cache": KVSpec("f16", "f16", BLOCK, "other", 64)}, {}, ManifestMismatch, r"layout is 'other' but"),
        ({"plan": {"sm80": "x"}}, {}, ManifestMismatch, r"no plan for sm89, only sm80"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, facts: dict, gpu: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Rig(tmp_path, **gpu).executor(**facts)
    assert "\n" not in str(caught.value) and type(caught.value) is error


def test_too_little_memory_says_how_many_tokens_would_fit(tmp_path: Path) -> None:
    manifest = make_manifest()
    block = BLOCK * manifest.kv_cache.bytes_per_token
    check_fits(manifest, 1000, RESERVE_BYTES + 1000 * block, 1 << 30)
    with pytest.raises(ManifestMismatch, match=r"cache of 4004 tokens .* 4000 tokens would fit; set num_blocks=1000 or less"):
        check_fits(manifest, 1001, RESERVE_BYTES + 1000 * block, 1 << 30)
    rig = Rig(tmp_path, memory_bytes=RESERVE_BYTES + (4 << 20))
    with pytest.raises(ManifestMismatch, match=r"tokens would fit"):
        rig.executor(num_blocks=1 << 20)


def test_a_library_that_cannot_defer_weights_loads_them_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeTensorRT.ICudaEngine, "load_weights_async")
    assert rig.executor().execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]
    assert "load_weights_async" not in rig.gpu.calls


def test_a_damaged_plan_is_refused(rig: Rig) -> None:
    (rig.directory / "plan" / "model.plan").write_bytes(b"nonsense")
    with pytest.raises(EngineError, match=r"cannot read .*model\.plan"):
        rig.executor()


def test_a_plan_per_architecture_is_chosen_by_the_gpu(rig: Rig) -> None:
    (rig.directory / "plan" / "model.plan").rename(rig.directory / "plan" / "sm89.plan")
    rig.executor(plan={"sm80": "plan/sm80.plan", "sm89": "plan/sm89.plan"})


def test_a_step_larger_than_every_profile_is_refused(rig: Rig) -> None:
    executor = rig.executor()
    with pytest.raises(UnsupportedFeature, match=r"128 tokens exceeds the 100 .*--max-num-batched-tokens 128"):
        executor.execute(step(placed([[1] * 64, [1] * 64])))
    assert executor.execute(step([([1, 2], 0, [3])])).next_token.tolist() == [67]


def test_free_memory_for_the_cache_leaves_out_the_weights(rig: Rig) -> None:
    assert tensorrt_load.free_bytes_beside_weights(make_manifest(), rig.backend) == (8 << 30) - (1 << 20) - RESERVE_BYTES


def test_missing_library_is_named() -> None:
    with pytest.raises(EngineError, match=r"target tensorrt needs tensorrt 11\.4\.0, which cannot be imported"):
        tensorrt_load.default_backend(make_manifest())


@pytest.mark.parametrize("largest", [48, 64, 512, 700, 8192])
def test_mixed_buckets_are_those_the_builder_made_profiles_for(largest: int) -> None:
    assert tuple(mixed_sizes(largest)) == token_buckets(largest)


# ------------------------------------------------------------------------- the fake fails when the executor is broken


class MovesATensorAfterCapture(TensorRTExecutor):
    def submit(self, inputs, feedback=()):
        context = self._contexts[self._buckets.choose(inputs)]
        context.handle.set_tensor_address("input_ids", self._step.address("positions", context.shape))
        super().submit(inputs, feedback)


class ReplaysAnotherShape(TensorRTExecutor):
    def submit(self, inputs, feedback=()):
        context = self._contexts[self._buckets.choose(inputs)]
        context.handle.set_input_shape("input_ids", (len(inputs.input_ids),))
        super().submit(inputs, feedback)


class ReplaysTheGraphOfASmallerBucket(TensorRTExecutor):
    def submit(self, inputs, feedback=()):
        smallest = self._buckets.decode[0]
        self._contexts = dict.fromkeys(self._contexts, self._contexts[smallest])
        super().submit(inputs, feedback)


class FreesWhatAGraphUses(TensorRTExecutor):
    def submit(self, inputs, feedback=()):
        self._cuda.free(self._memory.activations)
        super().submit(inputs, feedback)


TWO_ROWS = step([([1], 0, [3]), ([5], 0, [7])])


@pytest.mark.parametrize(
    "kind, rule",
    [
        (MovesATensorAfterCapture, "set_tensor_address of a context after a graph was captured from it"),
        (ReplaysAnotherShape, "set_input_shape of a context after a graph was captured from it"),
        (FreesWhatAGraphUses, "is not, or no longer, allocated"),
    ],
)
def test_a_broken_step_is_caught(rig: Rig, kind: type[TensorRTExecutor], rule: str) -> None:
    executor = rig.executor(kind)
    with pytest.raises(RuleBroken, match=rule):
        executor.execute(TWO_ROWS)


def test_the_graph_of_a_smaller_bucket_gives_wrong_tokens(rig: Rig) -> None:
    assert rig.executor().execute(TWO_ROWS).next_token.tolist() == [2, 6]
    (rig.directory / "again").mkdir()
    broken = Rig(rig.directory / "again").executor(ReplaysTheGraphOfASmallerBucket)
    assert broken.execute(TWO_ROWS).next_token.tolist() != [2, 6]


def _allocates(context: tensorrt_context.Context) -> None:
    context.cuda.allocate(16)


def _waits(context: tensorrt_context.Context) -> None:
    context.cuda.synchronize(context.stream)


def _sets_a_shape(context: tensorrt_context.Context) -> None:
    context.handle.set_input_shape("seq_lens", (context.shape.num_seqs,))


@pytest.mark.parametrize(
    "extra, rule",
    [
        (_allocates, "cudaMalloc during capture"),
        (_waits, "cudaStreamSynchronize during capture"),
        (_sets_a_shape, "set_input_shape during capture"),
    ],
)
def test_a_broken_capture_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch, extra: Callable, rule: str) -> None:
    original = tensorrt_context.Context.enqueue

    def enqueue(self: tensorrt_context.Context) -> None:
        if rig.gpu.capturing():
            extra(self)
        original(self)

    monkeypatch.setattr(tensorrt_context.Context, "enqueue", enqueue)
    with pytest.raises(RuleBroken, match=rule):
        rig.executor()
    assert not rig.gpu.capturing(), "capture was left open"


def test_capture_without_a_plain_run_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tensorrt_context.Context.enqueue
    monkeypatch.setattr(tensorrt_context.Context, "enqueue", lambda self: original(self) if rig.gpu.capturing() else None)
    with pytest.raises(RuleBroken, match="capture before a plain run"):
        rig.executor()


def test_a_run_without_activation_memory_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeContext, "set_device_memory", lambda self, memory, size: None)
    with pytest.raises(RuleBroken, match="without activation memory"):
        rig.executor()


def test_refilling_a_buffer_that_is_being_copied_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one staging buffer instead of two, the second step overwrites the first before it was sent."""
    executor = rig.executor()
    original = tensorrt_step.StepBuffer.send
    monkeypatch.setattr(
        tensorrt_step.StepBuffer, "send", lambda self, i, shape, slot, stream: original(self, i, shape, 0, stream)
    )
    executor.submit(step([([1, 2], 0, [3])]))
    executor.submit(step([([5, 5], 0, [7])]))
    assert executor.collect().next_token.tolist() != [67]


def test_padding_that_is_stored_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_step, "NO_SLOT", 0)
    with pytest.raises(RuleBroken, match="padding that is stored"):
        rig.executor()


# ------------------------------------------------------------------------------------- the fake has the real calls' names


def _documented(text: str, name: str) -> list[list[str]]:
    """Parameters that a binding's docstring gives, without self; one list per overload."""
    lines = [line for line in text.splitlines() if re.search(rf"(^|\s){name}\(", line) and "*args" not in line]
    lists = []
    for line in lines:
        inside = re.sub(r"\s*(->.*|\))$", "", line[line.index("(") + 1 :]).rstrip(")")
        parts = [part.strip() for part in inside.split(",") if part.strip()]
        parts = [part.split(":")[0].split("=")[0].split()[-1] if ":" in part else part.split()[-1] for part in parts]
        lists.append([part for part in parts if part != "self"])
    return lists


def test_fake_contexts_and_engines_take_what_tensorrt_takes() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    for fake, real in ((FakeContext, trt.IExecutionContext), (FakeEngine, trt.ICudaEngine)):
        for name, function in inspect.getmembers(fake, inspect.isfunction):
            if name.startswith("_") or name == "step":
                continue
            assert list(inspect.signature(function).parameters)[1:] in _documented(getattr(real, name).__doc__, name), (
                fake,
                name,
            )


def test_fake_cuda_functions_take_what_cuda_python_takes() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    for name, function in inspect.getmembers(FakeCudaRuntime, inspect.isfunction):
        if name.startswith("cuda"):
            assert list(inspect.signature(function).parameters)[1:] in _documented(getattr(real, name).__doc__, name), name
    for name in ("cudaMemcpyKind", "cudaStreamCaptureMode", "cudaDeviceAttr"):
        for member in getattr(FakeCudaRuntime, name):
            assert int(getattr(getattr(real, name), member.name)) == int(member), member
    for name in ("cudaHostAllocDefault", "cudaStreamNonBlocking", "cudaEventDisableTiming"):
        assert getattr(real, name) == getattr(FakeCudaRuntime, name)


def test_the_manifest_of_these_tests_survives_json() -> None:
    import json

    manifest = make_manifest()
    assert Manifest.from_dict(json.loads(manifest.to_json())) == dataclasses.replace(manifest)
