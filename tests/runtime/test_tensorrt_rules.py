"""The fakes fail when the executor is broken on purpose, and take what the real libraries take."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import FakeCudaRuntime, RuleBroken
from fake_tensorrt import (
    FakeContext,
    FakeEngine,
    Rig,
    make_manifest,
    step,
)

from runtime.contract import Manifest
from runtime.executors import tensorrt_context, tensorrt_step
from runtime.executors.tensorrt import TensorRTExecutor


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


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
