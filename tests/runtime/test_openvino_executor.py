"""OpenVINOExecutor: ragged steps, every KV format, exact block copies, refusals. Models are tiny and random."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_engines import Built, Sequences, build, prompt

from runtime.batch import StepInputs
from runtime.contract import load_manifest
from runtime.errors import EngineError, ManifestMismatch
from runtime.executors.base import StepOutput
from runtime.executors.openvino import OpenVINOExecutor

LONG = prompt(70, 1)  # three blocks


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def engine(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    cache: dict[tuple[str, ...], Built] = {}

    def get(*key: str) -> Built:
        if key not in cache:
            cache[key] = build(exported(key[0]), tmp_path_factory.mktemp("-".join(key)), *key[1:])
        return cache[key]

    return get


def generate(sequences: Sequences, name: str, first: int, count: int) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        _, next_token = sequences.step({name: tokens[-1:]})
        tokens.append(int(next_token[0]))
    return tokens


@pytest.mark.parametrize("chunks", [[70], [1] * 5 + [65], [32, 32, 6], [33, 31, 5, 1]])
@pytest.mark.parametrize(
    "key", [("llama", "fp32", "f32"), ("llama", "fp32", "f16"), ("llama", "int8", "u8"), ("gemma3_text", "int4", "u8")]
)
def test_chunked_prefill_gives_the_tokens_of_whole_prefill(
    key: tuple[str, ...], chunks: list[int], engine: Callable[..., Built]
) -> None:
    executor = engine(*key).executor()
    whole = Sequences(executor)
    expected, next_token = whole.step({"a": LONG})
    cut = Sequences(executor)
    parts, start = [], 0
    for size in chunks:
        logits, last = cut.step({"a": LONG[start : start + size]})
        parts.append(logits)
        start += size
    # f32 sums may be taken in another order for another number of rows; the token must not change
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-5)
    assert np.array_equal(np.concatenate(parts).argmax(-1), expected.argmax(-1))
    assert generate(cut, "a", int(last[-1]), 12) == generate(whole, "a", int(next_token[-1]), 12)


@pytest.mark.parametrize("key", [("llama", "fp32", "f32"), ("llama", "int8", "u8"), ("gemma2", "fp32", "f32")])
def test_a_sequence_does_not_feel_what_shares_its_batch(key: tuple[str, ...], engine: Callable[..., Built]) -> None:
    executor = engine(*key).executor()
    alone = Sequences(executor).run([{"a": LONG}, {"a": [5]}])["a"]
    mixed = Sequences(executor).run([{"b": prompt(40, 2), "a": LONG, "c": [9]}, {"c": [4], "b": prompt(3, 5), "a": [5]}])["a"]
    np.testing.assert_allclose(mixed, alone, atol=1e-5)
    assert np.array_equal(mixed.argmax(-1), alone.argmax(-1))


def test_rows_come_in_the_order_asked_for_and_next_token_is_their_argmax(engine: Callable[..., Built]) -> None:
    sequences = Sequences(engine("llama").executor())
    every, _ = sequences.step({"a": LONG})
    some, next_token = Sequences(sequences.executor).step({"a": LONG}, rows=[69, 3, 40])
    np.testing.assert_allclose(some, every[[69, 3, 40]], atol=1e-5)
    assert next_token.dtype == np.int64
    assert np.array_equal(next_token, some.argmax(-1))


def test_only_an_engine_with_kernels_of_its_own_draws_with_one(
    engine: Callable[..., Built], exported: Callable[[str], Any], cpu_kernels: Path, tmp_path: Path
) -> None:
    def output_of(executor: OpenVINOExecutor) -> StepOutput:
        outputs, execute = [], executor.execute
        executor.execute = lambda inputs: outputs.append(execute(inputs)) or outputs[-1]  # type: ignore[method-assign, func-returns-value]
        Sequences(executor).step({"a": LONG}, rows=[3, 69])
        return outputs[0]

    assert output_of(engine("llama", "int8").executor()).choose is None
    output = output_of(build(exported("llama"), tmp_path, "int8", kernels=cpu_kernels).executor())
    assert output.choose is not None
    one, rows = np.ones(2), np.array([1, 0])
    drawn = output.choose(output.logits, rows, output.logits.max(axis=1)[rows], one, np.array([1, 1]), one, 0 * one, one / 2)
    assert drawn.tolist() == output.next_token[rows].tolist()


def test_arrays_that_were_changed_are_read_again_and_those_that_cannot_be_are_not_copied_again(
    engine: Callable[..., Built],
) -> None:
    executor = engine("llama").executor()
    ids, table = np.array([5, 6, 7], np.int64), np.array([[3]], np.int32)
    table.flags.writeable = False
    inputs = StepInputs(ids, np.arange(3), np.arange(96, 99, dtype=np.int32), table, ints(0, 3), ints(3), np.array([2]))
    first = executor.execute(inputs).logits.copy()
    ids[2] = 9
    second = executor.execute(inputs).logits.copy()
    assert not np.array_equal(first, second)
    ids[2] = 7
    fed = executor._fed["block_table"]
    assert np.array_equal(executor.execute(inputs).logits, first)
    assert executor._fed["block_table"] is fed
    other = dataclasses.replace(inputs, slot_mapping=inputs.slot_mapping + 32, block_table=np.array([[4]], np.int32))
    assert np.array_equal(executor.execute(other).logits, first)


@pytest.mark.parametrize("key", [("llama", "fp32", "f32"), ("llama", "int8", "u8"), ("gemma2", "fp32", "f32")])
def test_a_step_without_rows_fills_the_cache(key: tuple[str, ...], engine: Callable[..., Built]) -> None:
    executor = engine(*key).executor()
    expected, _ = Sequences(executor).step({"a": LONG})
    sequences = Sequences(executor)
    logits, next_token = sequences.step({"a": LONG[:69]}, rows=[])
    assert logits.shape == (0, executor.vocab_size) and next_token.shape == (0,)
    logits, _ = sequences.step({"a": LONG[69:]})
    np.testing.assert_allclose(logits[-1], expected[-1], atol=1e-5)


@pytest.mark.parametrize(
    "key", [("llama", "fp32", "f32"), ("llama", "fp32", "f16"), ("llama", "int8", "u8"), ("gemma2", "fp32", "f32")]
)
def test_a_sequence_continues_from_copied_blocks_exactly(key: tuple[str, ...], engine: Callable[..., Built]) -> None:
    executor = engine(*key).executor()
    sequences = Sequences(executor)
    sequences.step({"a": LONG})
    copies = [(block, sequences.free.pop()) for block in sequences.tables["a"]]
    executor.copy_blocks(copies)
    sequences.tables["fork"] = [destination for _, destination in copies]
    sequences.lengths["fork"] = len(LONG)
    forked, _ = sequences.step({"fork": [7]})
    sequences.step({"fork": prompt(20, 8)})  # writes into the copy only
    original, _ = sequences.step({"a": [7]})
    assert np.array_equal(forked, original)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_a_block_held_before_does_not_matter(name: str, engine: Callable[..., Built]) -> None:
    built = engine(name)
    clean, _ = Sequences(built.executor()).step({"a": LONG})
    executor = built.executor()
    for pool in executor._cache.pools.values():
        pool[...] = 1e4
    dirty, _ = Sequences(executor).step({"a": LONG})
    assert np.array_equal(clean, dirty)


def _resident_kib(file: Path) -> int:
    """Of the mappings of one file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):  # the first line of a mapping
            inside = values[-1] == str(file)
        elif inside and key == "Rss:":
            total += int(values[0])
    return total


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_pages_of_the_weights_file_go_back_once_they_were_copied(precision: str, tiny_engine: Callable[[str], Path]) -> None:
    directory = tiny_engine(precision)
    weights = (directory / "plan" / "weights.bin").resolve()
    # A page that is read again brings up to 64 KiB around it, how much depends on the kernel; unreleased, the whole file stays.
    half = weights.stat().st_size / 1024 / 2
    assert half > 20 * 64
    executor = OpenVINOExecutor(directory, load_manifest(directory), num_blocks=16, num_threads=1)
    sequences = Sequences(executor)
    before, _ = sequences.step({"a": LONG})
    assert _resident_kib(weights) < half
    again, _ = Sequences(executor).step({"a": LONG})  # a length that is known reads rows of the embedding, which come back
    assert _resident_kib(weights) > 0
    assert np.array_equal(before, again)
    sequences.step({"a": [1, 2, 3]})
    assert _resident_kib(weights) < half


