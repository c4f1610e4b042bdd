"""Ranges of activations, by running the canonical graph on the reference executor's engine over text.

A tensor to be observed becomes one more output, reduced in the graph to its largest magnitude: no activation leaves ONNX Runtime
whole. The graph keeps its weights where they are, in the file beside it.

Shapes   observed [..., H, D] with axis → [H]; without → []
Raises   BuildError when there is no text or a range is not finite
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from builder.accuracy import Chunk, step_inputs
from runtime import contract
from runtime.errors import BuildError

Amax = dict[str, npt.NDArray[np.float32]]
_BLOCK_SIZE = 32
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
    with tempfile.NamedTemporaryFile(dir=Path(canonical).parent, prefix=".observed-", suffix=".onnx") as file:
        session = _session(Path(canonical), Path(file.name), tensors, num_threads)
    amax: Amax = {}
    for begin in range(0, len(token_ids), context):
        window = token_ids[begin : begin + context]
        blocks = -(-len(window) // _BLOCK_SIZE)
        inputs = step_inputs([Chunk(0, 0, window)], [len(window) - 1], _BLOCK_SIZE, blocks)
        feed = {name: getattr(inputs, name) for name in contract.STEP_INPUTS}
        for value in session.get_inputs():
            if value.name not in feed:  # a pool
                feed[value.name] = np.zeros((blocks, _BLOCK_SIZE, *value.shape[2:]), np.float32)
        names = [name + _SUFFIX for name in tensors]
        for name, found in zip(tensors, session.run(names, feed), strict=True):
            amax[name] = np.maximum(amax[name], found) if name in amax else np.asarray(found, np.float32)
    for name, found in amax.items():
        if not np.isfinite(found).all():
            raise BuildError(
                f"calibration found values that are not finite in {name}; the checkpoint is damaged or overflows fp32"
            )
    return amax


def _session(canonical: Path, path: Path, tensors: Mapping[str, int | None], num_threads: int) -> ort.InferenceSession:
    """The graph with its observers, written to `path` beside the canonical file: ONNX Runtime takes weights from there only."""
    model = ir.load(canonical)
    graph = model.graph
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
    ir.save(model, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    return ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
