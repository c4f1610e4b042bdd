"""transformers causal LM → canonical graph: standard ONNX (opset 23) plus forgeline::PagedAttention, with the I/O of contract.py.

The model runs on one packed token axis (batch 1, T tokens of B sequences); its own forward does everything but attention, so
soft caps, logit scales and embedding multipliers need no code here. torch.onnx.export traces it; `_normalise` then brings the
result into one form whatever the family:

* linear layers are MatMul(x, weight [in, out]), then Add for a bias; `weight` keeps its Hugging Face name, transposed
* a tied head has its own initializer, named as the head would be (lm_head.weight)
* RMSNormalization and RotaryEmbedding (caches [1, T, D/2] computed from `positions`) where the exporter's rules find them
* no Constant nodes, no repeated subexpressions

Weights are views of the torch parameters: no copy is made before the graph is saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions

from builder import attention_hook
from plugins.paged_attention import op
from runtime import contract
from runtime.contract import ModelSpec
from runtime.errors import UnsupportedModel

OPSET = 23
_PREFIX = "model_."  # of parameter names inside _Step


def export_model(model: Any, spec: ModelSpec) -> ir.Model:
    """`model` is left as it was and must live as long as the result, whose initializers are its parameters."""
    step = _Step(model, spec)
    with attention_hook.quiet(), attention_hook.replaced(model, step.attend, step.experts), torch.no_grad(), step:
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
    head, embedding = (_weight_name(model, x) for x in (model.get_output_embeddings(), model.get_input_embeddings()))
    graph = _normalise(program.model, head, embedding)
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
        if not isinstance(module.act_fn, torch.nn.SiLU):
            raise UnsupportedModel(
                f"experts with activation {type(module.act_fn).__name__} are not supported; only SwiGLU (hidden_act silu) is"
            )
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


# ---------------------------------------------------------------------------------------------------------- normal form


def _normalise(model: ir.Model, head: str, embedding: str) -> ir.Model:
    """The exporter's raw graph in the form that this file's header promises."""
    _name_weights(model.graph)
    _transpose_weights(model.graph, head, embedding)
    passes.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants(model)
        rewriter.rewrite(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.CommonSubexpressionEliminationPass()(model)
    onnx_fusions.fuse(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.ShapeInferencePass()(model)
    _gemm_to_matmul(model.graph)
    for clean in (
        passes.DeduplicateInitializersPass(size_limit=8),  # shapes and axes; never two weights that happen to be equal
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.ClearMetadataAndDocStringPass(),
        passes.NameFixPass(),
        passes.TopologicalSortPass(),
    ):
        clean(model)
    return model


def _name_weights(graph: ir.Graph) -> None:
    """model_.model.layers.0… → model.layers.0…, the name in the checkpoint; a tied weight's unused second name goes."""
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif name.startswith(_PREFIX):
            value.name = name.removeprefix(_PREFIX)


def _register(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def _transpose_weights(graph: ir.Graph, head: str, embedding: str) -> None:
    """Transpose(weight [out, in]) → weight [in, out], as a view. A tied weight becomes two: the embedding and the head."""
    transposes: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].is_initializer():
            transposes.setdefault(node.inputs[0], []).append(node)
    for weight, nodes in transposes.items():
        assert weight.const_value is not None and weight.name is not None
        assert all(tuple(node.attributes["perm"].as_ints()) == (1, 0) for node in nodes), f"{weight.name}: not a matrix"
        name = weight.name
        if len(weight.uses()) > len(nodes):
            name, weight.name = head, embedding
        else:
            del graph.initializers[name]
        transposed = _register(graph, name, weight.const_value.numpy().T)
        for node in nodes:
            ir.convenience.replace_all_uses_with(node.outputs[0], transposed)
            graph.remove(node, safe=True)


def _gemm_to_matmul(graph: ir.Graph) -> None:
    for node in list(graph):
        if node.op_type != "Gemm":
            continue
        x, weight, bias = node.inputs
        values = {name: attribute.value for name, attribute in node.attributes.items()}
        assert values.get("alpha", 1.0) == values.get("beta", 1.0) == 1.0 and not values.get("transA"), f"{node} is not linear"
        assert not values.get("transB"), f"{node} multiplies by a transposed weight"
        out = node.outputs[0]
        product = ir.node("MatMul", [x, weight])
        product.outputs[0].type, product.outputs[0].shape = out.type, out.shape
        added = ir.node("Add", [product.outputs[0], bias])
        added.outputs[0].type, added.outputs[0].shape = out.type, out.shape
        graph.insert_before(node, [product, added])
        ir.convenience.replace_all_uses_with(out, added.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _check(model: ir.Model, spec: ModelSpec) -> None:
    """The contract with everything downstream."""
    graph = model.graph
    assert [value.name for value in graph.inputs] == _input_names(spec), "inputs are not those of contract.py"
    assert [value.name for value in graph.outputs] == _output_names(spec), "outputs are not those of contract.py"
    count = sum(node.op_type == op.PAGED_ATTENTION for node in graph)
    assert count == len(spec.layers), f"{count} attention nodes for {len(spec.layers)} layers"
