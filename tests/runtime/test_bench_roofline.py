"""Costs of steps worked out by hand, the machine's peaks, and shares that cannot pass 1."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeExecutor, add_prompt, make_loop, make_scheduler

from runtime.bench import machine, machine_code
from runtime.bench.machine import Peaks
from runtime.bench.roofline import Cost, LiveRoofline, MeteredExecutor, Model, Step, assess, floor_seconds
from runtime.contract import REPORT_JSON, LayerSpec, load_manifest

PEAKS = Peaks("m", ((1000, 400.0), (4000, 100.0)), fp32_ops=10.0, int8_ops=1000.0)
# one full and one windowed layer of equal width, 8 bytes of KV cache per token in all
MODEL = Model(
    layer_weights=100,
    layer_bytes=110,
    head_weights=50,
    head_bytes=60,
    embedding_row_bytes=2.0,
    layers=(LayerSpec(2, 1, 4), LayerSpec(2, 1, 4, sliding_window=3)),
    kv_bytes_per_token=8,
    integer=True,
)


def step(new: list[int], lengths: list[int], *, logits: int, seconds: float = 1.0) -> Step:
    return Step(np.array(new), np.array(lengths), logits, seconds)


def test_decode_cost() -> None:
    # full layer: 5 + 2 tokens read; windowed: at most 3 and the new one: 4 + 2. Pairs: 5 + 2 and 3 + 2.
    cost = MODEL.cost(step([1, 1], [5, 2], logits=2))
    assert cost.num_bytes == 110 + 60 + 2 * 2 + 4 * (5 + 2) + 4 * (4 + 2)
    assert cost.operations == 2 * 100 * 2 + 2 * 50 * 2 + 4 * 2 * 4 * (7 + 5)


def test_prefill_chunk_cost() -> None:
    # 4 new tokens after 2: full pairs 3+4+5+6; windowed 3 each. No row wants logits, so the head is not read.
    cost = MODEL.cost(step([4], [6], logits=0))
    assert cost.num_bytes == 110 + 4 * 2 + 4 * 6 + 4 * 6
    assert cost.operations == 2 * 100 * 4 + 4 * 2 * 4 * (18 + 12)
    # a first chunk within the window: 1+2 pairs in both layers
    assert MODEL.cost(step([2], [2], logits=0)).operations == 2 * 100 * 2 + 4 * 2 * 4 * (3 + 3)


def test_stages_of_steps() -> None:
    assert step([4, 2], [4, 2], logits=2).stage == "prefill"
    assert step([1, 1], [4, 2], logits=2).stage == "decode"
    assert step([1, 2], [4, 2], logits=2).stage == "mixed"


def test_floor_is_the_scarcer_resource() -> None:
    assert floor_seconds(Cost(2000, 100.0), PEAKS, integer=True) == (2000 / 400, "memory")  # the rate of a smaller working set
    assert floor_seconds(Cost(4000, 100.0), PEAKS, integer=True) == (40, "memory")
    assert floor_seconds(Cost(500, 100.0), PEAKS, integer=False) == (10, "compute")
    assert PEAKS.bandwidth_for(1) == 400 and PEAKS.memory_bandwidth == 100
    unknown = Peaks("m", (), 0.0, 0.0)
    assert floor_seconds(Cost(1.0, 1.0), unknown, integer=True)[0] == 0


def test_share_is_floor_over_time_per_stage() -> None:
    bytes_of_step = MODEL.cost(step([1], [1], logits=1)).num_bytes
    steps = [step([1], [1], logits=1, seconds=2.0), step([1], [1], logits=1, seconds=4.0), step([2], [2], logits=1, seconds=5.0)]
    stages, peaks = assess(steps, MODEL, PEAKS)
    assert list(stages) == ["prefill", "decode"] and peaks is PEAKS
    decode = stages["decode"]
    assert (decode["steps"], decode["tokens"], decode["seconds"], decode["bound"]) == (2, 2, 6.0, "memory")
    assert decode["share"] == pytest.approx(2 * bytes_of_step / 400 / 6)
    assert decode["bytes_per_step"] == bytes_of_step
    assert decode["tokens_per_second"] == pytest.approx(1 / 3)


def test_a_share_above_one_proves_the_peaks_too_low_and_lifts_them() -> None:
    fast = [step([1], [1], logits=1, seconds=0.1), step([2], [2], logits=1, seconds=50.0)]
    before, _ = assess([fast[1]], MODEL, PEAKS)
    stages, peaks = assess(fast, MODEL, PEAKS)
    assert stages["decode"]["share"] == pytest.approx(1) and stages["decode"]["share"] <= 1
    assert peaks.raised_by == pytest.approx(MODEL.cost(fast[0]).num_bytes / 400 / 0.1)
    assert peaks.int8_ops == pytest.approx(1000 * peaks.raised_by)
    assert stages["prefill"]["share"] == pytest.approx(before["prefill"]["share"] / peaks.raised_by)


def test_metered_executor_sees_every_step_and_changes_none() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    loop, executor, recorder = make_loop(scheduler)
    loop.executor = metered = MeteredExecutor(executor)  # type: ignore[assignment]
    request = add_prompt(scheduler, 10, first_token=20, max_tokens=2)
    while loop.step():
        pass
    seen = [(each.stage, each.num_new.tolist(), each.seq_lens.tolist(), each.num_logits) for each in metered.steps]
    assert seen == [("prefill", [8], [8], 0), ("prefill", [2], [10], 1), ("decode", [1], [11], 1)]
    assert all(each.seconds > 0 for each in metered.steps)
    assert metered.vocab_size == executor.vocab_size and isinstance(executor, FakeExecutor)
    assert len(recorder.tokens[request]) == 2


def test_live_share_covers_the_steps_since_the_last_reading() -> None:
    live = LiveRoofline(MODEL, PEAKS)
    executor = live.attach(FakeExecutor())
    assert executor.vocab_size == 97 and live.read() == {}
    slow = step([1], [1], logits=1, seconds=10.0)
    live.steps.append(slow)
    share = MODEL.cost(slow).num_bytes / 400 / 10
    assert live.read() == {"decode": pytest.approx(share)}
    assert live.read() == {}
    live.steps.extend([step([1], [1], logits=1, seconds=0.1)] * (live.MAX_STEPS + 5))  # far faster than the peaks allow
    assert len(live.steps) == live.MAX_STEPS
    assert live.read()["decode"] == pytest.approx(1)
    live.steps.append(slow)
    assert live.read()["decode"] == pytest.approx(0.01), "judged by the raised peaks"


def test_model_is_read_from_the_engine(tiny_engine: Callable[[str], Path]) -> None:
    engine = tiny_engine("int8")
    manifest = load_manifest(engine)
    model = Model.load(engine, manifest)
    weights = json.loads((engine / REPORT_JSON).read_text())["weights"]
    assert model.layer_weights + model.head_weights + weights["classes"]["norms"]["num_weights"] == weights["num_weights"]
    assert model.layer_bytes + model.head_bytes == weights["total_bytes"]
    assert model.integer == (manifest.precision.activations == "int8")
    assert model.embedding_row_bytes * manifest.model.vocab_size == model.head_bytes  # tied
    decode = model.cost(step([1], [100], logits=1))
    assert decode.num_bytes == weights["total_bytes"] + model.embedding_row_bytes + 100 * manifest.kv_cache.bytes_per_token


@pytest.mark.parametrize("kernel", [machine_code.read_kernel(), machine_code.fp32_kernel(), machine_code.int8_kernel()])
def test_machine_code_does_the_work_it_is_counted_for(kernel: machine_code.Kernel | None) -> None:
    if kernel is None:
        pytest.skip("this CPU has none of the instructions")
    memory = np.ones(64 * machine_code.READ_BYTES, np.uint8)
    kernel.load()(memory.ctypes.data, 64, 3)
    # every instruction is in the loop body as often as it is counted
    opcode = {"vmovups ymm": b"\xc5\xfc\x10", "vfmadd231ps zmm": b"\x48\xb8", "vpdpbusd zmm": b"\x48\x50"}.get(kernel.name)
    per_instruction = {"vmovups ymm": 32, "vfmadd231ps zmm": 32, "vpdpbusd zmm": 128}.get(kernel.name)
    if opcode is not None and per_instruction is not None:
        assert kernel.code.count(opcode) * per_instruction == kernel.work_per_iteration


def test_reading_past_a_page_boundary_stays_inside_the_block() -> None:
    kernel = machine_code.read_kernel()
    if kernel is None:
        pytest.skip("no AVX")
    import mmap

    block = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = np.frombuffer(block, np.uint8).ctypes.data
    kernel.load()(address, 4 * mmap.PAGESIZE // machine_code.READ_BYTES, 2)  # a step further could fault


def test_peaks_are_measured_once_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def measure(name: str) -> Peaks:
        measured.append(name)
        return dataclasses.replace(PEAKS, machine=name, kernels=("k",))

    monkeypatch.setattr(machine, "measure", measure)
    assert machine.load_cached() is None
    first, second = machine.peaks(), machine.peaks()
    assert first == second and len(measured) == 1
    machine.peaks(again=True)
    assert len(measured) == 2
    machine.store(first.raised(2.0))
    assert machine.peaks().raised_by == 2.0 and machine.peaks().read_bandwidth == ((1000, 800.0), (4000, 200.0))
    (file,) = (tmp_path / "forgeline" / "machine").iterdir()
    file.write_text("{")
    assert machine.load_cached() is None


def test_measured_peaks_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WORKING_SETS", (1 << 19, 1 << 22))
    monkeypatch.setattr(machine, "TRIES", 1)
    monkeypatch.setattr(machine, "TRY_S", 0.002)
    found = machine.measure("m")
    if machine_code.read_kernel() is None:
        assert found.read_bandwidth == ()
        return
    (small, fast), (large, slow) = found.read_bandwidth
    assert (small, large) == (1 << 19, 1 << 22) and fast >= slow > 0
    assert found.int8_ops >= found.fp32_ops > 0
