"""Calibration: what is read, what is counted, what is kept, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import fused, prompt

from builder import calibration, calibration_data
from builder.observe import NUM_BINS, TensorStats, observe, windows_of
from builder.quantize import layer_inputs, ranges
from builder.segments import cut, extract
from builder.spill import Spill
from plugins.paged_attention.op import attach_functions
from runtime.errors import BuildError
from runtime.tokenizer import Tokenizer

TINY_LLAMA = Path(__file__).parents[1] / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_LLAMA)


@pytest.fixture(scope="module")
def graph(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    ir.save(attach_functions(fused(exported("llama"))), path)
    return path


def test_windows_cover_the_text_and_start_with_bos() -> None:
    assert list(windows_of(range(10), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(windows_of(range(9), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a rest of one is dropped
    assert list(windows_of(range(6), 4, bos_token_id=99)) == [[99, 0, 1, 2], [99, 3, 4, 5]]
    assert list(windows_of(range(1), 4)) == [[0]]


def test_several_passes_give_what_one_gives(graph: Path) -> None:
    names = layer_inputs(ir.load(graph), "int4")
    windows = [prompt(20, 1), prompt(33, 2)]
    one = observe(graph, windows, names, hessians=True, num_threads=1)
    steps: list[tuple[int, int]] = []
    many = observe(graph, windows, names, hessians=True, max_bytes=1, num_threads=1, progress=lambda a, b: steps.append((a, b)))
    assert len(steps) > 2 * len(names)  # a segment per layer and one per embedding
    assert steps == [(n + 1, len(steps)) for n in range(len(steps))]
    for name in names:
        for part in ("channel_amax", "histogram", "sample", "hessian"):
            np.testing.assert_allclose(getattr(many[name], part), getattr(one[name], part), rtol=1e-5, atol=1e-6)
        assert one[name].num_rows == len(one[name].sample) == 53
        moments = one[name].sample.T @ one[name].sample / 53
        np.testing.assert_allclose(one[name].hessian, moments, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
        assert one[name].histogram.sum() == 53 * len(one[name].channel_amax)


def test_a_segment_has_its_own_weights_and_passes_on_little(graph: Path) -> None:
    names = layer_inputs(ir.load(graph), "int4")
    sizes = [value.const_value.nbytes for value in ir.load(graph).graph.initializers.values() if value.const_value is not None]
    limit = 2 * max(sizes)
    segments = cut(ir.load(graph), dict.fromkeys(names), limit, {})
    assert 2 < len(segments) < len(names)
    assert [name for segment in segments for name in segment.observed] == names
    assert [segment.inputs for segment in segments] == [(), *(segment.outputs for segment in segments[:-1])]
    assert segments[-1].outputs == ()
    held = 0
    for segment in segments:
        part = extract(ir.load(graph), segment)
        weights = [value.const_value.nbytes for value in part.graph.initializers.values() if value.const_value is not None]
        assert sum(weights) <= limit
        held += sum(weights)
        fed = {str(value.name) for value in part.graph.inputs}
        assert fed - {"input_ids", "positions", *segment.inputs} == {
            name for name in fed if name.startswith(("k_pool", "v_pool", "slot", "block", "query_start", "seq_lens", "logits"))
        }
    assert held < sum(sizes)  # the head is in none
    assert len(cut(ir.load(graph), dict.fromkeys(names), sum(sizes), {})) == 1
    assert len(cut(ir.load(graph), dict.fromkeys(names), sum(sizes), dict.fromkeys(names, sum(sizes)))) >= len(names)


def test_what_is_spilled_comes_back(tmp_path: Path) -> None:
    place = Spill(tmp_path)
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.zeros((0, 4), np.int64), np.array(7), np.array([True, False])]
    spilled = [place.put(array) for array in arrays]
    assert list(tmp_path.iterdir()) == []  # a file without a name
    for found, array in reversed(list(zip(spilled, arrays, strict=True))):
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(found), array)


def test_statistics_are_those_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((300, 5)).astype(np.float32)
    stats = TensorStats(np.zeros(5, np.float32))
    for part in np.split(rows, 3):
        stats.add(part * 2, 10)  # the range grows on the way
    np.testing.assert_array_equal(stats.channel_amax, np.abs(rows * 2).max(0))
    assert stats.histogram.sum() == rows.size
    edges = np.arange(NUM_BINS + 1) * stats.limit / NUM_BINS
    np.testing.assert_allclose(stats.histogram.cumsum(), np.histogram(np.abs(rows * 2), edges)[0].cumsum(), atol=3)
    assert stats.sample.shape == (30, 5)


def test_methods_cut_a_long_tail_more_or_less() -> None:
    rng = np.random.default_rng(0)
    stats = TensorStats(np.zeros(64, np.float32))
    rows = rng.standard_normal((2000, 64)).astype(np.float32)
    rows[0, 0] = 100.0
    stats.add(rows, 0)
    assert ranges.limit(stats, "max", "int8") == 100.0
    found = {method: ranges.limit(stats, method, "int8") for method in ("percentile", "mse", "entropy")}
    assert 3 < found["percentile"] < 6  # one in ten thousand of a normal distribution is above 3.9
    assert 30 < found["mse"] < 90  # one square of 100 - 30 weighs as much as the rounding of all the others
    assert 3 < found["entropy"] < 30
    assert ranges.limit(stats, "mse", "fp8") > 50  # E4M3 has the range: cutting gains it nothing
    with pytest.raises(BuildError, match="unknown calibration method 'median'; the methods are max, percentile, mse, entropy"):
        ranges.limit(stats, "median", "int8")
    assert ranges.limit(TensorStats(np.zeros(3, np.float32)), "mse", "int8") == 1.0


def test_ranges_are_cached_by_model_and_text(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = layer_inputs(ir.load(graph), "int8")
    data = calibration_data.CalibrationSet((tuple(prompt(40, 3)),))
    first = calibration.collect(graph, data, names, {}, model_key="m", num_threads=1)
    monkeypatch.setattr(calibration, "observe", lambda *_, **__: pytest.fail("calibrated again"))
    second = calibration.collect(graph, data, names, {}, model_key="m", num_threads=1)
    assert second.sha256 == first.sha256 == data.sha256
    for name in names:
        for part in dataclasses.fields(TensorStats):
            np.testing.assert_array_equal(getattr(second.stats[name], part.name), getattr(first.stats[name], part.name))
    other = calibration_data.CalibrationSet((tuple(prompt(40, 4)),))
    for arguments in ((graph, other, names, {}, "m"), (graph, data, names, {}, "n"), (graph, data, names[1:], {}, "m")):
        with pytest.raises(pytest.fail.Exception, match="calibrated again"):
            calibration.collect(*arguments[:4], model_key=arguments[4])
    assert calibration.collect(graph, data, [], {}).sha256 == ""


@pytest.mark.parametrize("damage", ["cut short", "a bit", "no archive"])
def test_a_damaged_file_of_ranges_is_written_anew(
    damage: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = layer_inputs(ir.load(graph), "int8")[:1]
    data = calibration_data.CalibrationSet((tuple(prompt(40, 3)),))
    first = calibration.collect(graph, data, names, {}, model_key="m", num_threads=1)
    (file,) = (tmp_path / "forgeline" / "calibration").iterdir()
    good = content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= damage == "a bit"
    file.write_bytes({"cut short": content[:1000], "a bit": content, "no archive": b"ranges"}[damage])
    again = calibration.collect(graph, data, names, {}, model_key="m", num_threads=1)
    np.testing.assert_array_equal(again.stats[names[0]].histogram, first.stats[names[0]].histogram)
    assert len(file.read_bytes()) == len(good)
    monkeypatch.setattr(calibration, "observe", lambda *_, **__: pytest.fail("calibrated again"))
    calibration.collect(graph, data, names, {}, model_key="m", num_threads=1)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_texts_prompts_and_chats_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    words = " ".join(["and the earth was without form"] * 30)
    plain = calibration_data.load(write(tmp_path / "a.txt", words), tokenizer, context=64)
    lines = f'{{"text": "{words}"}}\n\n{{"prompt": "and"}}\n"the"\n{{"messages": [{{"role": "user", "content": "earth"}}]}}\n'
    mixed = calibration_data.load(write(tmp_path / "a.jsonl", lines), tokenizer, context=64)
    ids = tokenizer.encode(words, add_special_tokens=False)
    flat = [token for window in plain.windows for token in window]
    assert flat == ids[: len(flat)] and all(len(window) == 64 for window in plain.windows[:-1])
    assert mixed.windows[0] == plain.windows[0]
    for name in ("b.JSONL", "b.json", "b.ndjson"):
        assert calibration_data.load(write(tmp_path / name, "\ufeff" + lines), tokenizer, context=64) == mixed
    assert calibration_data.load(write(tmp_path / "b.txt", "\ufeff" + words), tokenizer, context=64) == plain
    assert len(calibration_data.load(None, tokenizer, samples=3, context=64).windows) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"has 0 tokens but at least 128 are needed; give a longer one"),
        ("a.txt", "too short", r"has \d+ tokens but at least 128 are needed"),
        ("a.txt", b"fine\n\xff\xfe no\n", r"line 2 of the calibration data .* is not UTF-8 \(byte 0 is 0xFF\)"),
        ("a.jsonl", '{"text": "a"}\n{oops\n', "line 2 of the calibration data .* is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1 of the calibration data .* is not JSON .*recursion"),
        ("a.jsonl", "9" * 5000, "line 1 of the calibration data .* is not JSON .*5000 digits"),
        ("a.jsonl", r'{"text": "\ud800"}', "the calibration data .*a.jsonl cannot be tokenized: .*lone surrogate"),
        ("a.jsonl", '{"texts": "a"}\n', 'line 1 of the calibration data .* has no "text", "prompt" or "messages"'),
        ("a.jsonl", "[1]\n", 'line 1 of the calibration data .* has no "text"'),
        ("a.jsonl", '{"text": 5}\n', 'line 1 .* has a "text" of type int but it must be a string'),
        ("a.jsonl", '{"messages": {}}\n', 'line 1 .* has a "messages" of type dict but it must be a list'),
        ("a.jsonl", '{"messages": []}\n', "line 1 .* cannot be rendered: messages must be a non-empty list"),
        ("a.jsonl", '\n{"messages": ["a"]}\n', r"line 2 .*: messages\[0\] is of type str but must be an object"),
        ("a.jsonl", '{"messages": [{"role": 5, "content": "a"}]}', r'messages\[0\] has no "role", a string such as "user"'),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 7}]}', r'messages\[0\] has no "content", a string or a list'),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": [' + "[" * 99 + "]" * 99 + "]}]}",
            "nested more than 64 levels deep",
        ),
    ],
)
def test_bad_text_is_refused(name: str, content: str | bytes, message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(BuildError, match=message):
        calibration_data.load(write(tmp_path / name, content), tokenizer)


def test_a_missing_file_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from builder.cli import main

    command = ["build", str(TINY_LLAMA), "--output", str(tmp_path / "e"), "--precision", "int8-sq"]
    assert main([*command, "--calibration-data", str(tmp_path / "none.txt")]) == 2
    assert "none.txt cannot be read (No such file or directory)" in capsys.readouterr().err


def test_what_can_be_refused_without_the_model_is_refused_before_it_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from builder import build
    from builder.cli import main

    monkeypatch.setattr(build, "_canonical", lambda *_: pytest.fail("exported"))
    os.mkfifo(tmp_path / "pipe.txt")
    for path, message in (
        (tmp_path / "pipe.txt", "pipe.txt is no regular file; give a .txt or .jsonl file"),
        (Path("/dev/zero"), "/dev/zero is no regular file"),
        (tmp_path, "is a directory; give a .txt or .jsonl file"),
        (write(tmp_path / "a.jsonl", "[1]"), "line 1 of the calibration data"),
    ):
        command = ["build", str(TINY_LLAMA), "--output", str(tmp_path / "e"), "--precision", "int8-sq"]
        assert main([*command, "--calibration-data", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_bos_is_put_where_the_tokenizer_puts_it(tokenizer: Tokenizer) -> None:
    assert calibration_data.added_bos(tokenizer) is None
    with_bos = Tokenizer.load(TINY_LLAMA)
    with_bos.encode = lambda text, add_special_tokens=True: [with_bos.bos_token_id, 7]  # type: ignore[method-assign,assignment]
    assert calibration_data.added_bos(with_bos) == with_bos.bos_token_id
