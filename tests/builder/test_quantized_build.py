"""`builder build` of quantized checkpoints: what a scheme can represent is kept value for value, the rest is rounded anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import quantized_llama as ql
import tiny_models
from cpu_engines import Sequences
from test_quantized_formats import AWQ, FP8, GPTQ, backwards

from builder.build import STAGES, _canonical, build
from builder.checkpoint import load_checkpoint, source_sha256
from builder.config import BuildConfig
from builder.quantize import quantize
from builder.quantize.kept import keep, stored_limits
from builder.quantize.weights import find_weights
from builder.quantized.grid import Grid, Origin
from builder.report import summary
from builder.stages import Stages
from builder.targets import tensorrt_quantize
from runtime.contract import load_manifest
from runtime.errors import CorruptCheckpoint
from runtime.executors.openvino import OpenVINOExecutor

# --------------------------------------------------------------------------------------------------------------- one weight


def on(grid: Grid, q: list[list[int]]) -> np.ndarray:
    """The weight of signed q on `grid`."""
    scale = grid.scale.reshape(len(q), -1)
    zero = np.zeros_like(scale) if grid.zero is None else grid.zero.reshape(scale.shape).astype(np.float32)
    times = len(q[0]) // scale.shape[1]
    return (np.array(q, np.float32) - zero.repeat(times, 1)) * scale.repeat(times, 1)


def test_a_grid_of_the_scheme_is_kept_integer_by_integer() -> None:
    grid = Grid("int4", np.array([[0.3, 0.7], [0.0, 0.1]], np.float32), 2)
    q = [[-8, 7, 1, 0], [0, 0, 3, -5]]
    kept = keep(grid, on(grid, q), "int4", 2)
    assert not isinstance(kept, str)
    assert kept.q.numpy().astype(int).tolist() == q
    assert kept.group_size == 2 and kept.zero is None
    np.testing.assert_array_equal(kept.dense(), on(grid, q))
    halved = keep(grid, on(grid, q), "int4", 1)
    assert not isinstance(halved, str) and halved.scale.shape == (2, 4)
    np.testing.assert_array_equal(halved.dense(), on(grid, q))


def test_zero_points_are_kept_where_the_kernel_has_them() -> None:
    grid = Grid("int4", np.array([[0.3], [0.7]], np.float32)[:, 0], 0, np.array([-8, 7], np.int16))
    q = [[-8, 7, 1, 0], [7, 0, 3, -8]]
    kept = keep(grid, on(grid, q), "int4", 2)
    assert not isinstance(kept, str) and kept.zero is not None
    assert kept.q.numpy().astype(int).tolist() == [[0, 15, 9, 8], [15, 8, 11, 0]]
    assert kept.zero.numpy().astype(int).tolist() == [[0, 0], [15, 15]]
    np.testing.assert_array_equal(kept.dense(), on(grid, q))
    assert keep(grid, on(grid, q), "int4", 2, zeros=False) == "it has zero points, which this target's kernels have not"
    assert keep(grid, on(grid, q), "int8", None) == "it has zero points"


def test_one_scale_per_output_is_kept_in_eight_bits() -> None:
    scale = np.array([0.013, 0.7], np.float32)
    q = [[-128, 127, 1, 0], [3, -2, 0, 1]]  # neither row reaches the extreme that rounding anew would scale by
    kept = keep(Grid("int8", scale), on(Grid("int8", scale), q), "int8", None)
    assert not isinstance(kept, str) and kept.q.numpy().tolist() == q
    floats = np.array(q, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored = keep(Grid("fp8", scale), floats * scale[:, None], "fp8", None)
    assert not isinstance(stored, str)
    np.testing.assert_array_equal(stored.q.numpy().astype(np.float32), floats)


@pytest.mark.parametrize(
    ("grid", "dtype", "group", "reason"),
    [
        (Grid("int4", np.ones((1, 2), np.float32), 2), "int4", 4, "groups of 4 do not divide its groups of 2"),
        (Grid("int4", np.ones((1, 2), np.float32), 2), "int8", None, "it has a scale per group of 2, not per output"),
        (Grid("int8", np.ones(1, np.float32)), "int4", 4, "int8 is not int4"),
        (Grid("fp8", np.ones(1, np.float32)), "int8", None, "fp8 is not int8"),
        (Grid("int8", np.ones(1, np.float32)), "fp8", None, "int8 is not fp8"),
        (Grid("int8", np.full(1, 0.4, np.float32)), "int8", None, "its values were changed after it was read"),
    ],
)
def test_a_grid_that_the_scheme_has_not(grid: Grid, dtype: str, group: int | None, reason: str) -> None:
    assert keep(grid, np.array([[1, 2, 3, 4]], np.float32), dtype, group) == reason


# ------------------------------------------------------------------------------------------------------------ whole engines


def excluded(layer: str) -> bool:
    return layer == "model.layers.1.self_attn.v_proj"


W8A8 = ql.scheme("int-quantized") | {"ignore": ["lm_head", "model.layers.1.self_attn.v_proj"]}
BUILDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gptq": (lambda place: ql.write(place, GPTQ, ql.by_integers(ql.gptq, 4, 64, True)), "int4"),
    "awq": (lambda place: ql.write(place, AWQ, ql.by_integers(ql.awq, 4, 64, False)), "int4"),
    "compressed-tensors": (lambda place: ql.write(place, W8A8, ql.by_integers(ql.int8, 8, 0, True), keep=excluded), "int8"),
    "modelopt": (lambda place: ql.write(place, FP8, ql.e4m3(per_output=False, input_scale=0.05), modelopt=True), "fp8"),
}


DESC_ACT = GPTQ | {"desc_act": True}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """`stored(name)`: a checkpoint, written once; what is exported from it stays in a cache of this module."""
    places: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in places:
            places[name] = tmp_path_factory.mktemp("quantized") / "model"
            if name == "desc_act":
                ql.write(places[name], DESC_ACT, ql.by_integers(ql.gptq, 4, 64, False, backwards))
            else:
                BUILDS[name][0](places[name])
        return places[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield get


@pytest.fixture(scope="module")
def canonical(stored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the graph that builds of a checkpoint start from."""

    def get(name: str) -> Path:
        source = str(stored(name))
        staging = tmp_path_factory.mktemp("staging")
        with contextlib.closing(Stages(STAGES, quiet=True)) as stages:
            return _canonical(source, source_sha256(source), BuildConfig(source, staging / "engine"), staging, stages)

    return get


