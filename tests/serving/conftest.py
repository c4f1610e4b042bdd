"""Fixtures of several test files: the Triton model on fakes, and a real tritonserver with three deployments of the tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import Make, triton
from fake_triton import FakeEngine, MetricFamily, make_manifest
from triton_client import used_blocks, wait_until

from builder.deploy import deploy
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.llm import LLM
from runtime.serving.server import TritonServer


@pytest.fixture
def make_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    models = []
    monkeypatch.setattr(triton.Engine, "load", lambda path, config: FakeEngine(make_manifest(), config))

    def make(*, decoupled: bool = True, max_batch_size: int = 1, **parameters: str) -> Any:
        MetricFamily.made = {}
        engine = tmp_path / "engine"
        engine.mkdir(exist_ok=True)
        (engine / "manifest.json").write_text(make_manifest().to_json())
        parameters = {"engine_dir": str(engine), "cancellation_check_period_ms": "5", "stats_check_period_ms": "5", **parameters}
        config = {
            "max_batch_size": max_batch_size,
            "model_transaction_policy": {"decoupled": decoupled},
            "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        }
        model = triton.TritonPythonModel()
        model.initialize(
            {"model_config": json.dumps(config), "model_repository": str(tmp_path), "model_version": "1", "model_name": "llm"}
        )
        models.append(model)
        return model

    yield make
    for model in models:
        model.finalize()
        assert model.engine.closed and not model.live
        assert not any(thread.is_alive() for thread in model.threads)


@pytest.fixture(scope="module")
def repository(tiny_engine: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository")
    threads = {"num_threads": "1"}
    short = {"max_model_len": "512", **threads}
    engine = tiny_engine("fp32")
    deploy(engine, directory, "llm", options={"max_tokens_in_paged_kv_cache": "1024", **short})  # preempts under load
    deploy(engine, directory, "plain", options={"decoupled_mode": "false", **short})
    # 2,048 tokens: answers that a cancellation cannot come too late for
    deploy(engine, directory, "long", options={"max_queue_size": "4", **threads})
    return directory


@pytest.fixture(scope="module")
def running_server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, log_file=repository.parent / "tritonserver.log") as running:
        yield running
        assert running.num_restarts == 0 and running.is_ready()


@pytest.fixture
def server(running_server: TritonServer) -> Iterator[TritonServer]:
    """One server for all tests of a file; after each no block is in use."""
    yield running_server
    wait_until(lambda: all(used_blocks(running_server, model) == 0 for model in ("llm", "plain", "long")))


@pytest.fixture(scope="module")
def alone(tiny_engine: Callable[[str], Path]) -> Iterator[LLM]:
    """The same engine in this process."""
    with LLM.from_engine(Engine.load(tiny_engine("fp32"), RuntimeConfig(num_blocks=64, num_threads=1))) as llm:
        yield llm
