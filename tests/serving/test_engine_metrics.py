from __future__ import annotations

from collections.abc import Mapping

import pytest
from fake_triton import make_stats

import runtime.metrics
from runtime.metrics import E2E_BUCKETS, TPOT_BUCKETS, TTFT_BUCKETS, EngineMetrics, Gauge, TextRegistry
from runtime.request import FinishReason, Timings

MEMORY = {"cpu": 1000, "gpu": 0, "pinned": 0}
TIMES = Timings(1_000_000_000, 1_004_000_000, 1_006_000_000, 1_036_000_000)  # queue 4, prefill 2, decode 30 ms


def samples(registry: TextRegistry) -> dict[str, float]:
    lines = [line for line in registry.render().splitlines() if not line.startswith("#")]
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert len(found) == len(lines), "a sample appears twice"
    return {name: float(value) for name, value in found.items()}


def make() -> tuple[EngineMetrics, TextRegistry]:
    registry = TextRegistry()
    return EngineMetrics(registry, {"model": "m", "version": "1"}), registry


def test_the_classic_gauges() -> None:
    metrics, registry = make()
    metrics.update(make_stats(), MEMORY)
    found = {name: value for name, value in samples(registry).items() if name.startswith("nv_trt_llm_")}
    assert found.pop('nv_trt_llm_general_metrics{general_type="timestamp",model="m",version="1"}') > 1e9
    expected: dict[tuple[str, str], dict[str, float]] = {
        ("request_metrics", "request_type"): {"waiting": 3, "context": 1, "scheduled": 2, "max": 8, "active": 5},
        ("runtime_memory_metrics", "memory_type"): {"cpu": 1000, "gpu": 0, "pinned": 0},
        ("kv_cache_block_metrics", "kv_cache_block_type"): {"fraction": 0.25, "tokens_per": 16, "used": 8, "free": 24, "max": 32},
        ("inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
            "micro_batch_id": 0, "generation_requests": 1, "total_context_tokens": 5,
        },
        ("general_metrics", "general_type"): {"iteration_counter": 7},
    }  # fmt: skip
    assert found == {
        f'nv_trt_llm_{family}{{{label}="{value}",model="m",version="1"}}': number
        for (family, label), values in expected.items()
        for value, number in values.items()
    }


def test_nothing_runs_when_the_last_step_is_over() -> None:
    metrics, registry = make()
    metrics.update(make_stats(num_running=0, num_waiting=0), MEMORY)
    found = samples(registry)
    for kind in ("context", "scheduled", "active"):
        assert found[f'nv_trt_llm_request_metrics{{request_type="{kind}",model="m",version="1"}}'] == 0


def test_how_far_off_the_expected_time_of_a_step_was() -> None:
    metrics, registry = make()
    metrics.update(make_stats(step_time_error=0.25), MEMORY)
    assert samples(registry)['forgeline_step_time_error{stage="mixed",model="m",version="1"}'] == 0.25


def test_roofline_share_of_the_stages_that_ran() -> None:
    metrics, registry = make()
    metrics.update(make_stats(roofline_share={"decode": 0.75}), MEMORY)
    metrics.update(make_stats(roofline_share={"prefill": 0.5}), MEMORY)
    found = samples(registry)
    shares = {"prefill": 0.5, "decode": 0.75, "mixed": 0}  # a stage that did not run keeps what it had
    for stage, share in shares.items():
        assert found[f'forgeline_roofline_share{{stage="{stage}",model="m",version="1"}}'] == share


def test_counters_grow_by_differences() -> None:
    metrics, registry = make()
    metrics.update(make_stats(generation_tokens=50), MEMORY)
    metrics.update(make_stats(generation_tokens=50), MEMORY)
    metrics.update(make_stats(generation_tokens=70, num_preemptions=2), MEMORY)
    found = samples(registry)
    labels = '{model="m",version="1"}'
    assert found[f"forgeline_generation_tokens_total{labels}"] == 70
    assert found[f"forgeline_prompt_tokens_total{labels}"] == 100
    assert found[f"forgeline_preemptions_total{labels}"] == 2
    assert found[f"forgeline_prefix_cache_queries_total{labels}"] == 40
    assert found[f"forgeline_prefix_cache_hits_total{labels}"] == 10


