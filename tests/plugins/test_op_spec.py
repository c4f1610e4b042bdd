"""The executable specification of the custom ops against plain numpy loops, on ONNX Runtime.

Tolerance 2e-6: float32, sums of at most 32 products of normal numbers. Free pages are NaN throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from plugins.paged_attention import op

Array = npt.NDArray[Any]
D, HQ, HKV, BLOCK, NUM_BLOCKS = 8, 4, 2, 4, 10
TABLES = ([7, 2, 5], [1], [9, 3])  # block ids of three sequences; 0, 4, 6 and 8 are free


def run(op_type: str, inputs: dict[str, Array], num_outputs: int, **attributes: Any) -> list[Array]:
    values = {
        name: ir.Value(name=name, shape=ir.Shape([None] * array.ndim), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        for name, array in inputs.items()
    }
    node = ir.node(op_type, list(values.values()), attributes, domain=op.DOMAIN, num_outputs=num_outputs)
    for index, output in enumerate(node.outputs):
        output.name, output.type = f"out.{index}", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 23, op.DOMAIN: op.DOMAIN_VERSION}
    graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports=opsets, name="g")
    model = op.attach_functions(ir.Model(graph, ir_version=10))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def batch(lens: tuple[tuple[int, int], ...], seed: int = 0) -> dict[str, Array]:
    """(cached, new) tokens per sequence. Cached tokens lie in the pools; everything else in the pools is NaN."""
    rng = np.random.default_rng(seed)
    pools = [np.full((NUM_BLOCKS, BLOCK, HKV, D), np.nan, np.float32) for _ in range(2)]
    table = np.zeros((len(lens), max(map(len, TABLES))), np.int32)
    slots: list[int] = []
    for row, (cached, new) in enumerate(lens):
        table[row, : len(TABLES[row])] = TABLES[row]
        for position in range(cached + new):
            block, offset = TABLES[row][position // BLOCK], position % BLOCK
            if position < cached:
                for pool in pools:
                    pool[block, offset] = rng.normal(size=(HKV, D))
            else:
                slots.append(block * BLOCK + offset)
    counts = [new for _, new in lens]

    def normal(heads: int) -> Array:
        return rng.normal(size=(sum(counts), heads, D)).astype(np.float32)

    return {
        "q": normal(HQ),
        "k": normal(HKV),
        "v": normal(HKV),
        "k_pool": pools[0],
        "v_pool": pools[1],
        "slot_mapping": np.array(slots, np.int32),
        "block_table": table,
        "query_start_loc": np.cumsum([0, *counts]).astype(np.int32),
        "seq_lens": np.array([cached + new for cached, new in lens], np.int32),
    }


def attend(x: dict[str, Array], scale: float, window: int = 0, softcap: float = 0.0, sinks: Array | None = None) -> list[Array]:
    """One query at a time: what PagedAttention means."""
    pools = [x["k_pool"].copy(), x["v_pool"].copy()]
    for pool, new in zip(pools, (x["k"], x["v"]), strict=True):
        pool.reshape(-1, HKV, D)[x["slot_mapping"]] = new
    out = np.empty_like(x["q"])
    for row, length in enumerate(x["seq_lens"]):
        begin, end = x["query_start_loc"][row : row + 2]
        keys, values = (pool[x["block_table"][row]].reshape(-1, HKV, D)[:length] for pool in pools)
        for token in range(begin, end):
            position = length - (end - token)
            first = max(0, position - window + 1) if window else 0
            for head in range(HQ):
                group = head * HKV // HQ
                scores = keys[first : position + 1, group] @ x["q"][token, head] * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if sinks is not None:
                    scores = np.append(scores, sinks[head])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[token, head] = weights[: position + 1 - first] @ values[first : position + 1, group]
    return [out, *pools]


def check(x: dict[str, Array], **options: Any) -> None:
    expected = attend(x, 0.3, **options)
    sinks = options.pop("sinks", None)
    actual = run(
        op.PAGED_ATTENTION,
        x if sinks is None else x | {"sinks": sinks},
        3,
        scale=0.3,
        sliding_window=options.get("window", 0),
        softcap=options.get("softcap", 0.0),
        num_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        layer=0,
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=2e-6)
    for pool, wanted in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(pool, wanted)  # NaN included: nothing but the new slots is written


PREFILL = ((0, 11), (0, 1), (0, 8))
DECODE = ((11, 1), (3, 1), (4, 1))
MIXED = ((3, 6), (2, 1), (0, 5))


@pytest.mark.parametrize("lens", [PREFILL, DECODE, MIXED], ids=["prefill", "decode", "mixed"])
def test_ragged_batch(lens: tuple[tuple[int, int], ...]) -> None:
    check(batch(lens))


@pytest.mark.parametrize("window", [1, 4, 5, 12])
def test_sliding_window_counts_the_query_itself(window: int) -> None:
    check(batch(MIXED), window=window)
    check(batch(DECODE), window=window)


def test_softcap() -> None:
    check(batch(MIXED), softcap=0.7)


def test_sinks_take_their_share_of_the_softmax() -> None:
    check(batch(MIXED), sinks=np.array([0.5, -1.0, 3.0, 0.0], np.float32))
    check(batch(MIXED), sinks=np.array([0.5, -1.0, 3.0, 0.0], np.float32), window=3, softcap=2.0)


def test_a_row_without_queries_changes_nothing() -> None:
    """A padded batch row: length 0, no query."""
    check(batch(((3, 6), (0, 0), (0, 5))))


def test_one_token_in_all() -> None:
    check(batch(((5, 1),)))


def test_experts_are_weighted_swiglu_mlps() -> None:
    rng = np.random.default_rng(0)
    tokens, hidden, inner, experts = 5, 8, 6, 4
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    index = np.array([[0, 3], [3, 0], [1, 2], [2, 3], [1, 0]], np.int64)
    weights = rng.uniform(size=index.shape).astype(np.float32)
    gate_up = rng.normal(size=(experts, 2 * inner, hidden)).astype(np.float32)
    down = rng.normal(size=(experts, hidden, inner)).astype(np.float32)
    expected = np.zeros_like(x)
    for token in range(tokens):
        for choice in range(2):
            expert = index[token, choice]
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            expected[token] += weights[token, choice] * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    inputs = {"hidden": x, "top_k_index": index, "top_k_weights": weights, "gate_up": gate_up, "down": down}
    (actual,) = run(op.MOE_EXPERTS, inputs, 1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)  # values up to 30


def test_only_the_functions_in_use_are_attached() -> None:
    x, w = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "w"))
    node = ir.node("MatMul", [x, w])
    model = ir.Model(ir.Graph([x, w], node.outputs, nodes=[node], opset_imports={"": 23}), ir_version=10)
    assert not op.attach_functions(model).functions


def test_sinks_on_some_nodes_only_are_refused() -> None:
    values = [ir.Value(name=name) for name in op.PAGED_ATTENTION_INPUTS]
    nodes = [ir.node(op.PAGED_ATTENTION, values[:n], domain=op.DOMAIN, num_outputs=3) for n in (9, 10)]
    model = ir.Model(ir.Graph(values, nodes[1].outputs, nodes=nodes, opset_imports={"": 23}), ir_version=10)
    with pytest.raises(ValueError, match="give every node sinks"):
        op.attach_functions(model)
