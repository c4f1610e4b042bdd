"""Loading a model, and refusing one in a sentence before its weights are read."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from builder.checkpoint import load_checkpoint, max_positions, num_weights, source_sha256
from builder.families import FAMILIES
from runtime.contract import LayerSpec
from runtime.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny_models.build("llama")
    return model, tiny_models.save(model, tmp_path_factory.mktemp("hf") / "tiny-llama")


@pytest.fixture
def copy(llama: tuple[Any, Path], tmp_path: Path) -> Path:
    """The same directory, free to be damaged."""
    return Path(shutil.copytree(llama[1], tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


# ----------------------------------------------------------------------------------------------------------------- loading


def test_a_directory_becomes_a_model_a_spec_and_a_tokenizer(llama: tuple[Any, Path], tmp_path: Path) -> None:
    original, directory = llama
    checkpoint = load_checkpoint(str(directory))
    assert checkpoint.model.training is False
    np.testing.assert_array_equal(
        tiny_models.logits(checkpoint.model, [5, 9, 3]), tiny_models.logits(original, [5, 9, 3])
    )  # the same arithmetic on the same weights
    spec = checkpoint.spec
    assert (spec.name, spec.architecture, spec.model_type) == ("tiny-llama", "LlamaForCausalLM", "llama")
    assert spec.layers == (LayerSpec(num_heads=4, num_kv_heads=2, head_dim=16),) * 2
    assert (spec.vocab_size, spec.hidden_size, spec.max_position_embeddings) == (128, 64, 256)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2,), 0)
    assert spec.num_parameters == 2 * 128 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 64
    assert spec.source_sha256 == checkpoint.sha256 == source_sha256(str(directory))
    checkpoint.write_tokenizer(tmp_path / "tokenizer")
    names = {path.name for path in (tmp_path / "tokenizer").iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).encode("w5 w127").ids == [5, 127]


def test_what_the_headers_tell(llama: tuple[Any, Path]) -> None:
    assert num_weights(str(llama[1])) == llama[0].num_parameters()
    assert max_positions(str(llama[1])) == 256


def test_end_tokens_of_both_files_count(copy: Path) -> None:
    edit(copy / "config.json", eos_token_id=[2, 7])
    edit(copy / "generation_config.json", eos_token_id=[9, 2])
    assert load_checkpoint(str(copy)).spec.eos_token_ids == (9, 2, 7)


def test_gguf_is_dequantized_to_the_same_model(llama: tuple[Any, Path], tmp_path: Path) -> None:
    original, _ = llama
    path = tiny_models.save_gguf(original, tmp_path / "Tiny.F32.gguf")
    checkpoint = load_checkpoint(str(path))
    assert (checkpoint.spec.name, checkpoint.spec.architecture) == ("Tiny.F32", "LlamaForCausalLM")
    assert checkpoint.spec.eos_token_ids == (2,)
    expected = tiny_models.logits(original, [5, 9, 3])
    np.testing.assert_allclose(tiny_models.logits(checkpoint.model, [5, 9, 3]), expected, atol=1e-5)
    assert source_sha256(str(path)) == checkpoint.sha256
    assert num_weights(str(path)) == path.stat().st_size // 4  # a lower bound
    checkpoint.write_tokenizer(tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


def test_loading_is_silent(llama: tuple[Any, Path], capfd: pytest.CaptureFixture[str]) -> None:
    load_checkpoint(str(llama[1]))
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------------------ hashing


def test_hash_needs_no_torch(llama: tuple[Any, Path]) -> None:
    code = "import sys; from builder.checkpoint import num_weights, source_sha256; print(source_sha256(sys.argv[1]))"
    code += "; num_weights(sys.argv[1]); assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(llama[1])], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == source_sha256(str(llama[1]))


def test_hash_is_of_contents_not_of_places(llama: tuple[Any, Path], copy: Path) -> None:
    before = source_sha256(str(llama[1]))
    assert source_sha256(str(copy)) == before
    seen = {before}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (copy / name).write_text((copy / name).read_text() + "\n")
        seen.add(source_sha256(str(copy)))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    seen.add(source_sha256(str(copy)))
    assert len(seen) == 5


# ---------------------------------------------------------------------------------------------------------- no such model


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere does not exist; give .+, a hub id or one of smollm2-135m-instruct, "):
        load_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFound, match=r"absent\.gguf does not exist"):
        load_checkpoint("absent.gguf")


def test_directory_or_file_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"is a file but not \.gguf"):
        load_checkpoint(str(tmp_path / "model.bin"))


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host\nat length")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ModelNotFound, match=r"^org/model is not a local path and could not be fetched .*\(no route to host\); "
    ) as e:
        load_checkpoint("org/model")
    assert "\n" not in str(e.value)


def test_hub_id_becomes_a_directory(llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(llama[1]))
    assert load_checkpoint("org/model").spec.name == "org/model"


# --------------------------------------------------------------------------------------------------------- unsupported model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM is not a causal language model"),
        ({"architectures": None, "model_type": "bert"}, "bert is not a causal language model"),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, "FalconForCausalLM is not supported; the supported"),
        ({"model_type": "mistral"}, "config.json says LlamaForCausalLM but model_type 'mistral' instead of 'llama'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "the weights are quantized by 'hqq', which is not read"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rotary embedding of type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary embedding of type 'dynamic'"),
        ({"use_bidirectional_attention": True}, "only causal attention"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_config_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=message) as error:
        source_sha256(str(copy))
    assert str(error.value).startswith(str(copy))
    assert "\n" not in str(error.value)


def test_refusal_lists_what_is_supported(copy: Path) -> None:
    edit(copy / "config.json", architectures=["FalconForCausalLM"], model_type="falcon")
    with pytest.raises(UnsupportedModel) as error:
        load_checkpoint(str(copy))
    assert [name for name in FAMILIES if name not in str(error.value)] == []
    assert len(FAMILIES) == 18


def test_every_family_is_tested() -> None:
    import transformers

    tested = {type(tiny_models.config(name)).model_type for name in tiny_models.NAMES}
    assert tested == set(FAMILIES.values())
    assert all(hasattr(transformers, name) for name in FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("bloom-like", r"bloom-like is not supported yet\.; the supported architectures are Cohere"),
        ("falcon", "FalconForCausalLM is not supported; the supported architectures are Cohere"),
    ],
)
def test_gguf_of_another_architecture(architecture: str, message: str, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_name("x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=message):
        load_checkpoint(str(tmp_path / "x.gguf"))


# --------------------------------------------------------------------------------------------------------------- damaged files


def test_truncated_safetensors(copy: Path) -> None:
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    with open(weights, "r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CorruptCheckpoint, match=rf"has {size - 1} bytes but its header describes {size}; copy the file again"):
        source_sha256(str(copy))
    with open(weights, "r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptCheckpoint, match="is truncated: 100 bytes do not hold its header"):
        source_sha256(str(copy))
    weights.write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="is truncated: 0 bytes"):
        source_sha256(str(copy))


def rewrite_header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_damaged_safetensors_header(copy: Path) -> None:
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[8] = 0
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"has a damaged header \(JSONDecodeError"):
        source_sha256(str(copy))


def test_safetensors_shape_that_does_not_fit(copy: Path) -> None:
    rewrite_header(copy / "model.safetensors", lambda header: header["model.norm.weight"].update(shape=[65]))
    with pytest.raises(CorruptCheckpoint, match=r"model\.norm\.weight has 256 bytes but its shape needs 260"):
        source_sha256(str(copy))


def test_missing_shard(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CorruptCheckpoint, match=r"lacks 1 of the 2 weight files .* \(model-00002-of-00002\.safetensors\)"):
        source_sha256(str(copy))


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"has no weights \(\*\.safetensors or pytorch_model\*\.bin\)"):
        source_sha256(str(copy))


def test_missing_weight(copy: Path) -> None:
    """transformers would fill it with random numbers."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"lacks 1 of the model's weights \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load_checkpoint(str(copy))


