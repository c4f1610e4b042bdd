"""A graph cut into parts that run one after the other, so that only one part's weights are in memory.

A cut lies between two nodes; what was computed before it and is read behind it crosses. Parts end where little crosses: between
two decoder layers that is the residual stream, in the middle of an MLP four times as much.

Units    bytes
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as passes

from builder.accuracy import Chunk, step_inputs
from runtime import contract

_BLOCK_SIZE = 32


@dataclass(frozen=True)
class Segment:
    inputs: tuple[str, ...]  # computed by segments before
    observed: tuple[str, ...]
    outputs: tuple[str, ...]  # for segments behind


def cut(model: ir.Model, observed: Collection[str], max_bytes: int, extra: Mapping[str, int]) -> list[Segment]:
    """Segments that compute `observed` (values of the graph), in order; nothing behind the last of them.

    Each holds at most `max_bytes` of weights and of `extra` bytes per observed value, unless a single node needs more. The graph
    is pruned to what is needed.
    """
    graph = model.graph
    wanted = [value for node in graph for value in node.outputs if value.name in observed]
    graph.outputs.clear()
    graph.outputs.extend(wanted)
    passes.RemoveUnusedNodesPass()(model)
    nodes = list(graph)
    at = {node: index for index, node in enumerate(nodes)}
    crossing = _crossing(nodes, at)
    segments: list[Segment] = []
    begin, entering = 0, tuple[str, ...]()
    while begin < len(nodes):
        end = _end(nodes, begin, max_bytes, extra, crossing)
        names = {str(value.name) for node in nodes[begin:end] for value in node.outputs}
        leaving = tuple(str(value.name) for value in crossing[end - 1]) if end < len(nodes) else ()
        segments.append(Segment(entering, tuple(name for name in observed if name in names), leaving))
        begin, entering = end, leaving
    return segments


def extract(model: ir.Model, segment: Segment) -> ir.Model:
    """In place: only `segment` is left, with what it reads as graph inputs."""
    graph = model.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    ends = dict.fromkeys((*segment.observed, *segment.outputs))
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in ends if name not in segment.inputs)
    for name in segment.inputs:
        fed = ir.Value(name=name, type=values[name].type, shape=values[name].shape)
        ir.convenience.replace_all_uses_with(values[name], fed)
        graph.inputs.append(fed)
        values[name].name = f"{name}.before"
    passes.RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return model


def open_session(model: ir.Model, beside: Path, num_threads: int) -> ort.InferenceSession:
    """`model` as a session that keeps its weights mapped; it is written to `beside` for a moment, where they are."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False  # hands each window's memory back
    options.add_session_config_entry("session.disable_prepacking", "1")  # packing would copy every weight
    with tempfile.NamedTemporaryFile(dir=beside, prefix=".observed-", suffix=".onnx") as file:
        ir.save(model, file.name)
        return ort.InferenceSession(os.fspath(file.name), options, providers=["CPUExecutionProvider"])


def feed(session: ort.InferenceSession, window: Sequence[int], known: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray]:
    """What one sequence of the tokens `window` feeds; `known` are values computed before, the rest are step inputs and pools."""
    blocks = -(-len(window) // _BLOCK_SIZE)
    inputs = step_inputs([Chunk(0, 0, window)], range(len(window)), _BLOCK_SIZE, blocks)
    result: dict[str, npt.NDArray] = {}
    for value in session.get_inputs():
        if value.name in known:
            result[value.name] = np.asarray(known[value.name])
        elif value.name in contract.STEP_INPUTS:
            result[value.name] = getattr(inputs, value.name)
        else:
            result[value.name] = np.zeros((blocks, _BLOCK_SIZE, *value.shape[2:]), np.float32)
    return result


def _crossing(nodes: Sequence[ir.Node], at: Mapping[ir.Node, int]) -> list[list[ir.Value]]:
    """For the cut behind each node, the values that cross it."""
    last = {value: max((at[use.node] for use in value.uses()), default=-1) for node in nodes for value in node.outputs}
    found: list[list[ir.Value]] = []
    live: list[ir.Value] = []
    for index, node in enumerate(nodes):
        live = [value for value in (*live, *node.outputs) if last[value] > index]
        found.append(live)
    return found


def _end(
    nodes: Sequence[ir.Node], begin: int, max_bytes: int, extra: Mapping[str, int], crossing: Sequence[Sequence[ir.Value]]
) -> int:
    """Where the segment that starts at `begin` ends: in the second half of what fits, where least crosses."""
    seen: set[ir.Value] = set()
    used: list[int] = []
    for node in nodes[begin:]:
        fresh = {value for value in node.inputs if value is not None and value.const_value is not None} - seen
        seen |= fresh
        size = sum(int(value.const_value.nbytes) for value in fresh if value.const_value is not None)
        size += sum(extra.get(str(value.name), 0) for value in node.outputs)
        used.append((used[-1] if used else 0) + size)
        if used[-1] > max_bytes and len(used) > 1:
            used.pop()
            break
    if begin + len(used) == len(nodes):
        return len(nodes)
    half = [begin + index + 1 for index, size in enumerate(used) if 2 * size >= used[-1]]
    end = min(reversed(half), key=lambda place: _width(crossing[place - 1]))
    if _width(crossing[end - 1]) == math.inf:  # no value there has a type: the next place where all have one
        return next((n + 1 for n in range(end, len(nodes)) if _width(crossing[n]) < math.inf), len(nodes))
    return end


def _width(values: Sequence[ir.Value]) -> float:
    """Bytes per token, or so: dimensions without a number count once."""
    total = 0.0
    for value in values:
        if value.dtype is None or value.shape is None:
            return math.inf
        total += value.dtype.itemsize * math.prod(dim for dim in value.shape if isinstance(dim, int))
    return total
