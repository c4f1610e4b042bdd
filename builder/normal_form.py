"""The exporter's raw graph → one form whatever the family, so that fusions and quantizers meet few shapes of the same thing.

* linear layers are MatMul(x, weight [in, out]), then Add for a bias; `weight` keeps its Hugging Face name, transposed
* a tied head has its own initializer, named as the head would be (lm_head.weight)
* RMSNormalization and RotaryEmbedding (caches [1, T, D/2] computed from `positions`) where the exporter's rules find them
* no Constant nodes, no repeated subexpressions, no functions

Matrices are transposed as views: nothing the size of a weight is copied.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions

PREFIX = "model_."  # of parameter names, from the wrapper's attribute in export.py


def normalise(model: ir.Model, *, head: str, embedding: str) -> ir.Model:
    """`head` and `embedding` are the Hugging Face names of those weights, which a tied model stores once."""
    _name_weights(model.graph)
    _gemm_to_matmul(model.graph)
    _transpose_weights(model.graph, head, embedding)
    _fold_offsets(model.graph)
    passes.InlinePass()(model)
    rewriter.rewrite(model)
    optimizer.fold_constants(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.CommonSubexpressionEliminationPass()(model)
    onnx_fusions.fuse(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.ShapeInferencePass()(model)
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
        elif name.startswith(PREFIX):
            value.name = name.removeprefix(PREFIX)


def _register(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def _transpose_weights(graph: ir.Graph, head: str, embedding: str) -> None:
    """Transpose(weight [out, in]) → weight [in, out], as a view. A tied weight becomes two: the embedding and the head."""
    transposes: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is not None and weight.is_initializer() and tuple(node.attributes["perm"].as_ints()) == (1, 0):
            transposes.setdefault(weight, []).append(node)
    for weight, nodes in transposes.items():
        assert weight.const_value is not None and weight.name is not None
        name = weight.name
        if len(weight.uses()) > len(nodes):
            name, weight.name = head, embedding
        else:
            del graph.initializers[name]
        transposed = _register(graph, name, weight.const_value.numpy().T)
        for node in nodes:
            ir.convenience.replace_all_uses_with(node.outputs[0], transposed)
            graph.remove(node, safe=True)


def _fold_offsets(graph: ir.Graph) -> None:
    """1 + weight (Gemma's norms) → weight, under the same name."""
    for node in list(graph):
        if node.op_type != "Add" or node.domain:
            continue
        weights = [value for value in node.inputs if value is not None and value.is_initializer() and len(value.uses()) == 1]
        scalars = [value for value in node.inputs if value is not None and _scalar(value) is not None]
        if len(weights) == len(scalars) == 1:
            (weight,) = weights
            assert weight.const_value is not None and weight.name is not None
            del graph.initializers[weight.name]
            folded = _register(graph, weight.name, weight.const_value.numpy() + _scalar(scalars[0]))
            ir.convenience.replace_all_uses_with(node.outputs[0], folded)
            graph.remove(node, safe=True)


def _scalar(value: ir.Value) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor.numpy() if tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.FLOAT else None


def _gemm_to_matmul(graph: ir.Graph) -> None:
    for node in list(graph):
        if node.op_type != "Gemm":
            continue
        x, weight, *bias = node.inputs
        values = {name: attribute.value for name, attribute in node.attributes.items()}
        assert values.get("alpha", 1.0) == values.get("beta", 1.0) == 1.0 and not values.get("transA"), f"{node} is not linear"
        out = node.outputs[0]
        if values.get("transB"):
            transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
            graph.insert_before(node, transpose)
            weight = transpose.outputs[0]
        product = ir.node("MatMul", [x, weight])
        product.outputs[0].type, product.outputs[0].shape = out.type, out.shape
        graph.insert_before(node, product)
        if bias:
            added = ir.node("Add", [product.outputs[0], *bias])
            added.outputs[0].type, added.outputs[0].shape = out.type, out.shape
            graph.insert_before(node, added)
            product = added
        ir.convenience.replace_all_uses_with(out, product.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
