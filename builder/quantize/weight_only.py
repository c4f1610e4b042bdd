"""Weight-only integers as standard ONNX: DequantizeLinear(q, scale) where a float weight was. No activation is touched.

    int8   one symmetric scale per output channel
    int4   one symmetric scale per `group_size` weights along the input axis

    linear   weight [in, out]  →  MatMul(x, Transpose(DequantizeLinear(q [out, in])))     rows contiguous, as kernels read them
    experts  weight [E, out, in] →  DequantizeLinear(q [E, out, in]), blocks along the last axis
    lookup   Gather(weight)    →  Cast(Gather(q)) * Gather(scale)                          only the rows looked up are widened

A weight read by both (a tied embedding) keeps one q and one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.quantize.weights import Weight, add_initializer

GROUP_SIZES = (128, 64, 32)  # in order of preference


@dataclass(frozen=True)
class Quantized:
    q: ir.Tensor  # [out, in] int8 or int4
    scale: npt.NDArray[np.float32]  # [out] or [out, in / group_size]
    group_size: int  # 0: per output channel
    zero: ir.Tensor | None = None  # as scale, uint4: the integer that stands for 0; q is then uint4

    @property
    def num_bytes(self) -> int:
        return int(self.q.nbytes) + self.scale.nbytes + (0 if self.zero is None else int(self.zero.nbytes))

    def dense(self) -> npt.NDArray[np.float32]:
        """[out, in], as a kernel reads it."""
        scale = self.scale.repeat(self.group_size, axis=1) if self.group_size else self.scale[:, None]
        q = self.q.numpy().astype(np.float32)
        if self.zero is not None:
            q -= self.zero.numpy().astype(np.float32).repeat(self.group_size, axis=1)
        return q * scale

    def by_expert(self, num_experts: int) -> Quantized:
        """Of a [E * out, in] weight, as [E, out, in]; a scale per output becomes one block per row."""
        assert self.zero is None
        rows, width = self.q.shape.numpy()
        q = ir.Tensor(self.q.numpy().reshape(num_experts, rows // num_experts, width), dtype=self.q.dtype)
        return Quantized(q, self.scale.reshape(num_experts, rows // num_experts, -1), self.group_size or width)


def common_group_size(widths: Iterable[int]) -> int | None:
    """The largest of GROUP_SIZES that divides every width; None when there is none."""
    shared = math.gcd(*widths)
    return next((size for size in GROUP_SIZES if shared % size == 0), None)


def group_size_for(width: int, wanted: int | None) -> int | None:
    """`wanted` if it divides `width`, else the largest smaller group that does; None when there is none."""
    sizes = GROUP_SIZES if wanted is None else (wanted, *(size for size in GROUP_SIZES if size < wanted))
    return next((size for size in sizes if width % size == 0), None)


def int8(weight: npt.NDArray[np.float32]) -> Quantized:
    """Of `weight` [out, in]."""
    scale = _nonzero(np.abs(weight).max(axis=1) / np.float32(127))
    q = np.rint(weight / scale[:, None]).astype(np.int8)
    return Quantized(ir.Tensor(q), scale, 0)


def int4(weight: npt.NDArray[np.float32], group_size: int) -> Quantized:
    """Of `weight` [out, in]; `group_size` divides `in`.

    The scale maps the extreme of a group, whatever its sign, to -8, so that all sixteen levels are used and the largest weight is
    exact. Clipping it for a smaller squared error loses more than it gains (SmolLM2, groups of 64 and 128: perplexity 22.0 with
    clipping, 20.3 without, 16.0 in fp32).
    """
    rows, width = weight.shape
    assert width % group_size == 0, f"groups of {group_size} do not divide {width}"
    groups = weight.reshape(-1, group_size)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1, keepdims=True), axis=1)
    scale = _nonzero(extreme / np.float32(-8))
    q = np.clip(np.rint(groups / scale), -8, 7).reshape(rows, width).astype(ml_dtypes.int4)
    return Quantized(ir.Tensor(q, dtype=ir.DataType.INT4), scale.reshape(rows, -1), group_size)


def _nonzero(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(scale == 0, np.float32(1), scale).astype(np.float32, copy=False)


def rewrite(graph: ir.Graph, weight: Weight, quantized: Quantized) -> None:
    """Make every reader of `weight` read `quantized`; the float initializer goes."""
    name = weight.name
    if weight.num_experts:
        quantized = quantized.by_expert(weight.num_experts)
    q = add_initializer(graph, f"{name}.q", quantized.q)
    scale = add_initializer(graph, f"{name}.scale", ir.Tensor(quantized.scale))
    dense: ir.Value | None = None
    for use in weight.uses:
        node = use.node
        if use.kind == "lookup":
            _rewrite_lookup(graph, node, q, scale)
            continue
        if use.kind == "experts":
            _rewrite_experts(graph, weight.value, node, q, scale, quantized.group_size)
            continue
        if dense is None:
            attributes = {"axis": 1, "block_size": quantized.group_size} if quantized.group_size else {"axis": 0}
            sources = [q, scale]
            if quantized.zero is not None:
                sources.append(add_initializer(graph, f"{name}.zero", quantized.zero))
            dequantize = ir.node("DequantizeLinear", sources, attributes=attributes, name=f"{name}.dequantize")
            transpose = ir.node("Transpose", [dequantize.outputs[0]], attributes={"perm": [1, 0]}, name=f"{name}.transpose")
            rows, columns = quantized.q.shape.numpy()
            _describe(dequantize.outputs[0], f"{name}.dense", ir.Shape([rows, columns]))
            dense = _describe(transpose.outputs[0], f"{name}.dense_transposed", ir.Shape([columns, rows]))
            graph.insert_before(node, [dequantize, transpose])
        old = node.inputs[1]
        node.replace_input_with(1, dense)
        if use.kind == "tied":
            assert old is not None
            transposed = old.producer()
            if transposed is not None and not old.uses():
                graph.remove(transposed, safe=True)
    assert not weight.value.uses(), f"{name} still has readers"
    del graph.initializers[name]


def _rewrite_experts(graph: ir.Graph, weight: ir.Value, node: ir.Node, q: ir.Value, scale: ir.Value, block_size: int) -> None:
    dequantize = ir.node("DequantizeLinear", [q, scale], attributes={"axis": 2, "block_size": block_size})
    _describe(dequantize.outputs[0], f"{weight.name}.dense", weight.shape)
    graph.insert_before(node, dequantize)
    for index, value in enumerate(node.inputs):
        if value is weight:
            node.replace_input_with(index, dequantize.outputs[0])


def _rewrite_lookup(graph: ir.Graph, node: ir.Node, q: ir.Value, scale: ir.Value) -> None:
    ids, out = node.inputs[1], node.outputs[0]
    rows = ir.node("Gather", [q, ids], attributes={"axis": 0})
    wide = ir.node("Cast", [rows.outputs[0]], attributes={"to": int(ir.DataType.FLOAT)})
    scales = ir.node("Gather", [scale, ids], attributes={"axis": 0})
    last = add_initializer(graph, f"{q.name}.last_axis", ir.Tensor(np.array([-1], np.int64)))
    column = ir.node("Unsqueeze", [scales.outputs[0], last])
    product = ir.node("Mul", [wide.outputs[0], column.outputs[0]])
    for part, suffix in ((rows, "rows"), (wide, "wide"), (scales, "scales"), (column, "column")):
        part.outputs[0].name = f"{out.name}.{suffix}"
    rows.outputs[0].dtype = ir.DataType.INT8
    for value in (wide.outputs[0], scales.outputs[0], column.outputs[0]):
        value.dtype = ir.DataType.FLOAT
    graph.insert_before(node, [rows, wide, scales, column, product])
    name, out.name = out.name, None
    _describe(product.outputs[0], str(name), out.shape)
    ir.convenience.replace_all_uses_with(out, product.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _describe(value: ir.Value, name: str, shape: ir.Shape | None) -> ir.Value:
    value.name, value.dtype, value.shape = name, ir.DataType.FLOAT, shape
    return value
