"""`runtime bench` on the tiny Llama: whole runs, and that a tool which should notice something does."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.bench import machine, session
from runtime.bench.arrivals import closed_loop, open_loop
from runtime.bench.clients import InProcessClient, chunk_cost_us, connect
from runtime.bench.machine import Peaks
from runtime.bench.workload import Lengths, Prompts, Work, random_work
from runtime.cli import main
from runtime.config import RuntimeConfig, machine_name
from runtime.contract import load_manifest
from runtime.engine import Engine
from runtime.errors import ForgelineError, InvalidRequest, ServerError
from runtime.request import SamplingParams

PEAKS = Peaks(machine_name(), ((1 << 19, 500e9), (1 << 28, 50e9)), fp32_ops=1e12, int8_ops=4e12)
PARAMS = SamplingParams(ignore_eos=True)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.store(PEAKS)


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine.load(tiny_engine("fp32"), RuntimeConfig(num_threads=1, max_num_seqs=4, num_blocks=256)) as loaded:
        yield loaded


def works(engine: Engine, count: int, *, prompt: int = 16, output: int = 8) -> list[Work]:
    prompts = Prompts(vocab_size=engine.manifest.model.vocab_size, tokenizer=None, as_text=False, seed=count)
    return random_work(prompts, count, Lengths.parse(str(prompt)), Lengths.parse(str(output)))


def run(engine: Engine, directory: Path, count: int = 6, **options: Any) -> session.Run:
    return session.run_engine(engine, works(engine, count), closed_loop(3), PARAMS, directory=directory, peaks=PEAKS, **options)


def test_a_run_accounts_for_every_token_and_every_step(engine: Engine, tiny_engine: Callable[[str], Path]) -> None:
    before, executor = engine.loop.times.steps, engine.loop.executor
    done = run(engine, tiny_engine("fp32"))
    assert all(record.ok and record.num_output_tokens == 8 and record.num_prompt_tokens == 16 for record in done.records)
    figures, roofline = done.sections["figures"], done.sections["roofline"]["stages"]
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (6, 96, 48)
    assert figures["max_concurrent_requests"] <= 3
    steps = done.sections["step_stages"]["steps"]
    assert steps == engine.loop.times.steps - before == sum(stage["steps"] for stage in roofline.values())
    assert sum(stage["tokens"] for stage in roofline.values()) == 96 + 6 * 7  # the last token of each is never computed on
    assert all(0 < stage["share"] <= 1 for stage in roofline.values())
    assert sum(row["share"] for name, row in done.sections["step_stages"]["stages"].items() if name != "detokenize and send") == (
        pytest.approx(1)
    )
    for record in done.records:  # the client's clock and the engine's agree on who waited for what
        assert sum(record.stages_ms.values()) <= 1e3 * record.e2e + 50
    assert engine.loop.executor is executor, "the meter is gone again"


def test_a_known_machine_gives_a_live_share(tiny_engine: Callable[[str], Path]) -> None:
    with Engine.load(tiny_engine("fp32"), RuntimeConfig(num_threads=1, num_blocks=256)) as loaded:
        run(loaded, tiny_engine("fp32"), 3)
        shares = loaded.stats().roofline_share
        assert {"decode"} <= set(shares) <= {"prefill", "decode", "mixed"} and all(0 < share <= 1 for share in shares.values())
        assert loaded.stats().roofline_share == {}


def test_an_engine_faster_than_the_known_peaks_lifts_them_for_good(engine: Engine, tiny_engine: Callable[[str], Path]) -> None:
    slow = Peaks(machine_name(), ((1 << 19, 1e6),), fp32_ops=1e6, int8_ops=1e6)
    done = session.run_engine(engine, works(engine, 2), closed_loop(2), PARAMS, directory=tiny_engine("fp32"), peaks=slow)
    roofline = done.sections["roofline"]
    assert max(stage["share"] for stage in roofline["stages"].values()) == pytest.approx(1)
    assert all(stage["share"] <= 1 for stage in roofline["stages"].values())
    assert roofline["peaks"]["raised_by"] > 10
    assert machine.peaks().raised_by == roofline["peaks"]["raised_by"]


def test_a_slow_sampler_shows_up_in_its_stage(
    engine: Engine, tiny_engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages() -> dict[str, Any]:
        return run(engine, tiny_engine("fp32"), 3).sections["step_stages"]

    sample = engine.loop.sampler.sample

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return sample(*arguments)

    before = stages()
    monkeypatch.setattr(engine.loop.sampler, "sample", slow)
    after = stages()
    assert after["stages"]["sample"]["us_per_step"] >= 20_000 - 1
    assert after["stages"]["sample"]["us_per_step"] > before["stages"]["sample"]["us_per_step"]
    assert after["stages"]["sample"]["share"] == max(row["share"] for row in after["stages"].values())
    assert after["host_share"] > before["host_share"]


def test_a_slow_consumer_shows_up_as_detokenize_and_send(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Engine._advance

    def slow(*arguments: Any) -> Any:
        time.sleep(0.01)
        return advance(*arguments)

    monkeypatch.setattr(Engine, "_advance", slow)
    table = session.run_engine(engine, works(engine, 2), closed_loop(1), PARAMS).sections["step_stages"]["stages"]
    assert table["detokenize and send"]["total_ms"] >= 2 * 10


def test_open_loop_reports_how_late_requests_were_sent(engine: Engine) -> None:
    done = session.run_engine(engine, works(engine, 4), open_loop(4, 200.0), PARAMS)
    assert done.sections["dispatch_lag_ms"]["min"] >= 0
    assert [record.arrival for record in done.records] == sorted(record.arrival for record in done.records)


def test_refused_requests_are_counted_with_their_reason(engine: Engine) -> None:
    done = session.run_engine(engine, [Work([1] * 8, 2), Work([1] * 3000, 2)], closed_loop(2), PARAMS)
    assert (done.sections["figures"]["completed"], done.sections["figures"]["failed"]) == (1, 1)
    assert "the prompt has 3000 tokens" in done.records[1].error
    with pytest.raises(ForgelineError, match="warm-up request failed: the prompt has 3000 tokens"):
        session.warm_up(InProcessClient(engine, PARAMS), [Work([1] * 3000, 2)])


def test_the_client_costs_little_per_chunk() -> None:
    assert 0 < chunk_cost_us(200) < 1000


def bench(engine: Path, *arguments: str) -> int:
    options = [
        "--num-prompts",
        "4",
        "--input-len",
        "12",
        "--output-len",
        "6",
        "--set",
        "num_threads=1",
        "--set",
        "num_blocks=256",
    ]
    return main(["bench", str(engine), *options, *arguments])


def test_the_command_writes_text_json_csv_and_a_plot(
    tiny_engine: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    files = ["--json", str(out / "r.json"), "--csv", str(out / "r.csv"), "--plot", str(out / "r.png")]
    assert bench(tiny_engine("fp32"), "--concurrency", "2", "--slo", "e2el=600s", "--seed", "3", *files) == 0
    text = capsys.readouterr().out
    for label in (
        "Request Throughput (req/sec):", "Total Output Throughput (tokens/sec):", "Total Latency (ms):",
        "Per User Output Throughput [w/ ctx] (tps/user):", "Average time-to-first-token [TTFT] (ms):", "[Latency] P99    :",
        "Successful requests:", "Request goodput (req/s):", "Output token throughput (tok/s):", "P99.9 ITL (ms):",
        "detokenize and send", "Roofline", "eos_ignored:          True", "seed:                 3",
    ):  # fmt: skip
        assert label in text, label
    report = json.loads((out / "r.json").read_text())
    assert report["figures"]["total_output_tokens"] == 24 and report["figures"]["slo_attainment"] == 1
    assert report["configuration"]["eos_ignored"] is True and report["configuration"]["input_len"] == "12"
    assert report["versions"]["openvino"] and report["machine"]["name"] == machine_name()
    assert [row["output_tokens"] for row in csv.DictReader((out / "r.csv").read_text().splitlines())] == ["6"] * 4
    assert (out / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_trace_is_replayed_and_the_report_says_whether_eos_counts(tiny_engine: Callable[[str], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": "The end.", "timestamp": 0}) + "\n" + json.dumps({"input_length": 5, "timestamp": 20}))
    report = tmp_path / "r.json"
    arguments = ["--dataset", str(trace), "--replay", "--no-ignore-eos", "--no-roofline", "--json", str(report)]
    assert bench(tiny_engine("fp32"), *arguments) == 0
    settings = json.loads(report.read_text())["configuration"]
    assert settings["eos_ignored"] is False and settings["arrivals"] == "replay" and settings["num_prompts"] == 2


def test_knee_is_found_written_and_used(
    tiny_engine: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = []
    warm_up = session.warm_up
    monkeypatch.setattr(session, "warm_up", lambda client, works: (warmed.append(len(works)), warm_up(client, works)))
    copy = Path(shutil.copytree(tiny_engine("fp32"), tmp_path / "engine", copy_function=os.link))
    knee = ["--knee", "--set", "max_num_seqs=2", "--plot", str(tmp_path / "knee.png"), "--slo", "e2el=600s"]
    assert bench(copy, *knee, "--no-write") == 0
    assert load_manifest(copy).knee == {}
    assert warmed[-2:] == [1, 2]  # as many at once as will be measured
    assert bench(copy, *knee) == 0
    assert "max_num_seqs from now on: 2" in capsys.readouterr().out
    written = load_manifest(copy).knee
    assert [point["concurrency"] for point in written["curve"]] == [1, 2] and written["slo_batch"] == 2
    assert written["configuration"]["options"]["max_num_seqs"] == 2
    with Engine.load(copy, RuntimeConfig(num_threads=1)) as engine:
        assert engine.config.max_num_seqs == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-len", "5000"], "request 0 asks for 12 prompt and 5000 output tokens but max_model_len is 2048"),
        (["--slo", "speed=1"], "must look like"),
        (["--replay"], "--replay takes its moments from a --dataset"),
        (["--knee", "--request-rate", "3"], "--knee runs closed loops"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--url", "grpc://localhost:1", "--prompts", "text"], "--set is for an engine in this process"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    tiny_engine: Callable[[str], Path], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert bench(tiny_engine("fp32"), *arguments) == 2
    assert message in capsys.readouterr().err


def test_servers_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench"]) == 2 and "name an engine directory" in capsys.readouterr().err
    for url in ("localhost:8001", "ftp://localhost:1", "grpc://localhost"):
        with pytest.raises(InvalidRequest, match="must have the form"):
            connect(url, "llm", PARAMS)
    with pytest.raises(ServerError, match=r"no Triton answers at 127\.0\.0\.1:1"):
        connect("http://127.0.0.1:1", "llm", PARAMS)
    monkeypatch.setitem(__import__("sys").modules, "tritonclient.grpc", None)
    with pytest.raises(ServerError, match=r"pip install 'forgeline\[bench\]'"):
        connect("grpc://127.0.0.1:1", "llm", PARAMS)