def test_weight_of_another_shape(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=100)
    message = r"model\.layers\.0\.mlp\.down_proj\.weight has the shape \[64, 96\] but config\.json implies \[64, 100\]"
    with pytest.raises(CorruptCheckpoint, match=message):
        load_checkpoint(str(copy))


def test_more_weights_than_the_model_has(copy: Path) -> None:
    """Fewer layers in config.json than in the file would be a different model."""
    edit(copy / "config.json", num_hidden_layers=1)
    message = r"holds 9 weights that the model of its config\.json does not have \(model\.layers\.1\.input_layernorm\.weight\)"
    with pytest.raises(CorruptCheckpoint, match=message):
        load_checkpoint(str(copy))


def change_weights(directory: Path, **changes: Any) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    weights.update({name.replace("__", "."): value for name, value in changes.items()})
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_tables_that_the_model_computes_are_no_weights(copy: Path) -> None:
    change_weights(copy, rope_freqs__weight=np.ones(8, np.float32), model__layers__0__attn__masked_bias=np.ones(1, np.float32))
    load_checkpoint(str(copy))
    change_weights(copy, model__layers__0__self_attn__extra=np.ones(8, np.float32))
    with pytest.raises(CorruptCheckpoint, match=r"holds 1 weights that .* \(model\.layers\.0\.self_attn\.extra\)"):
        load_checkpoint(str(copy))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(value: float, copy: Path) -> None:
    weight = np.ones((64, 96), np.float32)
    weight[3, 5] = weight[3, 6] = value
    change_weights(copy, model__layers__1__mlp__down_proj__weight=weight)
    message = r"2 of the 6144 values of model\.layers\.1\.mlp\.down_proj\.weight are NaN or infinite"
    with pytest.raises(CorruptCheckpoint, match=message):
        load_checkpoint(str(copy))


