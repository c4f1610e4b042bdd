"""The fused ops' executable specifications against arithmetic written out in numpy, attached and inlined."""

from __future__ import annotations

import numpy as np
import pytest
from fuse_graphs import feeds, ops, parse, relative_error, run, weight
from test_fuse_qkv_merge import FEEDS, PRODUCTS, WEIGHTS, model

from builder.fuse import inline_forgeline_ops

SIGMOID = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731  (one line of arithmetic)
GELU_TANH = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # noqa: E731
TWO_IN = "g (float[1,T,8] a, float[1,T,8] b) =>"
OPS = {
    "SwiGLU": (
        f"{TWO_IN} (float[1,T,8] y) {{ y = forgeline.SwiGLU(a, b) }}",
        lambda a, b, w, c: [a * SIGMOID(a) * b],
    ),
    "GeGLU": (
        f'{TWO_IN} (float[1,T,8] y) {{ y = forgeline.GeGLU <approximate: string = "tanh"> (a, b) }}',
        lambda a, b, w, c: [GELU_TANH(a) * b],
    ),
    "AddRMSNorm": (
        f"{TWO_IN} (float[1,T,8] y, float[1,T,8] s) {{ y, s = forgeline.AddRMSNorm <epsilon: float = 0.5> (a, b, w) }}",
        lambda a, b, w, c: [(a + b) / np.sqrt(((a + b) ** 2).mean(-1, keepdims=True) + 0.5) * w, a + b],
    ),
    "AddLayerNorm": (
        f"{TWO_IN} (float[1,T,8] y, float[1,T,8] s) {{ y, s = forgeline.AddLayerNorm <epsilon: float = 0.5> (a, b, w, c) }}",
        lambda a, b, w, c: [
            ((a + b) - (a + b).mean(-1, keepdims=True)) / np.sqrt((a + b).var(-1, keepdims=True) + 0.5) * w + c,
            a + b,
        ],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_function_computes_what_its_name_says(name):
    text, arithmetic = OPS[name]
    fused = parse(text, w=weight(8), c=weight(8, seed=1))
    inputs = feeds(fused)
    expected = arithmetic(inputs["a"].astype(np.float64), inputs["b"].astype(np.float64), weight(8), weight(8, seed=1))
    assert relative_error(run(fused, inputs), expected) < 1e-6


@pytest.mark.parametrize("name", OPS)
def test_inlining_leaves_standard_ops_with_the_same_result(name):
    fused = parse(OPS[name][0], w=weight(8), c=weight(8, seed=1))
    before = run(fused)
    assert inline_forgeline_ops(fused) == 1
    assert name not in ops(fused)
    assert all(node.domain == "" for node in fused.graph)
    assert not fused.functions
    assert [value.name for value in fused.graph.outputs] == (["y", "s"] if name.startswith("Add") else ["y"])
    assert relative_error(run(fused), before) == 0


def test_attention_is_not_inlined():
    graph = model(PRODUCTS, **WEIGHTS)
    run(graph, FEEDS)  # attaches the functions
    assert inline_forgeline_ops(graph) == 0
    assert ops(graph)["PagedAttention"] == 1
    assert ("forgeline", "PagedAttention", "") in graph.functions