@pytest.mark.parametrize("name", BUILDS)
def test_an_engine_is_the_dequantized_model(name: str, cache: None, tmp_path: Path) -> None:
    write, precision = BUILDS[name]
    write(tmp_path / "model")
    config = BuildConfig(
        str(tmp_path / "model"),
        tmp_path / "engine",
        precision=precision,
        calibration_samples=1,
        eval_tokens=256,
        max_ppl_increase=10,
    )
    result = build(config, quiet=True)
    weights, accuracy = result.report["weights"], result.report["accuracy"]
    merged = 15 if name == "compressed-tensors" else 16
    found = weights["checkpoint"]
    assert (found["format"], found["num_weights"], found["kept"]) == (name, merged, merged)
    assert found["requantized"] == {} and found["dequantized"] == 0
    assert weights["rounding"] == {"checkpoint": merged}
    assert f"{merged} weights quantized by {name}: {merged} kept on their grid" in summary(result.report)
    # Nothing was lost in the weights; what is lost comes from rounding activations, and from the cache.
    assert accuracy["parts"]["weights"]["mean_kl"] < (1e-6 if name in ("compressed-tensors", "modelopt") else 1e-3)
    assert accuracy["mean_kl"] < 0.05
    assert accuracy["top1_agreement"] > 0.9
    classes = {entry: weights["classes"][entry]["dtype"] for entry in ("attention", "mlp")}
    assert classes == dict.fromkeys(classes, precision)
    head = {"gptq": "int8", "awq": "int8"}.get(name, "fp32")  # the others exclude it by name
    assert weights["classes"]["embedding"]["dtype"] == head
    if name == "compressed-tensors":
        kept = "model.layers.1.self_attn.qkv_proj.weight"
        assert found["unquantized"] == [kept]
        assert weights["skipped"][kept] == "fp32: the checkpoint does not quantize it"


