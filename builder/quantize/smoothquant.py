"""SmoothQuant: difficult channels of a layer's input are divided by s and the weight's columns multiplied by it.

    s = amax(x)^α / amax(W)^(1-α) per channel; α is searched per layer, least squared error of the rounded layer on its samples

The division is folded into what produces x, so that nothing is left to compute and the fp32 result is the same:

    norm       its weight (and bias) is divided
    SwiGLU     the columns of the up projection are divided
    attention  the columns of the value projection are divided; query heads that share a value head share its s

Where x has another reader than linear layers, or another producer, the layer stays as it is.

Source     Xiao et al., arXiv:2211.10438
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder.observe import TensorStats
from builder.quantize import activations, ranges, weight_only
from builder.quantize.weights import Weight, add_initializer, feeds_experts, find_weights
from plugins.paged_attention.op import PAGED_ATTENTION
from runtime.errors import BuildError

Array = npt.NDArray[np.float32]
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_NORMS = {"RMSNormalization": (1,), "LayerNormalization": (1, 2), "AddRMSNorm": (2,), "AddLayerNorm": (2, 3)}
_PLAIN = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")


def smooth(
    graph: ir.Graph,
    stats: Mapping[str, TensorStats],
    *,
    static: bool,
    method: str = "max",
    skip: frozenset[str] = frozenset(),
    alphas: tuple[float, ...] = ALPHAS,
) -> dict[str, TensorStats]:
    """In place; returns the statistics of the divided inputs. Layers that read `skip`ped weights stay.

    Raises  BuildError when a layer was not calibrated
    """
    found = dict(stats)
    weights: dict[ir.Value, list[Weight]] = {}
    for weight in find_weights(graph):
        if weight.role in ("attention", "mlp") and [use.kind for use in weight.uses] == ["linear"]:
            if feeds_experts(weight.uses[0].node):
                continue  # a router is not quantized
            x = weight.uses[0].node.inputs[0]
            assert x is not None
            weights.setdefault(x, []).append(weight)
    for x, readers in weights.items():
        name = str(x.name)
        if name not in stats:
            raise BuildError(f"no calibrated range for {name}; int8-sq needs calibration on a text")
        if any(weight.name in skip for weight in readers) or len(list(x.uses())) != len(readers):
            continue
        fold = _producer(graph, x)
        if fold is None:
            continue
        divide, shared = fold
        factors = _search(found[name], [_matrix(weight) for weight in readers], shared, static, method, alphas)
        if factors is None:
            continue
        divide(factors)
        for weight in readers:
            _replace(weight.value, _array(weight.value) * factors[:, None])
        found[name] = scaled(found[name], factors)
    return found


def scaled(stats: TensorStats, factors: Array) -> TensorStats:
    """Of x / factors. The histogram is made anew from the samples, its end from the channels' extremes."""
    new = TensorStats(np.zeros_like(stats.channel_amax))
    if stats.sample.size:
        new.add(stats.sample / factors, 0)
    channels = stats.channel_amax / factors
    while channels.max() > new.limit:
        new.histogram = np.concatenate([new.histogram.reshape(-1, 2).sum(1), np.zeros(len(new.histogram) // 2, np.int64)])
        new.limit = new.limit * 2 or 1.0
    hessian = None if stats.hessian is None else np.asarray(stats.hessian) / np.outer(factors, factors)
    return dataclasses.replace(
        new, channel_amax=channels, sample=stats.sample / factors, hessian=hessian, num_rows=stats.num_rows
    )


def _search(
    stats: TensorStats,
    matrices: list[Array],
    shared: Callable[[Array], Array],
    static: bool,
    method: str,
    alphas: tuple[float, ...],
) -> Array | None:
    """Factors of the best α; None when the layer rounds best as it is."""
    amax_x = np.maximum(shared(stats.channel_amax), 1e-5)
    amax_w = np.maximum(shared(np.max([np.abs(matrix).max(0) for matrix in matrices], axis=0)), 1e-5)
    exact = [stats.sample @ matrix.T for matrix in matrices]
    best, least = None, np.inf
    for alpha in (None, *alphas):
        factors = np.ones_like(amax_x) if alpha is None else (amax_x**alpha / amax_w ** (1 - alpha)).astype(np.float32)
        factors /= np.exp(np.log(factors).mean())  # the layer's magnitude stays
        new = scaled(stats, factors)
        how = (
            {"limit": ranges.limit(new, method, "int8")}
            if static
            else {"block_size": min(activations.DYNAMIC_GROUPS[0], len(factors))}
        )
        fed = activations.rounded(new.sample, "int8", **how)
        rounded = (weight_only.int8(matrix * factors).dense() for matrix in matrices)
        error = sum(float(np.square(fed @ w.T - y).sum(dtype=np.float64)) for w, y in zip(rounded, exact, strict=True))
        if error < least:
            best, least = (None if alpha is None else factors), error
    return best


def _producer(graph: ir.Graph, x: ir.Value) -> tuple[Callable[[Array], None], Callable[[Array], Array]] | None:
    """(divide x by factors, make a vector over x's channels one that can be folded); None when it cannot be."""
    node = x.producer()
    if node is None:
        return None
    if node.op_type in _NORMS and node.outputs[0] is x:
        return lambda factors: _divide_norm(graph, node, factors), lambda vector: vector
    if node.op_type == "SwiGLU":
        return _through_columns(node.inputs[1], lambda vector: vector, lambda factors: factors)
    return _through_attention(x)


def _divide_norm(graph: ir.Graph, node: ir.Node, factors: Array) -> None:
    for index in _NORMS[node.op_type]:
        old = node.inputs[index] if index < len(node.inputs) else None
        if old is not None:
            fresh = add_initializer(graph, f"{old.name}.smooth.{node.outputs[0].name}", ir.Tensor(_array(old) / factors))
            node.replace_input_with(index, fresh)


def _through_attention(x: ir.Value) -> tuple[Callable[[Array], None], Callable[[Array], Array]] | None:
    node = x.producer()
    while node is not None and node.op_type in _PLAIN and len(list(node.outputs[0].uses())) == 1 and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != PAGED_ATTENTION:
        return None
    heads, kv_heads, dim = (node.attributes.get_int(name, 0) for name in ("num_heads", "num_kv_heads", "head_dim"))

    def shared(vector: Array) -> Array:
        by_head = vector.reshape(kv_heads, heads // kv_heads, dim)
        return np.broadcast_to(by_head.max(1, keepdims=True), by_head.shape).reshape(-1).copy()

    return _through_columns(node.inputs[2], shared, lambda f: f.reshape(kv_heads, -1, dim)[:, 0].reshape(-1))


def _through_columns(
    value: ir.Value | None, shared: Callable[[Array], Array], columns: Callable[[Array], Array]
) -> tuple[Callable[[Array], None], Callable[[Array], Array]] | None:
    """`value` comes straight from a projection's columns, or from a part of them behind a Split."""
    begin = 0
    while value is not None and (node := value.producer()) is not None:
        if len(list(value.uses())) != 1:
            return None
        if node.op_type == "Split":
            given = node.inputs[1] if len(node.inputs) > 1 else None
            if given is None or given.const_value is None:
                return None
            begin += int(given.const_value.numpy()[: value.index()].sum())
        elif node.op_type == "MatMul":
            weight = node.inputs[1]
            if weight is None or weight.const_value is None or len(list(weight.uses())) != 1:
                return None
            return partial(_divide_columns, weight, begin, columns), shared
        elif node.op_type not in _PLAIN:
            return None
        value = node.inputs[0]
    return None


def _divide_columns(weight: ir.Value, begin: int, columns: Callable[[Array], Array], factors: Array) -> None:
    part = columns(factors)
    array = _array(weight).copy()
    array[:, begin : begin + len(part)] /= part
    _replace(weight, array)


def _matrix(weight: Weight) -> Array:
    return np.ascontiguousarray(_array(weight.value).T)


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy().astype(np.float32, copy=False)


def _replace(value: ir.Value, array: Array) -> None:
    value.const_value = ir.Tensor(np.ascontiguousarray(array, np.float32), name=value.name)
