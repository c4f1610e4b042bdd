"""Weights stored as bfloat16, two bytes each, rounded to nearest even, and cast to float where they are read.

Vectors (norms, biases) stay in fp32. Whether arithmetic happens in bfloat16 is the target's business.
"""

from __future__ import annotations

import ml_dtypes
import onnx_ir as ir

from builder.quantize.weights import Weight, add_initializer


def to_bf16(graph: ir.Graph, weight: Weight) -> int:
    """Replace the initializer; returns its new size in bytes."""
    tensor = weight.value.const_value
    assert tensor is not None
    name = weight.name
    stored = ir.Tensor(tensor.numpy().astype(ml_dtypes.bfloat16))
    value = add_initializer(graph, f"{name}.bf16", stored)
    wide: ir.Value | None = None
    for node in list(dict.fromkeys(use.node for use in weight.value.uses())):
        if node.op_type == "Gather" and node.inputs[0] is weight.value:
            _cast_after(graph, node, value)
            continue
        if wide is None:
            cast = ir.node("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)}, name=f"{name}.cast")
            wide = cast.outputs[0]
            wide.name, wide.dtype, wide.shape = f"{name}.wide", ir.DataType.FLOAT, weight.value.shape
            graph.insert_before(node, cast)
        for index, source in enumerate(node.inputs):
            if source is weight.value:
                node.replace_input_with(index, wide)
    del graph.initializers[name]
    return int(stored.nbytes)


def _cast_after(graph: ir.Graph, gather: ir.Node, table: ir.Value) -> None:
    """Look up first, widen the rows found."""
    out = gather.outputs[0]
    rows = ir.node("Gather", [table, gather.inputs[1]], attributes={"axis": 0})
    cast = ir.node("Cast", [rows.outputs[0]], attributes={"to": int(ir.DataType.FLOAT)})
    name, out.name = out.name, None
    rows.outputs[0].name, rows.outputs[0].dtype, rows.outputs[0].shape = f"{name}.rows", ir.DataType.BFLOAT16, out.shape
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, out.type, out.shape
    graph.insert_before(gather, [rows, cast])
    ir.convenience.replace_all_uses_with(out, cast.outputs[0], replace_graph_outputs=True)
    graph.remove(gather, safe=True)
