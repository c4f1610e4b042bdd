"""The load generator's clients against a real Triton: exact counts, stage times, errors that stay with their request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.deploy import deploy
from runtime.bench import session
from runtime.bench.arrivals import closed_loop
from runtime.bench.clients import connect
from runtime.bench.workload import Work
from runtime.cli import main
from runtime.errors import ServerError
from runtime.request import SamplingParams
from runtime.serving.server import TritonServer

pytestmark = pytest.mark.triton

PARAMS = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def server(tiny_engine: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("bench")
    deploy(tiny_engine("fp32"), directory / "repository", "llm", options={"num_threads": "1"})
    with TritonServer(directory / "repository", log_file=directory / "log") as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return f"{request.param}://{getattr(server, f'{request.param}_url')}"


def test_whole_command(url: str, tiny_engine: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    arguments = ["--num-prompts", "6", "--input-len", "20", "--output-len", "9", "--concurrency", "3", "--json", str(report)]
    assert main(["bench", str(tiny_engine("fp32")), "--url", url, *arguments]) == 0
    capsys.readouterr()
    data = json.loads(report.read_text())
    assert (data["figures"]["total_input_tokens"], data["figures"]["total_output_tokens"]) == (120, 54)
    assert set(data["request_stages"]) == {"queue", "prefill", "decode"}
    assert data["configuration"]["server"] == {"name": "triton", "version": "2.51.0"}
    assert data["configuration"]["prompts"] == "text" and "step_stages" not in data


def test_an_error_ends_its_own_request_only(url: str) -> None:
    client = connect(url, "llm", PARAMS)
    try:
        works = [Work("once upon a time", 3), Work("once upon a time", 0), Work("the king said", 4), Work([1, 2], 1)]
        done = session.run_client(client, works, closed_loop(1))
    finally:
        client.close()
    assert [record.num_output_tokens for record in done.records] == [3, 0, 4, 0]
    assert [bool(record.error) for record in done.records] == [False, True, False, True]
    assert "max_tokens is 0" in done.records[1].error
    assert "run with --prompts text" in done.records[3].error
    assert (done.sections["figures"]["completed"], done.sections["figures"]["failed"]) == (2, 2)
    first = done.records[0]
    assert first.finish_reason == "length" and sum(first.stages_ms.values()) <= 1e3 * first.e2e + 50


def test_an_unknown_model_is_named(url: str) -> None:
    with pytest.raises(ServerError, match="has no model 'nobody' that is ready"):
        connect(url, "nobody", PARAMS)
