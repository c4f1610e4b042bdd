"""The numpy reference of the kernel tests equals the executable specification of the op, run by ONNX Runtime."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from kernel_cases import Case, expected, make_inputs

from plugins.paged_attention import op, reference

CASES = [
    Case(((1, 37), (5, 5), (1, 16), (7, 40)), num_heads=8, num_kv_heads=2),
    Case(((1, 37), (1, 0), (9, 40)), num_heads=6, num_kv_heads=1, window=20, sinks=True),
    Case(((4, 33), (1, 90)), block_size=64, softcap=3.0),
]


def _specification(case: Case, inputs):
    """The op on pools that already hold the new tokens' keys and values, which are written again."""
    heads, kv_heads, dim = case.num_heads, case.num_kv_heads, case.head_dim
    slots, keys, values = [], [], []
    pools = [np.nan_to_num(pool.astype(np.float32)) for pool in (inputs.key_pool, inputs.value_pool)]
    scratch = len(pools[0]) * case.block_size  # an extra page takes what padding rows write
    pools = [np.concatenate([pool, np.zeros_like(pool[:1])]) for pool in pools]
    for row, (count, length) in enumerate(case.rows):
        for position in range(length - count, length):
            page = inputs.block_table[row, max(position, 0) // case.block_size]
            slot = page * case.block_size + position % case.block_size if length else scratch
            slots.append(slot)
            cell = slot // case.block_size, slot % case.block_size
            keys.append(pools[0][cell])
            values.append(pools[1][cell])
    feeds = {
        "q": inputs.query.astype(np.float32), "k": np.array(keys), "v": np.array(values), "k_pool": pools[0], "v_pool": pools[1],
        "slot_mapping": np.array(slots, np.int32), "block_table": inputs.block_table,
        "query_start_loc": inputs.query_start_loc, "seq_lens": inputs.seq_lens,
    }  # fmt: skip
    if case.sinks:
        feeds["sinks"] = inputs.sinks
    attributes = {
        "scale": 1 / math.sqrt(dim), "sliding_window": case.window, "softcap": case.softcap, "num_heads": heads,
        "num_kv_heads": kv_heads, "head_dim": dim, "layer": 0,
    }  # fmt: skip
    node = onnx.helper.make_node(op.PAGED_ATTENTION, list(feeds), ["out", "k_out", "v_out"], domain=op.DOMAIN, **attributes)
    types = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int32): onnx.TensorProto.INT32}
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [onnx.helper.make_tensor_value_info(name, types[array.dtype], array.shape) for name, array in feeds.items()],
        [onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [None] * 3)],
    )
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(op.DOMAIN, op.DOMAIN_VERSION)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    proto = ir.to_proto(op.attach_functions(ir.from_proto(model)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["out"], feeds)[0]


@pytest.mark.parametrize("case", CASES, ids=["full", "window-sinks-empty", "softcap"])
def test_reference_equals_the_specification(case):
    inputs = make_inputs(case)
    wanted = expected(case, inputs)
    assert np.abs(_specification(case, inputs) - wanted).max() < 1e-5


def test_e4m3_by_hand():
    values = reference.e4m3_values()
    assert [values[code] for code in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8)] == [0, 2**-9, 2**-6, 1, 448, -1]
    assert math.isnan(values[0x7F])
    ties = np.array([1.0625, 1.1875, 2**-10, 3 * 2**-10, 1e6, -1e6, -0.0], np.float32)
    # halfway from 1 to 1.125, 1.125 to 1.25, 0 to 2^-9, 2^-9 to 2^-8: each to the even code
    assert reference.to_e4m3(ties).tolist() == [0x38, 0x3A, 0x00, 0x02, 0x7E, 0xFE, 0x80]
