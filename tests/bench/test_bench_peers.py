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


def test_stopwatch_splits_at_the_moment_all_have_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(moments))
    watch = protocol.Stopwatch(2)
    for tokens in ((1, 0), (1, 1), (1, 1), (0, 2)):
        for sequence, count in enumerate(tokens):
            watch.add(sequence, count)
        watch.step_done()
    assert watch.timing() == protocol.Timing(prefill_s=3.0, decode_s=3.0, decode_tokens=4)


def test_a_sequence_without_a_token_is_an_error() -> None:
    watch = protocol.Stopwatch(2)
    watch.add(0)
    watch.step_done()
    with pytest.raises(RuntimeError, match="only 1 of 2"):
        watch.timing()


def test_every_recipe_expands_and_has_its_runner() -> None:
    names = dict.fromkeys(("python", "bin", "hf", "out", "here", "source"), "X")
    for recipe in RECIPES:
        assert (PEERS / recipe.script).is_file(), recipe.name
        for precision in ("int4", "int8"):
            _, commands = recipe.convert[precision]
            expanded = [part.format(**names) for command in (*commands, *recipe.build) for part in command]
            assert "X" in " ".join(expanded) and "{" not in " ".join(expanded)


def test_our_runner_follows_the_protocol(tiny_engine: object) -> None:
    engine = tiny_engine("fp32")  # type: ignore[operator]
    command = [sys.executable, str(PEERS / "run_forgeline.py"), str(engine), "--threads", "1", "--vocab-size", "2048"]
    sizes = ["--prefill", "32", "--context", "8", "--batches", "1,3", "--new-tokens", "24"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["decode"]) == {"1", "3"} and figures["prefill"] > 0 and figures["versions"]["openvino"]


def test_table_and_ratios() -> None:
    def contestant(name: str, runs: list[dict[str, object]]) -> compare.Contestant:
        made = compare.Contestant(name, "int4", Path("p"), Path("s"), Path("m"), 2)
        made.runs = runs
        return made

    mine = contestant("forgeline", [{"prefill": p, "decode": {"1": d, "4": 40.0}} for p, d in ((100, 10), (300, 12), (200, 11))])
    other = contestant("peer", [{"prefill": 100.0, "decode": {"1": 5.5}}] * 3)
    lines = compare.table([mine, other], ["1", "4"]).splitlines()
    assert lines[2] == "| forgeline | int4 | 2 | 200.0 (100.0–300.0) | 11.0 (10.0–12.0) | 40.0 (40.0–40.0) |"
    assert lines[3] == "| peer | int4 | 2 | 100.0 (100.0–100.0), ours 2.00× | 5.5 (5.5–5.5), ours 2.00× | – |"


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