@pytest.mark.parametrize("text", ['{"weight_map": {"a": "mod', "[1]", '{"weight_map": 7}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(text: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors\.index\.json.*; copy the checkpoint again"):
        source_sha256(str(copy))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": ', r"generation_config\.json cannot be read \("),
        ("[]", r"generation_config\.json cannot be read \(it is not a JSON object\)"),
        ('{"eos_token_id": "two"}', r"generation_config\.json: eos_token_id is 'two' but must be a token's number"),
        ('{"bos_token_id": [1]}', r"generation_config\.json: bos_token_id is \[1\] but must be a token's number"),
    ],
)
def test_damaged_generation_config(text: str, message: str, copy: Path) -> None:
    """Refused without torch, before the export."""
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=message):
        source_sha256(str(copy))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_hidden_layers", 0, "an integer of at least 1"),
        ("max_position_embeddings", 0, "an integer of at least 1"),
        ("hidden_size", "64", "an integer of at least 1"),
        ("num_attention_heads", True, "an integer of at least 1"),
        ("architectures", "LlamaForCausalLM", "a list of names"),
        ("architectures", [7], "a list of names"),
        ("rope_scaling", "linear", "an object or null"),
        ("rope_parameters", [1], "an object or null"),
        ("quantization_config", "awq", "an object or null"),
    ],
)
def test_values_that_config_json_cannot_have(name: str, value: Any, rule: str, copy: Path) -> None:
    edit(copy / "config.json", **{name: value})
    with pytest.raises(CorruptCheckpoint, match=re.escape(f"{name} in config.json is {value!r} but must be {rule}")):
        source_sha256(str(copy))


def test_missing_or_damaged_tokenizer(copy: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(copy))
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"the tokenizer of .* cannot be loaded"):
        checkpoint.write_tokenizer(tmp_path / "tokenizer")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"has no tokenizer \(none of tokenizer\.json, "):
        source_sha256(str(copy))


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json cannot be read"):
        source_sha256(str(copy))


def test_damaged_gguf(llama: tuple[Any, Path], tmp_path: Path) -> None:
    path = tiny_models.save_gguf(llama[0], tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(
        CorruptCheckpoint, match=rf"tiny\.gguf is a damaged or truncated GGUF file: its {len(data) - 1000} bytes are not"
    ):
        load_checkpoint(str(path))
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(CorruptCheckpoint, match="does not begin with GGUF"):
        source_sha256(str(path))