def test_latencies_of_a_request() -> None:
    metrics, registry = make()
    metrics.request_ended(TIMES, FinishReason.STOP, 12, 11)
    metrics.update(make_stats(), MEMORY)
    found = samples(registry)
    labels = '{model="m",version="1"}'
    sums = {
        "time_to_first_token": 0.006, "time_per_output_token": 0.003, "e2e_request_latency": 0.036, "request_queue_time": 0.004,
        "request_prefill_time": 0.002, "request_decode_time": 0.03, "inter_token_latency": 0,
    }  # fmt: skip
    for name, total in sums.items():
        assert found[f"forgeline_{name}_seconds_sum{labels}"] == pytest.approx(total, rel=1e-9), name
        assert found[f"forgeline_{name}_seconds_count{labels}"] == (name != "inter_token_latency"), name
    assert found['forgeline_time_to_first_token_seconds_bucket{model="m",version="1",le="0.005"}'] == 0
    assert found['forgeline_time_to_first_token_seconds_bucket{model="m",version="1",le="0.0075"}'] == 1
    assert found['forgeline_time_to_first_token_seconds_bucket{model="m",version="1",le="+Inf"}'] == 1
    assert found['forgeline_requests_total{finish_reason="stop",model="m",version="1"}'] == 1
    assert found['nv_llm_input_token_len_sum{response_metric_type="total_input_tokens",model="m",version="1"}'] == 12
    assert found['nv_llm_output_token_len_sum{response_metric_type="total_output_tokens",model="m",version="1"}'] == 11


def test_a_request_without_a_token_counts_but_has_no_latency() -> None:
    metrics, registry = make()
    metrics.request_ended(Timings(1, 0, 0, 0), FinishReason.CANCELLED, 3, 0)
    metrics.update(make_stats(), MEMORY)
    found = samples(registry)
    assert found['forgeline_requests_total{finish_reason="cancelled",model="m",version="1"}'] == 1
    assert found['forgeline_time_to_first_token_seconds_count{model="m",version="1"}'] == 0


def test_many_gaps_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.metrics, "MAX_GAPS_PER_UPDATE", 5)
    metrics, registry = make()
    name = 'forgeline_inter_token_latency_seconds_count{model="m",version="1"}'
    for _ in range(4):
        metrics.gap(0.002)
    metrics.update(make_stats(), MEMORY)
    assert samples(registry)[name] == 4
    for _ in range(100):
        metrics.gap(0.002)
    metrics.update(make_stats(), MEMORY)
    assert samples(registry)[name] == 9


def test_the_sample_of_gaps_is_uniform() -> None:
    metrics, registry = make()
    for _ in range(200):
        for milliseconds in (2, 4):  # half of them each, one after the other
            for _ in range(50):
                metrics.gap(milliseconds / 1e3)
        metrics.update(make_stats(), MEMORY)
    found = samples(registry)
    name = "forgeline_inter_token_latency_seconds"
    assert found[f'{name}_count{{model="m",version="1"}}'] == 200 * 16
    # a share of 0.5 of 3,200 independent draws has a standard deviation of 0.009
    assert found[f'{name}_bucket{{model="m",version="1",le="0.003"}}'] / (200 * 16) == pytest.approx(0.5, abs=0.06)


def test_gauges_are_set_only_when_they_change() -> None:
    calls: list[float] = []

    class Noting:
        def set(self, value: float) -> None:
            calls.append(value)

    class Counting(TextRegistry):
        def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
            used = labels.get("kv_cache_block_type") == "used"
            return Noting() if used else super().gauge(name, description, labels)

    metrics = EngineMetrics(Counting(), {})
    for used in (3, 3, 4, 4):
        metrics.update(make_stats(num_used_blocks=used), MEMORY)
    assert calls == [3, 4]


CLASSIC_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
CLASSIC_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
CLASSIC_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@pytest.mark.parametrize(
    ("classic", "ours"), [(CLASSIC_TTFT, TTFT_BUCKETS), (CLASSIC_TPOT, TPOT_BUCKETS), (CLASSIC_E2E, E2E_BUCKETS)]
)
def test_buckets_are_a_superset_of_the_classic_ones(classic: tuple[float, ...], ours: tuple[float, ...]) -> None:
    assert set(classic) <= set(ours) and list(ours) == sorted(set(ours))
    assert len([bound for bound in TPOT_BUCKETS if bound < 0.01]) >= 5


def test_labels_are_escaped() -> None:
    registry = TextRegistry()
    registry.gauge("g", "d", {"model": 'a"b\\c\nd'}).set(1)
    assert registry.render() == '# HELP g d\n# TYPE g gauge\ng{model="a\\"b\\\\c\\nd"} 1\n'
