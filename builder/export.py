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
from runtime.contract import LayerSpec, ModelSpec
from runtime.errors import BuildError

OPSET = 23


def export_model(model: Any, spec: ModelSpec) -> ir.Model:
    """`model` is left as it was and must live as long as the result, whose initializers are its parameters."""
    step = _Step(model, spec)
    with attention_hook.quiet(), attention_hook.replaced(model, step.attend, step.experts), torch.no_grad(), step:
        try:
            program = torch.onnx.export(
                step.eval(),
                _example(),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=list(contract.STEP_INPUTS),
                output_names=[contract.LOGITS, contract.NEXT_TOKEN],
                dynamic_shapes=_DYNAMIC_SHAPES,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = error.__cause__ or error
            raise BuildError(
                f"{spec.architecture} with this configuration cannot be exported ({type(reason).__name__}: "
                f"{str(reason).splitlines()[0]}); please report it with the model's config.json"
            ) from error
        head, embedding = (_weight_name(model, x) for x in (model.get_output_embeddings(), model.get_input_embeddings()))
        assert program is not None
        canonical = normalise(program.model, head=head, embedding=embedding)
        _attach_pools(canonical.graph, spec)
    return canonical


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._metadata = (slot_mapping, block_table, query_start_loc, seq_lens)
        self._rows = logits_indices
        logits = self.model_(input_ids=input_ids[None], position_ids=positions[None], use_cache=False).logits.squeeze(0)
        return logits, logits.argmax(-1)

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        layer = module.layer_idx
        query, key, value = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))  # [T, heads, D]
        scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        spec = self.spec.layers[layer]
        inputs = [query, key, value, *self._metadata]
        out = torch.onnx.ops.symbolic(
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
            dtype=query.dtype,
            shape=query.shape,
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


_DYNAMIC_SHAPES = (
    *[{0: "num_tokens"}] * 3,
    {0: "num_seqs", 1: "max_blocks"},
    {0: "num_seqs_plus_1"},
    {0: "num_seqs"},
    {0: "num_logits"},
)


def _example() -> tuple[torch.Tensor, ...]:
    """In the order of STEP_INPUTS; sizes are distinct and none is 1, so that no two dimensions look alike to the tracer."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return (zeros(7, dtype=torch.int64), torch.arange(7), zeros(7), zeros(3, 6), zeros(4), zeros(3), zeros(2, dtype=torch.int64))


def _attach_pools(graph: ir.Graph, spec: ModelSpec) -> None:
    """Give every attention node its pools, as graph inputs and outputs. They are not traced: that would only cost time."""
    nodes = {node.attributes["layer"].as_int(): node for node in graph if node.op_type == op.PAGED_ATTENTION}
    assert sorted(nodes) == list(range(len(spec.layers))), f"attention nodes {sorted(nodes)} for {len(spec.layers)} layers"

    def pool(name: str, layer: LayerSpec) -> ir.Value:
        shape = ir.Shape(["num_blocks", "block_size", layer.num_kv_heads, layer.head_dim])
        return ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))

    k_ins, v_ins, k_outs, v_outs = (
        [pool(name(index), layer) for index, layer in enumerate(spec.layers)]
        for name in (contract.k_pool, contract.v_pool, contract.k_pool_out, contract.v_pool_out)
    )
    for index, old in nodes.items():
        inputs = [*old.inputs[:3], k_ins[index], v_ins[index], *old.inputs[3:]]
        outputs = [ir.Value(name=old.outputs[0].name, shape=old.outputs[0].shape, type=old.outputs[0].type)]
        outputs += [k_outs[index], v_outs[index]]
        node = ir.Node(op.DOMAIN, op.PAGED_ATTENTION, inputs, old.attributes.values(), outputs=outputs, name=f"attention.{index}")
        graph.insert_before(old, node)
        ir.convenience.replace_all_uses_with(old.outputs[0], node.outputs[0])
        graph.remove(old, safe=True)
    graph.inputs.extend([*k_ins, *v_ins])
    graph.outputs.extend([*k_outs, *v_outs])


def _weight_name(model: Any, owner: Any) -> str:
    return next(name for name, module in model.named_modules() if module is owner) + ".weight"
