"""A model's files become a torch module in fp32, its ModelSpec and its tokenizer. The only file that loads weights.

What can be refused without torch is refused first (source.py, families.py); transformers is imported when weights are needed.

Raises   ModelNotFound, UnsupportedModel, CorruptCheckpoint
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder import families
from builder import source as files
from builder.quantized.grid import Origin
from builder.quantized.layout import Format
from builder.source import GENERATION_CONFIG, Source
from runtime.contract import ModelSpec
from runtime.errors import CorruptCheckpoint, UnsupportedModel

# Tables that old checkpoints store and models compute.
_COMPUTED = re.compile(r"(inv_freq|rope_freqs|\.(attn|attention)\.(masked_)?bias|position_ids)(\.weight)?$")


@dataclass(frozen=True)
class Checkpoint:
    model: Any  # transformers causal LM, fp32, eval mode
    spec: ModelSpec
    source: Source
    origin: Origin = field(default_factory=Origin)  # how its weights were quantized, where they were

    @property
    def sha256(self) -> str:
        return self.spec.source_sha256

    def write_tokenizer(self, directory: Path) -> None:
        """tokenizer.json, tokenizer_config.json, the chat template and generation_config.json."""
        write_tokenizer(self.source, self.model.generation_config, directory)


def source_sha256(source: str) -> str:
    """Hash of config, weights and tokenizer, without torch; the key of the build cache."""
    found = files.resolve(source)
    files.check(found)
    return files.sha256(found)


def num_weights(source: str) -> int:
    """A lower bound on the number of weights, without torch."""
    return files.num_weights(files.resolve(source))


def max_positions(source: str) -> int | None:
    """Tokens the model was trained for, where config.json says it, without torch."""
    found = files.resolve(source)
    files.check(found)
    return None if found.is_gguf else families.max_positions(files.read_config(found))


def load_checkpoint(source: str) -> Checkpoint:
    found = files.resolve(source)
    files.check(found)
    from builder.attention_hook import quiet

    with quiet():
        model, origin = _load_model(found)
        return Checkpoint(model, _model_spec(model, found.name, files.sha256(found)), found, origin)


def _load_model(source: Source) -> tuple[Any, Origin]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    stored, origin = files.quantization(source), Origin()
    loader: Any = AutoModelForCausalLM
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.path)}
    if source.is_gguf:
        where = {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        if source.is_gguf:
            named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
            families.check_config(config.to_dict() | {"architectures": [named] if named else []}, source.given)
            where["quantization_config"] = GgufConfig(dequantize=True)
        if stored is not None:
            where, origin = _dequantized(source, stored, config)
            loader = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the automatic class needs a place, not weights
        loaded: Any = loader.from_pretrained(
            **where,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (UnsupportedModel, CorruptCheckpoint):
        raise
    except Exception as error:  # safetensors, gguf and torch each raise their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "is not supported yet" in reason:
            raise UnsupportedModel(f"{source.given}: {reason}; the supported architectures are {families.supported()}") from error
        if source.is_gguf:
            raise CorruptCheckpoint(
                f"{source.given} is a damaged or truncated GGUF file: its {source.path.stat().st_size} bytes are not what its "
                f"header describes ({reason}); copy the file again"
            ) from error
        raise CorruptCheckpoint(
            f"{source.given} cannot be loaded ({type(error).__name__}: {reason}); copy the checkpoint again"
        ) from error
    model, report = loaded
    _check_weights(source.given, model, report)
    return model.eval(), origin


def _dequantized(source: Source, stored: Format, config: Any) -> tuple[dict[str, Any], Origin]:
    """What to call `from_pretrained` with so that a model of `config` gets the dense weights of a quantized checkpoint."""
    from transformers import GenerationConfig

    from builder.quantized.read import read

    headers = files.headers(source)
    state, origin = read(stored, source.weight_files(), headers, stored_in_out=config.model_type in families.STORED_IN_OUT)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would quantize the model again
    generation = GenerationConfig.from_model_config(config)
    if (source.path / GENERATION_CONFIG).is_file():
        generation = GenerationConfig.from_pretrained(str(source.path))
    return {"pretrained_model_name_or_path": None, "state_dict": state, "generation_config": generation}, origin


def _check_weights(given: str, model: Any, report: dict[str, Any]) -> None:
    """The weights are the model's, all of them, in its shapes, and numbers. transformers fills in what does not fit at random."""
    import torch

    again = "copy the checkpoint again, or correct config.json"
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CorruptCheckpoint(f"{given}: {name} has the shape {list(found)} but config.json implies {list(expected)}; {again}")
    if missing := sorted(report["missing_keys"]):
        raise CorruptCheckpoint(f"{given} lacks {len(missing)} of the model's weights ({missing[0]}); {again}")
    if unexpected := sorted(name for name in report["unexpected_keys"] if not _COMPUTED.search(name)):
        raise CorruptCheckpoint(
            f"{given} holds {len(unexpected)} weights that the model of its config.json does not have ({unexpected[0]}); {again}"
        )
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(parameter.detach())):
            count = parameter.numel() - int(torch.isfinite(parameter).sum())
            raise CorruptCheckpoint(
                f"{given}: {count} of the {parameter.numel()} values of {name} are NaN or infinite; copy the checkpoint again"
            )


def model_spec(model: Any, name: str = "model", sha256: str = "") -> ModelSpec:
    """The ModelSpec of a transformers causal LM that is already in memory."""
    from builder.attention_hook import quiet

    with quiet():
        return _model_spec(model, name, sha256)


def _model_spec(model: Any, name: str, sha256: str) -> ModelSpec:
    from builder.attention_hook import attention_layers

    config, generation = model.config, model.generation_config
    return ModelSpec(
        name=name,
        architecture=type(model).__name__,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=attention_layers(model),
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=_first(generation.bos_token_id, getattr(config, "bos_token_id", None)),
        eos_token_ids=_all(generation.eos_token_id, getattr(config, "eos_token_id", None)),
        pad_token_id=_first(generation.pad_token_id, getattr(config, "pad_token_id", None)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        source_sha256=sha256,
    )


def _all(*values: int | Iterable[int] | None) -> tuple[int, ...]:
    """Each id once, in order of appearance."""
    found: dict[int, None] = {}
    for value in values:
        if value is not None:
            found.update(dict.fromkeys([value] if isinstance(value, int) else value))
    return tuple(found)


def _first(*values: int | Iterable[int] | None) -> int | None:
    return next(iter(_all(*values)), None)


def write_tokenizer(source: Source, generation_config: Any, directory: Path) -> None:
    from builder.attention_hook import quiet

    directory.mkdir(parents=True, exist_ok=True)
    with quiet():
        from transformers import AutoTokenizer

        try:
            if source.is_gguf:
                tokenizer = AutoTokenizer.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
            else:
                tokenizer = AutoTokenizer.from_pretrained(str(source.path))
            tokenizer.save_pretrained(str(directory))
        except Exception as error:  # tokenizers raises plain Exception
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CorruptCheckpoint(
                f"the tokenizer of {source.given} cannot be loaded ({reason}); copy the tokenizer's files again"
            ) from error
        if not (directory / "tokenizer.json").is_file():
            raise UnsupportedModel(f"the tokenizer of {source.given} cannot be written as tokenizer.json; add a tokenizer.json")
        original = source.path / GENERATION_CONFIG
        if not source.is_gguf and original.is_file():
            shutil.copyfile(original, directory / GENERATION_CONFIG)
        else:
            (directory / GENERATION_CONFIG).write_text(generation_config.to_json_string(), encoding="utf-8")
