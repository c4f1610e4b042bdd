"""How far keys and values of the quantized cache stand above what the cache's rounding does to them, layer by layer.

Runs a graph that rounds them (the reference executor's) over text and sums squares inside it, so that what leaves is [heads, D]
per tensor and window, however long the text. Keys are weighed by the queries that read them: an error in a channel counts as much
as that channel's queries are large, since only their product is ever used. Values are taken as they are.

Shapes   q [T, Hq, D], k and v [T, Hkv, D]
Units    dB, 10 log10(signal / error)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from builder.quantize import ops
from builder.segments import feed, open_session
from plugins.paged_attention.op import PAGED_ATTENTION
from runtime.contract import DOMAIN

Sums = npt.NDArray[np.float64]
_INPUTS = {"keys": 1, "values": 2}  # of PagedAttention


def cache_noise(graph: Path, windows: Sequence[Sequence[int]], *, num_threads: int = 0) -> dict[str, float]:
    """`layers.3.keys` and the like → dB, the noisiest first; what the cache stores without an error is left out."""
    model = ir.load(graph)
    model.graph.outputs.clear()
    names = [name for node in list(model.graph) if _is_attention(node) for name in _observe(model.graph, node)]
    if not names:
        return {}
    passes.RemoveUnusedNodesPass()(model)
    session = open_session(model, graph.parent, num_threads)
    outputs = [value.name for value in session.get_outputs()]
    sums: dict[str, Sums] = {}
    for window in windows:
        for output, found in zip(outputs, session.run(outputs, feed(session, window, {})), strict=True):
            sums[output] = sums.get(output, 0.0) + found.astype(np.float64)
    levels = {name: _level(sums, name) for name in names}
    return dict(sorted(((name, db) for name, db in levels.items() if db is not None), key=lambda item: (item[1], item[0])))


def _is_attention(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == PAGED_ATTENTION


def _observe(graph: ir.Graph, node: ir.Node) -> list[str]:
    """Adds outputs NAME.signal, NAME.error and, for keys, NAME.queries; the names."""
    names = []
    for part, index in _INPUTS.items():
        cached = node.inputs[index]
        exact = _before_rounding(cached)
        if cached is None or exact is None:
            continue
        name = f"layers.{node.attributes.get_int('layer', 0)}.{part}"
        error = ir.node("Sub", [cached, exact])
        graph.append(error)
        _sum_squares(graph, exact, f"{name}.signal")
        _sum_squares(graph, error.outputs[0], f"{name}.error")
        if part == "keys":
            wide = ir.node("Cast", [node.inputs[0]], attributes={"to": int(ir.DataType.FLOAT)})
            graph.append(wide)
            _sum_squares(graph, wide.outputs[0], f"{name}.queries")
        names.append(name)
    return names


def _sum_squares(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Over tokens."""
    axes = ir.Value(
        name=f"{name}.axes",
        const_value=ir.tensor(np.array([0], np.int64), name=f"{name}.axes"),
        shape=ir.Shape([1]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    graph.register_initializer(axes)
    total = ir.node("ReduceSumSquare", [value, axes], attributes={"keepdims": 0})
    graph.append(total)
    output = total.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, None])
    graph.outputs.append(output)


def _before_rounding(cached: ir.Value | None) -> ir.Value | None:
    """The fp32 values that a quantizer, a store or a pair of casts made `cached` of; None when nothing did."""
    node = None if cached is None else cached.producer()
    if node is None:
        return None
    if node.domain == DOMAIN and node.op_type in ops.STORES:
        return node.inputs[0]
    if node.domain == "" and node.op_type in ("DequantizeLinear", "Cast"):
        first = {"DequantizeLinear": "QuantizeLinear", "Cast": "Cast"}[node.op_type]
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is not None and before.domain == "" and before.op_type == first:
            return before.inputs[0]
    return None


def _level(sums: dict[str, Sums], name: str) -> float | None:
    signal, error, queries = sums[f"{name}.signal"], sums[f"{name}.error"], sums.get(f"{name}.queries")
    weight: Sums | float = 1.0
    if queries is not None:  # those of a group share keys
        heads, dim = signal.shape
        weight = queries.reshape(heads, -1, dim).sum(1)
    total, lost = float((signal * weight).sum()), float((error * weight).sum())
    return 10 * math.log10(total / lost) if total > 0 and lost > 0 else None