def test_an_engine_of_another_openvino_is_refused(engine: Callable[..., Built]) -> None:
    built = engine("llama")
    stale = dataclasses.replace(built.manifest, libraries={"openvino": "2025.0.0"})
    with pytest.raises(
        ManifestMismatch, match=r"built with openvino 2025\.0\.0 but .* is installed; install openvino==2025\.0\.0"
    ):
        dataclasses.replace(built, manifest=stale).executor()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "vendor-special"}, "layout is 'vendor-special' but this runtime knows"),
        ({"bytes_per_token": 511}, "built for 511 bytes of KV cache per token but this CPU wants 512"),
    ],
)
def test_a_pool_of_another_shape_is_refused(change: dict[str, Any], message: str, engine: Callable[..., Built]) -> None:
    built = engine("llama")
    manifest = dataclasses.replace(built.manifest, kv_cache=dataclasses.replace(built.manifest.kv_cache, **change))
    with pytest.raises(ManifestMismatch, match=message):
        dataclasses.replace(built, manifest=manifest).executor()


def test_a_plan_that_openvino_cannot_read_is_an_engine_error(engine: Callable[..., Built], tmp_path: Any) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/model.onnx").write_bytes(b"not a model")
    with pytest.raises(EngineError, match=r"OpenVINO cannot compile .*rebuild the engine"):
        dataclasses.replace(engine("llama"), directory=tmp_path).executor()


def test_a_manifest_that_lacks_what_the_executor_needs_is_damaged(engine: Callable[..., Built]) -> None:
    built = engine("llama", "int8", "u8")
    precision = dataclasses.replace(built.manifest.precision, details={})
    broken = dataclasses.replace(built, manifest=dataclasses.replace(built.manifest, plan={}, precision=precision))
    message = r"manifest.json is damaged \(no plan.model and no precision.details.dynamic_quantization_group_size\); rebuild"
    with pytest.raises(ManifestMismatch, match=message):
        broken.executor()
