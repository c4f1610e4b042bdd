"""bench/peers without the peers: what is timed, how commands are made, what the table says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "peers"))
import compare
import protocol
import run_llama_cpp
from recipes import RECIPES

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"


def timed(monkeypatch: pytest.MonkeyPatch, num_sequences: int, events: list[tuple[float, int]]) -> protocol.Timing:
    """The timing of tokens that come as (moment, sequence); the clock starts at 0."""
    moments = iter([0.0, *(moment for moment, _ in events)])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(moments))
    watch = protocol.Stopwatch(num_sequences)
    for _, sequence in events:
        watch.add(sequence)
    return watch.timing()


def test_decode_lasts_while_all_sequences_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0 begins while 1's prompt is still read, and ends first; 1 is alone from then on
    events = [(1.0, 0), (3.0, 0), (3.0, 1), (4.0, 0), (4.0, 1), (6.0, 0), (6.0, 1), (6.5, 1), (7.0, 1)]
    expected = protocol.Timing(prefill_s=3.0, decode_s=3.0, decode_tokens=4)
    assert timed(monkeypatch, 2, events) == expected
    reported_in_other_order = [(1.0, 0), (3.0, 1), (3.1, 0), (4.0, 1), (4.1, 0), (6.0, 1), (6.1, 0), (6.5, 1), (7.0, 1)]
    assert timed(monkeypatch, 2, reported_in_other_order) == expected


def test_whole_steps_count_for_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 2.0, 3.0, 5.0])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(moments))
    watch = protocol.Stopwatch(3)
    for _ in range(3):
        watch.add_step()
    assert watch.timing() == protocol.Timing(prefill_s=2.0, decode_s=3.0, decode_tokens=6)


def test_what_cannot_be_timed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="only 1 of 2"):
        timed(monkeypatch, 2, [(1.0, 0)])
    with pytest.raises(RuntimeError, match="ended before the last one began; raise --new-tokens"):
        timed(monkeypatch, 2, [(1.0, 0), (2.0, 0), (3.0, 1), (4.0, 1)])


def test_every_recipe_expands_and_has_its_runner() -> None:
    names = dict.fromkeys(("python", "bin", "hf", "out", "here", "source", "jobs"), "X")
    for recipe in RECIPES:
        assert (PEERS / recipe.script).is_file(), recipe.name
        for precision in ("int4", "int8"):
            _, commands = recipe.convert[precision]
            expanded = [part.format(**names) for command in (*commands, *recipe.build) for part in command]
            assert "X" in " ".join(expanded) and "{" not in " ".join(expanded)


def test_our_runner_follows_the_protocol(tiny_engine: object) -> None:
    engine = tiny_engine("fp32")  # type: ignore[operator]
    command = [sys.executable, str(PEERS / "run_forgeline.py"), str(engine), "--threads", "1", "--vocab-size", "2048"]
    sizes = [
        "--prefill",
        "32",
        "--context",
        "8",
        "--batches",
        "1,3",
        "--new-tokens",
        "120",
    ]  # long, so that a busy machine times some
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["decode"]) == {"1", "3"} and figures["prefill"] > 0 and figures["versions"]["openvino"]


def test_table_and_ratios() -> None:
    def contestant(name: str, runs: list[dict[str, object]]) -> compare.Contestant:
        made = compare.Contestant(name, "int4", Path("p"), Path("s"), Path("m"), 2, 33, mine=name.startswith("forgeline"))
        made.runs = runs
        return made

    mine = contestant("forgeline", [{"prefill": p, "decode": {"1": d, "4": 40.0}} for p, d in ((100, 10), (300, 12), (200, 11))])
    other = contestant("peer", [{"prefill": 100.0, "decode": {"1": 5.5}}] * 3)
    lines = compare.table([mine, other], ["1", "4"]).splitlines()
    assert lines[2] == "| forgeline | int4 | 2 | 200.0 (100.0–300.0) | 11.0 (10.0–12.0) | 40.0 (40.0–40.0) |"
    assert lines[3] == "| peer | int4 | 2 | 100.0 (100.0–100.0), ours 2.00× | 5.5 (5.5–5.5), ours 2.00× | – |"
    fast = contestant("forgeline-bf16", [{"prefill": 250.0, "decode": {"1": 22.0, "4": 44.0}}])
    lines = compare.table([mine, fast, other], ["1"]).splitlines()
    assert lines[3] == "| forgeline-bf16 | int4 | 2 | 250.0 (250.0–250.0) | 22.0 (22.0–22.0) |"
    assert lines[4] == "| peer | int4 | 2 | 100.0 (100.0–100.0), ours 2.00× and 2.50× | 5.5 (5.5–5.5), ours 2.00× and 4.00× |"


def test_two_engines_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(compare, "build", built.append)
    options = argparse.Namespace(engine=None, work=tmp_path, precision="int4", threads=2, new_tokens=33)
    exact, fast = (compare.ours(Path("hf/llama-1b"), dtype, options) for dtype in ("f32", "bf16"))
    assert [(c.compute_dtype, c.output.name) for c in built] == [("f32", "llama-1b-int4"), ("bf16", "llama-1b-int4-bf16")]
    assert [(c.name, c.model, c.mine) for c in (exact, fast)] == [
        ("forgeline", tmp_path / "forgeline" / "llama-1b-int4", True),
        ("forgeline-bf16", tmp_path / "forgeline" / "llama-1b-int4-bf16", True),
    ]
    assert "--compute-dtype" not in exact.commands[0] and "--compute-dtype bf16" in fast.commands[0]
    for arguments in (["--compute-dtype", "f32,f16"], ["--compute-dtype", "f32,bf16", "--engine", "e"]):
        with pytest.raises(SystemExit, match="--compute-dtype"):
            compare.main([*arguments, "--work", str(tmp_path)])


def test_llama_cpp_table() -> None:
    table = "\n".join(
        [
            "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |",
            "|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|",
            "|   256 |      8 |    4 |   1056 |    2.500 |   409.60 |    0.640 |    50.00 |    3.140 |   336.31 |",
        ]
    )
    row = run_llama_cpp._last_row(table)
    assert (row["T_PP s"], row["T_TG s"], row["B"]) == (2.5, 0.64, 4)


def test_a_peer_that_fails_is_named_and_the_table_has_the_rest(
    tiny_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(recipe: object, hf: Path, options: argparse.Namespace) -> compare.Contestant:
        raise compare.Failed("no such package")

    monkeypatch.setattr(compare, "prepare", refuse)
    model = PEERS.parents[1] / "tests" / "models" / "tiny-llama"
    engine = tiny_engine("fp32")  # type: ignore[operator]
    compare.main(
        [
            "--model", str(model), "--engine", str(engine), "--precision", "int8", "--peers", "vllm", "--threads", "1", "--work",
            str(tmp_path), "--repetitions", "1", "--prefill", "16", "--context", "8", "--batches", "1", "--new-tokens", "24",
        ]
    )  # fmt: skip
    text = capsys.readouterr().out
    assert "* vllm is missing: no such package" in text and "| forgeline | int8 | 1 |" in text
    assert (tmp_path / "tiny-llama-int8.md").read_text() in text
    assert json.loads((tmp_path / "tiny-llama-int8.json").read_text())["failures"] == {"vllm": "no such package"}
    with pytest.raises(SystemExit, match="unknown peers nobody"):
        compare.main(["--peers", "nobody", "--work", str(tmp_path)])