def test_greedy_tokens_of_an_fp32_engine_are_the_dequantized_models(stored: Callable[[str], Path], tmp_path: Path) -> None:
    config = BuildConfig(str(stored("desc_act")), tmp_path / "engine", eval_tokens=0)
    found = build(config, quiet=True).report["weights"]["checkpoint"]
    assert (found["kept"], found["requantized"], found["dequantized"]) == (0, {}, 16)
    engine = OpenVINOExecutor(tmp_path / "engine", load_manifest(tmp_path / "engine"), 8, 1)
    tokens = [5, 9, 3, 77]
    logits, _ = Sequences(engine).step({"a": tokens})
    engine.close()
    eager = tiny_models.logits(load_checkpoint(str(stored("desc_act"))).model, tokens)
    np.testing.assert_allclose(logits, eager, atol=1e-4)  # as engines of unquantized checkpoints
    assert logits.argmax(-1).tolist() == eager.argmax(-1).tolist()


def test_what_a_scheme_cannot_represent_is_named(canonical: Callable[[str], Path]) -> None:
    place = canonical("desc_act")
    report = quantize(graph(place), "int8-wo", origin=Origin.load(place))
    assert report.checkpoint.kept == {}
    assert len(report.checkpoint.requantized) == 16
    assert set(report.checkpoint.requantized.values()) == {"its inputs are ordered by activation (desc_act)"}


