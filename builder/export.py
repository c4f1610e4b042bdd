"""transformers causal LM → canonical graph: standard ONNX (opset 23) plus forgeline::PagedAttention, with the I/O of contract.py.

The model runs on one packed token axis (batch 1, T tokens of B sequences); its own forward does everything but attention, so
soft caps, logit scales and embedding multipliers need no code here. torch.onnx.export traces it, normal_form.py tidies.
Weights are views of the torch parameters: no copy is made before the graph is saved.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from builder import attention_hook
from builder.normal_form import normalise
from plugins.paged_attention import op
from runtime import contract
from runtime.contract import ModelSpec
from runtime.errors import BuildError

OPSET = 23


def export_model(model: Any, spec: ModelSpec) -> ir.Model:
    """`model` is left as it was and must live as long as the result, whose initializers are its parameters."""
    step = _Step(model, spec)
    with attention_hook.quiet(), attention_hook.replaced(model, step.attend, step.experts), torch.no_grad(), step:
        try:
            program = torch.onnx.export(
                step.eval(),
                _example(spec),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=_input_names(spec),
                output_names=_output_names(spec),
                dynamic_shapes=_dynamic_shapes(spec),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = error.__cause__ or error
            raise BuildError(
                f"{spec.architecture} with this configuration cannot be exported ({type(reason).__name__}: "
                f"{str(reason).splitlines()[0]}); please report it with the model's config.json"
            ) from error
        head, embedding = (_weight_name(model, x) for x in (model.get_output_embeddings(), model.get_input_embeddings()))
        graph = normalise(program.model, head=head, embedding=embedding)
    _check(graph, spec)
    return graph


class _Step(torch.nn.Module):
    """One engine step around the transformers model; as a context manager, rows are gathered before the LM head."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.model_ = model
        self.spec = spec

    def __enter__(self) -> None:
        def gather(module: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
            return args[0].index_select(1, self._rows)

        self._hook = self.model_.get_output_embeddings().register_forward_pre_hook(gather)

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        logits_indices: torch.Tensor,
        k_pools: list[torch.Tensor],
        v_pools: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        self._metadata = (slot_mapping, block_table, query_start_loc, seq_lens)
        self._rows = logits_indices
        self._k_pools, self._v_pools = list(k_pools), list(v_pools)
        logits = self.model_(input_ids=input_ids[None], position_ids=positions[None], use_cache=False).logits.squeeze(0)
        return (logits, logits.argmax(-1), *self._k_pools, *self._v_pools)

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        layer = module.layer_idx
        query, key, value = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))  # [T, heads, D]
        scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        spec = self.spec.layers[layer]
        k_pool, v_pool = self._k_pools[layer], self._v_pools[layer]
        inputs = [query, key, value, k_pool, v_pool, *self._metadata]
        out, self._k_pools[layer], self._v_pools[layer] = torch.onnx.ops.symbolic_multi_out(
            f"{op.DOMAIN}::{op.PAGED_ATTENTION}",
            inputs if sinks is None else [*inputs, sinks],
            {
                "scale": float(scale if scale is not None else spec.head_dim**-0.5),
                "sliding_window": spec.sliding_window,
                "softcap": float(kwargs.get("softcap") or 0.0),
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "layer": layer,
            },
            dtypes=(query.dtype, k_pool.dtype, v_pool.dtype),
            shapes=(query.shape, k_pool.shape, v_pool.shape),
            version=op.DOMAIN_VERSION,
        )
        return out[None], None

    def experts(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert module.config.hidden_act == "silu", "families.check_config lets SwiGLU experts through only"
        return torch.onnx.ops.symbolic(
            f"{op.DOMAIN}::{op.MOE_EXPERTS}",
            (hidden, index, weights, module.gate_up_proj, module.down_proj),
            {},
            dtype=hidden.dtype,
            shape=hidden.shape,
            version=op.DOMAIN_VERSION,
        )


# ---------------------------------------------------------------------------------------------------------------- tracing


def _input_names(spec: ModelSpec) -> list[str]:
    layers = range(len(spec.layers))
    return [*contract.STEP_INPUTS, *map(contract.k_pool, layers), *map(contract.v_pool, layers)]


def _output_names(spec: ModelSpec) -> list[str]:
    layers = range(len(spec.layers))
    return [contract.LOGITS, contract.NEXT_TOKEN, *map(contract.k_pool_out, layers), *map(contract.v_pool_out, layers)]


def _example(spec: ModelSpec) -> tuple[Any, ...]:
    """Inputs of distinct sizes, none of them 1, so that no two dimensions look alike to the tracer."""

    def i32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def i64(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def pools() -> list[torch.Tensor]:
        return [torch.zeros(11, 5, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]

    positions = torch.arange(7)
    return (i64(7), positions, i32(7), i32(3, 6), i32(4), i32(3), i64(2), pools(), pools())


def _dynamic_shapes(spec: ModelSpec) -> tuple[Any, ...]:
    tokens = {0: "num_tokens"}
    pools = [{0: "num_blocks", 1: "block_size"} for _ in spec.layers]
    table = {0: "num_seqs", 1: "max_blocks"}
    return (tokens, tokens, tokens, table, {0: "num_seqs_plus_1"}, {0: "num_seqs"}, {0: "num_logits"}, pools, pools)


def _weight_name(model: Any, owner: Any) -> str:
    return next(name for name, module in model.named_modules() if module is owner) + ".weight"


def _check(model: ir.Model, spec: ModelSpec) -> None:
    """The contract with everything downstream."""
    graph = model.graph
    assert [value.name for value in graph.inputs] == _input_names(spec), "inputs are not those of contract.py"
    assert [value.name for value in graph.outputs] == _output_names(spec), "outputs are not those of contract.py"
    count = sum(node.op_type == op.PAGED_ATTENTION for node in graph)
    assert count == len(spec.layers), f"{count} attention nodes for {len(spec.layers)} layers"
