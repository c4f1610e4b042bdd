"""The Shape of a model for `builder plan`: from its configuration alone, no weight is read."""

from __future__ import annotations

from builder import model_zoo, source
from builder.checkpoint import model_spec
from builder.plan import Shape
from runtime.errors import UnsupportedModel


def shape_of(model: str) -> Shape:
    """`model` as `builder build` takes it; a directory needs its config.json only.

    Raises  ModelNotFound, UnsupportedModel
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from builder.attention_hook import quiet

    found = source.resolve(model_zoo.resolve(model))
    try:
        with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            if found.is_gguf:
                config = AutoConfig.from_pretrained(str(found.path.parent), gguf_file=found.path.name)
            else:
                config = AutoConfig.from_pretrained(str(found.path))
            built = AutoModelForCausalLM.from_config(config)
            spec = model_spec(built, name=found.name)
    except Exception as error:  # transformers raises what it likes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"{model} cannot be planned: transformers does not build its model class ({reason})") from error
    embedding, head = built.get_input_embeddings(), built.get_output_embeddings()
    tables = {id(part.weight): part.weight.numel() for part in (embedding, head) if part is not None}
    return Shape(
        name=spec.name,
        num_parameters=spec.num_parameters,
        table_parameters=sum(tables.values()),
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
    )