def test_nothing_is_written_for_a_checkpoint_without_scales(tmp_path: Path) -> None:
    ql.write(tmp_path / "model", AWQ, ql.by_integers(lambda w: {"qweight": ql.awq(w)["qweight"]}, 4, 64, False))
    with pytest.raises(CorruptCheckpoint, match=r"lacks model\.layers\.0\.mlp\.down_proj\.qzeros of a layer quantized by awq"):
        build(BuildConfig(str(tmp_path / "model"), tmp_path / "engine", precision="int4"), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ------------------------------------------------------------------------------------------------------- graph and targets


def graph(place: Path) -> ir.Model:
    return ir.load(place / "model.onnx")


QKV = "model.layers.0.self_attn.qkv_proj.weight"


def test_groups_follow_the_checkpoint_unless_asked_otherwise(canonical: Callable[[str], Path]) -> None:
    place = canonical("awq")
    origin = Origin.load(place)
    assert origin.grids[QKV].scale.shape == (512, 4)
    assert quantize(graph(place), "int4", origin=origin).checkpoint.kept.keys() == origin.grids.keys()
    finer = Origin("awq", {QKV: Grid("int4", np.ones((512, 8), np.float32), 32)})
    assert quantize(graph(place), "int4", origin=finer).group_size == 32  # the widths alone would give 64
    smaller = quantize(graph(place), "int4", group_size=32, origin=origin)
    assert smaller.group_size == 32 and len(smaller.checkpoint.kept) == 16
    model = graph(place)
    larger = quantize(model, "int4", group_size=128, origin=origin)
    wide = {name for name, group in larger.groups.items() if group == 128}
    assert set(larger.checkpoint.requantized) == wide and QKV in wide  # 704 inputs are not groups of 128
    assert larger.checkpoint.requantized[QKV] == "groups of 128 do not divide its groups of 64"


def test_static_input_scales_are_the_checkpoints(canonical: Callable[[str], Path]) -> None:
    place = canonical("modelopt")
    origin = Origin.load(place)
    assert origin.grids[QKV].input_scale == pytest.approx(0.1)  # the largest: k_proj's
    model = graph(place)
    quantize(model, "fp8", origin=origin)  # without any calibration
    scales = {name: float(v.const_value.numpy()) for name, v in model.graph.initializers.items() if name.endswith(".input_scale")}
    assert sorted(np.float32(list(scales.values())).round(4).tolist()) == np.float32([0.05] * 8 + [0.1] * 4 + [0.8] * 4).tolist()


def test_layers_that_read_one_tensor_share_the_largest_scale(exported: Callable[[str], Any]) -> None:
    model = ir.load(exported("llama").canonical)  # not fused: q, k and v are three
    weights = [w for w in find_weights(model.graph) if ".layers.0.self_attn." in w.name and "o_proj" not in w.name]
    assert len(weights) == 3
    scales = dict(zip((w.name for w in weights), (0.1, 0.3, 0.2), strict=True))
    grids = {name: Grid("fp8", np.ones(1, np.float32), input_scale=scale) for name, scale in scales.items()}
    found = stored_limits(Origin(grids=grids), weights, "fp8")
    assert list(found.values()) == [pytest.approx(0.3 * 448)]
    assert stored_limits(Origin(grids=grids), weights, "int8") == {}
    assert stored_limits(Origin(grids=dict(list(grids.items())[:2])), weights, "fp8") == {}  # v's input has no scale


def test_a_given_choice_for_the_head_comes_before_the_checkpoints(canonical: Callable[[str], Path]) -> None:
    place = canonical("compressed-tensors")
    origin = Origin.load(place)
    assert quantize(graph(place), "int8", origin=origin).dtype_of("embedding") == "fp32"
    assert quantize(graph(place), "int8", origin=origin, tables=True).dtype_of("embedding") == "int8"


def test_smoothed_weights_are_not_taken_for_the_checkpoints(canonical: Callable[[str], Path]) -> None:
    from builder.calibration_data import CalibrationSet
    from builder.observe import observe
    from builder.quantize import layer_inputs

    place = canonical("compressed-tensors")
    model = graph(place)
    windows = CalibrationSet((tuple(range(3, 131)),)).windows
    stats = observe(place / "model.onnx", windows, layer_inputs(model, "int8-sq"), num_threads=1)
    report = quantize(model, "int8-sq", stats=stats, origin=Origin.load(place))
    changed = report.checkpoint.requantized
    assert changed and set(changed.values()) == {"its values were changed after it was read"}
    assert len(changed) + len(report.checkpoint.kept) == 15


@pytest.mark.parametrize(
    ("name", "precision", "kept"), [("gptq", "int4", 16), ("awq", "int4", 0), ("compressed-tensors", "int8", 15)]
)
def test_grids_on_the_tensorrt_targets(name: str, precision: str, kept: int, canonical: Callable[[str], Path]) -> None:
    place = canonical(name)
    model = graph(place)
    report = tensorrt_quantize.quantize(model, precision, origin=Origin.load(place))
    assert len(report.checkpoint.kept) == kept
    if not kept:
        assert set(report.checkpoint.requantized.values()) == {"it has zero points, which this target's kernels have not"}
    if name == "compressed-tensors":
        unquantized = "model.layers.1.self_attn.qkv_proj.weight"
        assert report.skipped[unquantized] == "16 bit: the checkpoint does not quantize it"
        assert unquantized in model.graph.initializers


def test_scales_of_the_tensorrt_targets_inputs(canonical: Callable[[str], Path]) -> None:
    place = canonical("modelopt")
    from builder.observe import TensorStats

    model = graph(place)
    names = tensorrt_quantize.activation_names(model)
    stats = {name: TensorStats(np.full(256, 7, np.float32)) for name in names}
    report = tensorrt_quantize.quantize(model, "fp8", stats=stats, origin=Origin.load(place))
    assert len(report.checkpoint.kept) == 16
    scales = {float(v.const_value.numpy()) for name, v in model.graph.initializers.items() if name.endswith(".input_scale")}
    assert {round(scale, 4) for scale in scales} == {0.05, 0.1, 0.8}
