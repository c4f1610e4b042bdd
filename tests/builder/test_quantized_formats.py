"""Quantized checkpoints are read exactly, and refused in a sentence when a layer's tensors are not all there and right.

The packed words at the top are what the libraries' own packers write (AutoGPTQ 0.7.1, AutoAWQ 0.2.9, compressed-tensors 0.20.1,
ModelOpt 0.47); the checkpoints below come from packers of the test's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_llama as ql
import tiny_models
from safetensors.torch import load_file

from builder.checkpoint import load_checkpoint, num_weights, source_sha256
from builder.quantize import noise
from builder.quantized.awq import Awq
from builder.quantized.compressed_tensors import CompressedTensors
from builder.quantized.gptq import Gptq
from builder.quantized.grid import Grid, Origin, concatenated
from builder.quantized.modelopt import ModelOpt
from runtime.errors import BuildError, CorruptCheckpoint, UnsupportedModel

# ------------------------------------------------------------------------------------------------------------ packed words


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.int32)


ONES = np.ones((1, 8), np.float16)


def test_gptq_packs_inputs_and_stores_zeros_less_one() -> None:
    tensors = {"qweight": np.tile(int32(0x76543210), (1, 8)), "qzeros": int32(0x77777776)[None], "scales": 2 * ONES}
    config = {"bits": 4, "group_size": 8}
    read = Gptq(config, "m").read("a", tensors)
    assert read.dense[1].tolist() == [-16, -14, -12, -10, -8, -6, -4, -2]
    assert read.dense[0].tolist() == [-14, -12, -10, -8, -6, -4, -2, 0]  # its zero is 6 + 1
    assert read.grid is not None and read.grid.zero is not None and read.grid.zero.tolist() == [-1, 0, 0, 0, 0, 0, 0, 0]
    as_stored = Gptq(config | {"checkpoint_format": "gptq_v2"}, "m").read("a", tensors)
    assert as_stored.dense[:2, 0].tolist() == [-12, -14]  # zeros 6 and 7


def test_gptq_zeros_that_were_stored_with_a_borrow() -> None:
    tensors = {"qweight": np.zeros((1, 8), np.int32), "qzeros": int32(0x7777773F)[None], "scales": ONES}
    read = Gptq({"bits": 4}, "m").read("a", tensors)
    assert read.dense[:3, 0].tolist() == [0, -5, -8]  # 0x88888850 - 0x11111111


def test_awq_interleaves_outputs() -> None:
    tensors = {"qweight": int32(0x75316420)[None], "qzeros": int32(0x71111111)[None], "scales": ONES}
    read = Awq({"bits": 4, "group_size": 1}, "m").read("a", tensors)
    assert read.dense[:, 0].tolist() == [-1, 0, 1, 2, 3, 4, 5, 0]  # outputs 0 … 7 have q 0 … 7, the last zero is 7


def test_compressed_tensors_packs_signed_values_with_an_offset() -> None:
    tensors = {
        "weight_packed": int32(0x76543210, 0xF)[None],  # nine inputs: seven places of the second word are unused
        "weight_shape": np.array([1, 9]),
        "weight_scale": np.array([[0.5]], np.float32),
    }
    read = CompressedTensors(ql.scheme("pack-quantized", 4), "m").read("a", tensors)
    assert read.dense.tolist() == [[-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 3.5]]


def test_modelopt_packs_pairs_of_outputs() -> None:
    tensors = {"weight": np.array([[0xE1, 0x78]], np.uint8), "weight_scale": np.array([[1.0], [0.5]], np.float32)}
    read = ModelOpt({"quantization": {"quant_algo": "W4A16_AWQ"}}, "m").read("a", tensors)
    assert read.dense.tolist() == [[1, -8], [-1, 3.5]]
    smooth = ModelOpt({"quant_algo": "W4A16_AWQ"}, "m").read("a", tensors | {"pre_quant_scale": np.array([2, 4], np.float32)})
    assert smooth.dense.tolist() == [[2, -32], [-2, 14]]
    assert smooth.grid is None and smooth.reason == "it has a pre_quant_scale"


def test_scales_by_blocks_of_outputs_and_inputs() -> None:
    config = ql.scheme("float-quantized", 8, "float", strategy="block", block_structure=[2, 2])
    tensors = {"weight": np.ones((3, 3), np.float32), "weight_scale": np.array([[1, 2], [3, 4]], np.float32)}
    read = CompressedTensors(config, "m").read("a", tensors)
    assert read.dense.tolist() == [[1, 1, 2], [1, 1, 2], [3, 3, 4]]
    assert read.grid is None and read.reason == "it has scales by blocks of 2 by 2"


# ------------------------------------------------------------------------------------------------------- whole checkpoints

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def backwards(width: int) -> np.ndarray:
    return np.arange(width)[::-1].copy()


VARIANTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "gptq": (GPTQ, ql.by_integers(ql.gptq, 4, 64, True), "int4"),
    "gptq asymmetric": (GPTQ | {"sym": False}, ql.by_integers(ql.gptq, 4, 64, False), "int4"),
    "gptq 8 bits": (GPTQ | {"bits": 8}, ql.by_integers(ql.gptq, 8, 64, False), "int8"),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1},
        ql.by_integers(lambda w: ql.gptq(w, v2=True), 4, 0, False),
        "int4",
    ),
    "gptq desc_act": (GPTQ | {"desc_act": True}, ql.by_integers(ql.gptq, 4, 64, False, backwards), ""),
    "awq": (AWQ, ql.by_integers(ql.awq, 4, 64, False), "int4"),
    "w4a16": (ql.scheme("pack-quantized", 4, strategy="group", group_size=64), ql.by_integers(ql.packed, 4, 64, True), "int4"),
    "w4a16 asymmetric": (
        ql.scheme("pack-quantized", 4, strategy="group", group_size=32, symmetric=False),
        ql.by_integers(lambda w: ql.packed(w, symmetric=False), 4, 32, False),
        "int4",
    ),
    "w8a16": (ql.scheme("pack-quantized", 8), ql.by_integers(ql.packed, 8, 0, True), "int8"),
    "w8a8": (ql.scheme("int-quantized"), ql.by_integers(ql.int8, 8, 0, True), "int8"),
    "w8a8 asymmetric": (
        ql.scheme("int-quantized", symmetric=False),
        ql.by_integers(lambda w: ql.int8(w, symmetric=False), 8, 0, False),
        "int8",
    ),
    "fp8": (ql.scheme("float-quantized", 8, "float"), ql.e4m3(per_output=True), "fp8"),
    "fp8 by tensor": (ql.scheme("float-quantized", 8, "float", strategy="tensor"), ql.e4m3(per_output=False), "fp8"),
    "modelopt fp8": (FP8, ql.e4m3(per_output=False, input_scale=0.25), "fp8"),
    "modelopt int4": (
        {"quant_algo": "W4A16_AWQ", "group_size": 64},
        ql.by_integers(ql.modelopt_int4, 4, 64, True),
        "int4",
    ),
    "modelopt int8": ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, ql.by_integers(lambda w: int8_by_row(w), 8, 0, True), "int8"),
}


def int8_by_row(w: ql.Integers) -> dict[str, np.ndarray]:
    return ql.int8(w) | {"weight_scale": w.scale[:, 0]}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_is_what_its_integers_stand_for(name: str, tmp_path: Path) -> None:
    config, store, dtype = VARIANTS[name]
    directory = tmp_path / "model"
    dense = ql.write(directory, config, store, modelopt=name.startswith("modelopt"))
    checkpoint = load_checkpoint(str(directory))
    weights = dict(checkpoint.model.named_parameters())
    assert len(dense) == 28
    for weight, expected in dense.items():
        np.testing.assert_array_equal(weights[weight].detach().numpy(), expected, err_msg=weight)
    original = load_file(ql.TINY_LLAMA / "model.safetensors")["model.norm.weight"].float()
    np.testing.assert_array_equal(weights["model.norm.weight"].detach().numpy(), original)
    assert checkpoint.model.generation_config.eos_token_id == 1
    assert checkpoint.spec.num_parameters <= num_weights(str(directory)) < 1.1 * checkpoint.spec.num_parameters
    origin = checkpoint.origin
    assert {grid.dtype for grid in origin.grids.values()} == ({dtype} if dtype else set())
    assert len(origin.grids) + len(origin.off_grid) == 28


def test_a_family_that_stores_its_weights_in_out(tmp_path: Path) -> None:
    directory = tiny_models.save(tiny_models.build("gpt2"), tmp_path / "model")
    tensors: dict[str, Any] = {}
    dense = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 2 and ".c_" in name:
            found = ql.integers(np.ascontiguousarray(tensor.float().numpy().T), 4, 32, False)
            tensors.update({name.replace("weight", part): value for part, value in ql.gptq(found).items()})
            dense[name] = found.dense.T
        else:
            tensors[name] = tensor
    ql.rewrite(directory, tensors)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": GPTQ | {"group_size": 32}}
    (directory / "config.json").write_text(json.dumps(config))
    weights = dict(load_checkpoint(str(directory)).model.named_parameters())
    assert len(dense) == 8
    for name, expected in dense.items():
        np.testing.assert_array_equal(weights[name].detach().numpy(), expected, err_msg=name)


def test_excluded_layers_and_scales_of_the_cache(tmp_path: Path) -> None:
    scales = {f"model.layers.{n}.self_attn.{x}_proj.{x}_scale": [1.0 + n if x == "k" else 0.5] for n in range(4) for x in "kv"}
    dense = ql.write(
        tmp_path / "model",
        FP8 | {"exclude_modules": ["lm_head", "model.layers.0*"]},
        ql.e4m3(per_output=False, input_scale=0.25),
        keep=lambda layer: layer.startswith("model.layers.0."),
        extra={name: np.array(value, np.float32) for name, value in scales.items()},
        modelopt=True,
    )
    origin = load_checkpoint(str(tmp_path / "model")).origin
    assert len(dense) == len(origin.grids) == 21
    assert {name for name in origin.dense if "proj" in name} == {name for name in TINY_NAMES if "layers.0." in name}
    assert origin.excludes_head
    key, value = origin.cache_scales(3, ("fp8", "fp8"), 2)
    assert key is not None and value is not None
    assert key.tolist() == [4.0, 4.0] and value.tolist() == [0.5, 0.5]
    assert origin.cache_scales(3, ("fp16", "int8"), 2) == [None, None]
    assert Origin().cache_scales(0, ("fp8", "fp8"), 2) == [None, None]


TINY_NAMES = [name for name in load_file(ql.TINY_LLAMA / "model.safetensors") if name.endswith("_proj.weight")]


# -------------------------------------------------------------------------------------------------------------- grids


def test_grids_of_merged_layers_lie_below_each_other() -> None:
    a = Grid("int4", np.array([[1, 2]], np.float32), 32, input_scale=0.5)
    b = Grid("int4", np.array([[3, 4]], np.float32), 32, np.array([[1, -1]], np.int16), input_scale=0.25)
    joint = concatenated([a, b])
    assert joint is not None and joint.zero is not None
    assert joint.scale.tolist() == [[1, 2], [3, 4]] and joint.zero.tolist() == [[0, 0], [1, -1]]
    assert joint.input_scale == 0.5
    assert concatenated([a, Grid("int4", np.ones((1, 1), np.float32), 64)]) is None
    assert concatenated([a, Grid("int8", a.scale, 32)]) is None


def test_what_merging_makes_of_an_origin(tmp_path: Path) -> None:
    grid = Grid("int8", np.ones(2, np.float32))
    origin = Origin(
        "gptq",
        {"q": grid, "k": grid, "gate": grid, "x": grid, "o": grid},
        {"up": "why"},
        frozenset({"y", "embedding"}),
        kv_scales={3: (np.ones(1, np.float32), np.full(1, 2, np.float32))},
    )
    parts = {"qk": ("q", "k"), "gate_up": ("gate", "up"), "xy": ("x", "y")}
    fused = origin.fused(parts, ["qk", "gate_up", "xy", "o"])
    assert set(fused.grids) == {"qk", "o"}
    assert fused.grids["qk"].scale.shape == (4,)
    assert fused.off_grid == {"gate_up": "why"}
    assert fused.dense == {"embedding", "xy"}
    mixture = origin.fused(parts, ["qk", "gate_up", "xy", "a.experts.down_proj"])
    assert set(mixture.grids) == {"qk"}
    assert mixture.off_grid["a.experts.down_proj"] == "the experts of a layer are one weight"
    fused.save(tmp_path)
    again = Origin.load(tmp_path)
    assert (again.format, again.off_grid, again.dense) == ("gptq", fused.off_grid, fused.dense)
    np.testing.assert_array_equal(again.grids["qk"].scale, np.ones(4))
    assert again.kv_scales[3][1].tolist() == [2]
    assert Origin.load(tmp_path / "elsewhere") == Origin()


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("quantized") / "model"
            ql.write(made[name], VARIANTS[name][0], VARIANTS[name][1], modelopt=name.startswith("modelopt"))
        return made[name]

    return get


LAYER = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("gptq", "scales", None, f"lacks {LAYER}.scales of a layer quantized by gptq; copy"),
        ("gptq", "qzeros", None, f"lacks {LAYER}.qzeros of a layer quantized by gptq"),
        ("gptq", "qweight", None, f"lacks {LAYER}.qweight of a layer quantized by gptq"),
        ("gptq", "scales", lambda t: t[:3], r"scales of the gptq checkpoint has the shape [3, 704] but must have [4, 704]"),
        ("gptq", "qzeros", lambda t: t[:, :5], r"qzeros of the gptq checkpoint has the shape [4, 5] but must have [4, 88]"),
        ("gptq", "qweight", lambda t: t.float(), "qweight of the gptq checkpoint is F32 but must be I32"),
        ("gptq", "qweight", lambda t: t[:16], "holds 2 bits for each of 256 inputs but must hold 4"),
        ("gptq", "g_idx", lambda t: t + 1, "names a group beyond the 4 that have scales"),
        ("gptq", "scales", lambda t: t[:0], "scales of the gptq checkpoint has the shape [0, 704] and so no values; copy"),
        ("w8a8", "weight_scale", lambda t: t[:, :0], "weight_scale of the compressed-tensors checkpoint has the shape [704, 0]"),
        ("awq", "scales", None, f"lacks {LAYER}.scales of a layer quantized by awq"),
        ("awq", "qzeros", lambda t: t[:2], r"qzeros of the awq checkpoint has the shape [2, 88] but must have [4, 88]"),
        ("w4a16", "weight_scale", None, f"lacks {LAYER}.weight_scale of a layer quantized by compressed-tensors"),
        ("w4a16", "weight_shape", None, f"lacks {LAYER}.weight_shape"),
        ("w4a16", "weight_shape", lambda t: t + 8, r"weight_packed of the compressed-tensors checkpoint has the shape [704, 32]"),
        ("w4a16", "weight_scale", lambda t: t[:, :3], r"has the shape [704, 3] but its weight [704, 256] needs"),
        ("w4a16 asymmetric", "weight_zero_point", None, f"lacks {LAYER}.weight_zero_point"),
        ("w8a8", "weight_scale", None, f"lacks {LAYER}.weight_scale"),
        ("w8a8", "weight_scale", lambda t: t[:9], r"has the shape [9, 1] but its weight [704, 256] needs"),
        ("fp8", "weight", lambda t: t.char(), "weight of the compressed-tensors checkpoint is I8 but must be F8_E4M3"),
        ("modelopt fp8", "weight_scale", None, f"lacks {LAYER}.weight_scale of a layer quantized by modelopt"),
        ("modelopt int4", "weight_scale", lambda t: t[:7], r"has the shape [7, 4] but must have [704, 4]"),
    ],
)
def test_a_layer_that_is_not_whole(name: str, part: str, change: Any, message: str, stored: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tensors = load_file(stored(name) / "model.safetensors")
    tensor = tensors.pop(f"{LAYER}.{part}")
    if change is not None:
        tensors[f"{LAYER}.{part}"] = change(tensor)
    directory.mkdir()
    for file in stored(name).iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    ql.rewrite(directory, tensors)
    with pytest.raises(CorruptCheckpoint) as error:
        load_checkpoint(str(directory))
    assert message in str(error.value)
    assert "\n" not in str(error.value) and str(directory) in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes', which is not read; build from the unquantized"),
        ("gptq", {"bits": 3}, "a weight of 3 bits (only 4 and 8 are) in the gptq checkpoint is not read"),
        ("gptq", {"checkpoint_format": "marlin"}, "the layout 'marlin' (only gptq and gptq_v2 are)"),
        ("awq", {"version": "gemv"}, "the layout 'gemv' (only gemm is) in the awq checkpoint is not read"),
        ("awq", {"bits": 8}, "a weight of 8 bits (only 4 are)"),
        ("w8a8", {"format": "marlin-24"}, "the layout 'marlin-24' (only int-quantized, float-quantized, naive-quantized"),
        ("w8a8", {"sparsity_config": {"format": "sparse-bitmask"}}, "a sparse weight in the compressed-tensors checkpoint"),
        ("modelopt fp8", {"quant_algo": "NVFP4"}, "quant_algo NVFP4 (only FP8, "),
    ],
)
def test_a_format_that_is_not_read(name: str, changes: dict[str, Any], message: str, stored: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in stored(name).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    path, key = ("hf_quant_config.json", "quantization") if "modelopt" in name else ("config.json", "quantization_config")
    config = json.loads((directory / path).read_text())
    config[key] |= changes
    (directory / path).write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        source_sha256(str(directory))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_weight_that_is_stored_twice(stored: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stored("gptq"), tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    ql.rewrite(directory, tensors | {f"{LAYER}.weight": np.zeros((704, 256), np.float32)})
    with pytest.raises(CorruptCheckpoint, match=rf"{LAYER}.weight of the gptq checkpoint is stored both quantized and not; copy"):
        load_checkpoint(str(directory))


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (Awq, {"bits": 4, "modules_to_not_convert": 5}, "modules_to_not_convert of the awq quantization is 5 but must be a list"),
        (CompressedTensors, {"ignore": ["re:("]}, "'re:(' of the compressed-tensors quantization is no regular expression (miss"),
        (CompressedTensors, {"ignore": [5]}, "ignore of the compressed-tensors quantization is [5] but must be a list of names"),
        (CompressedTensors, {"kv_cache_scheme": "fp8"}, "sparsity_config and kv_cache_scheme of the compressed-tensors"),
        (CompressedTensors, {"config_groups": {"a": {"weights": {}, "targets": 5}}}, "targets of the compressed-tensors"),
        (ModelOpt, {"quant_algo": "FP8", "exclude_modules": 5}, "exclude_modules of the modelopt quantization is 5 but"),
        (ModelOpt, {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "must map layers to objects"),
        (ModelOpt, {"quant_algo": "FP8_PB_WO", "group_size": 0}, "a block of 0 in the modelopt checkpoint is not read"),
    ],
)
def test_a_quantization_of_the_wrong_form(make: Any, config: dict[str, Any], message: str) -> None:
    if make is CompressedTensors:
        config = ql.scheme("int-quantized") | config
    with pytest.raises((CorruptCheckpoint, UnsupportedModel)) as error:
        make(config, "m")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_input_scale_that_was_never_calibrated() -> None:
    tensors = {"weight": np.ones((2, 4), np.float32), "weight_scale": np.ones(1, np.float32)}
    for scale in (0, -1, np.nan, np.inf):
        grid = ModelOpt({"quant_algo": "FP8"}, "m").read("a", tensors | {"input_scale": np.float32(scale).reshape(1)}).grid
        assert grid is not None and grid.input_scale is None


def test_a_scale_beyond_all_bounds_makes_no_noise_before_its_refusal(tmp_path: Path) -> None:
    """Warnings are errors here."""
    from safetensors.numpy import save_file

    from builder.quantized.layout import Header
    from builder.quantized.read import read

    path = tmp_path / "model.safetensors"
    save_file({"a.weight": np.full((2, 4), 100, np.int8), "a.weight_scale": np.full((2, 1), 3e38, np.float32)}, str(path))
    headers = {"a.weight": Header("I8", (2, 4)), "a.weight_scale": Header("F32", (2, 1))}
    state, _ = read(CompressedTensors(ql.scheme("int-quantized"), "m"), [path], headers)
    assert np.isinf(state["a.weight"].numpy()).all()
    inputs, weight = np.ones((3, 4), np.float32), np.full((2, 4), 1e30, np.float32)
    with pytest.raises(BuildError, match=r"layer with a.weight computes values beyond fp32 .* largest weight is 1e\+30\)"):
        noise("a.weight", inputs, inputs, weight, weight * np.float32(1.01))


def test_a_quantization_without_its_numbers(stored: Any, tmp_path: Path) -> None:
    for quantization, message in [
        ({"quant_method": "gptq"}, "the gptq quantization has no bits; correct config.json"),
        ({"quant_method": "awq", "bits": "4"}, "bits of the awq quantization is '4' but must be an integer"),
        ({"quant_method": "compressed-tensors"}, "config_groups of the compressed-tensors quantization must map names"),
    ]:
        config = json.loads((ql.TINY_LLAMA / "config.json").read_text()) | {"quantization_config": quantization}
        directory = tmp_path / quantization["quant_method"]
        shutil.copytree(ql.TINY_LLAMA, directory)
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(CorruptCheckpoint) as error:
            source_sha256(str(directory))
        assert message in str(error.value)
