"""Take the place of attention (and of MoE experts) in a transformers model, for as long as a `with` block lasts.

Every supported family calls attention through transformers' AttentionInterface, so what the hook receives is the truth about a
layer: heads after any splitting, the window and soft cap in force, q and k after rotary embedding and norms.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from runtime.contract import LayerSpec

_NAME = "forgeline"


@contextlib.contextmanager
def replaced(
    model: Any, attend: Callable[..., tuple[torch.Tensor, None]], experts: Callable[..., torch.Tensor] | None = None
) -> Iterator[None]:
    """`attend(module, query, key, value, mask, **kwargs)` with [1, heads, T, D] tensors, as transformers calls it."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = model.config
    attention_before, experts_before = config._attn_implementation, config._experts_implementation
    AttentionInterface.register(_NAME, attend)
    if experts is not None:
        ALL_EXPERTS_FUNCTIONS.register(_NAME, experts)
        config._experts_implementation = _NAME
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(attention_before)
        config._experts_implementation = experts_before


def attention_layers(model: Any) -> tuple[LayerSpec, ...]:
    """What each attention layer is given, found by running one token through the model."""
    layers: dict[int, LayerSpec] = {}

    def record(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        assert key.shape == value.shape, f"layer {module.layer_idx} has keys {key.shape} but values {value.shape}"
        layers[module.layer_idx] = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            sliding_window=int(kwargs.get("sliding_window") or 0),
        )
        return torch.zeros_like(query.transpose(1, 2)), None

    zero = torch.zeros(1, 1, dtype=torch.long)
    with replaced(model, record), torch.inference_mode():
        model(input_ids=zero, position_ids=zero, use_cache=False)
    assert sorted(layers) == list(range(model.config.num_hidden_layers)), f"attention ran in layers {sorted(layers)}"
    return tuple(layers[index] for index in sorted(layers))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, notices or warnings from transformers and the exporter: the builder reports what matters itself."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    disabled = logging.root.manager.disable
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        # GGUF conversion draws a tqdm bar of its own.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
