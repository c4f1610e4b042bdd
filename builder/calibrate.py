"""Ranges of activations, by running the canonical graph on the reference executor's engine over text.

A tensor to be observed becomes one more output, reduced in the graph to its largest magnitude: no activation leaves ONNX Runtime
whole. The graph keeps its weights where they are, in the file beside it.

Shapes   observed [..., H, D] with axis → [H]; without → []
Raises   BuildError when there is no text or a range is not finite
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from builder.segments import feed, open_session
from runtime.errors import BuildError

Amax = dict[str, npt.NDArray[np.float32]]
_SUFFIX = ".amax"


def calibrate(
    canonical: str | os.PathLike[str],
    token_ids: Sequence[int],
    tensors: Mapping[str, int | None],
    *,
    context: int = 256,
    num_threads: int = 0,
) -> Amax:
    """Largest magnitude of each tensor over `token_ids`, cut into windows of `context` tokens.

    `tensors`   name of a value in the graph → the axis whose entries are told apart (a head), or None
    """
    if not token_ids:
        raise BuildError("there are no tokens to calibrate with; give a text that is not empty")
    session = open_session(_observed(ir.load(canonical), tensors), Path(canonical).parent, num_threads)
    amax: Amax = {}
    for begin in range(0, len(token_ids), context):
        window = token_ids[begin : begin + context]
        names = [name + _SUFFIX for name in tensors]
        for name, found in zip(tensors, session.run(names, feed(session, window, {})), strict=True):
            amax[name] = np.maximum(amax[name], found) if name in amax else np.asarray(found, np.float32)
    for name, found in amax.items():
        if not np.isfinite(found).all():
            raise BuildError(
                f"calibration found values that are not finite in {name}; the checkpoint is damaged or overflows fp32"
            )
    return amax


def _observed(model: ir.Model, tensors: Mapping[str, int | None]) -> ir.Model:
    """In place: the graph as far as the observers need it, with theirs as its only outputs."""
    graph = model.graph
    graph.outputs.clear()
    values = {str(value.name): value for node in graph for value in node.outputs}
    for name, axis in tensors.items():
        value = values[name]
        assert value.shape is not None, f"{name} has no shape"
        rank = len(value.shape)
        axes = [other for other in range(rank) if axis is None or other != axis % rank]
        operand = ir.Value(
            name=f"{name}.axes",
            const_value=ir.tensor(np.array(axes, np.int64), name=f"{name}.axes"),
            shape=ir.Shape([len(axes)]),
            type=ir.TensorType(ir.DataType.INT64),
        )
        graph.register_initializer(operand)
        magnitude = ir.node("Abs", [value])
        largest = ir.node("ReduceMax", [magnitude.outputs[0], operand], attributes={"keepdims": 0})
        output = largest.outputs[0]
        output.name, output.dtype = name + _SUFFIX, ir.DataType.FLOAT
        output.shape = ir.Shape([] if axis is None else [value.shape[axis]])
        graph.extend([magnitude, largest])
        graph.outputs.append(output)
    passes.RemoveUnusedNodesPass()(model)
    return model
