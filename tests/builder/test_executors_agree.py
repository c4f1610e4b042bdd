"""The compiled CPU engine rounds what the reference executor's graph says: the same groups, scales and ties, in layers and cache.

Layer by layer the two agree to the last bits of a sum. Over a deep network those bits decide which way some activations round, so
there only the figures agree, and only on average: bench/precision_table.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import openvino as ov
import pytest
from cpu_engines import Sequences, build, prompt, relative_error

from builder.quantize import activations, fp8, gptq, kv_cache, weight_only
from builder.quantize.ops import attach
from builder.quantize.weights import add_initializer
from builder.targets.openvino_quantize import lower_rounding
from plugins.paged_attention.openvino import compile_options
from runtime.executors.reference import ReferenceExecutor


def layer(x_width: int, quantized: weight_only.Quantized, dtype: str, block_size: int, limit: float) -> ir.Model:
    """y = rounded(x) · weightᵀ, as builder.quantize writes it."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23})
    x = ir.Value(name="x", shape=ir.Shape(["t", x_width]), type=ir.TensorType(ir.DataType.FLOAT))
    graph.inputs.append(x)
    sources = [add_initializer(graph, "q", quantized.q), add_initializer(graph, "scale", ir.Tensor(quantized.scale))]
    if quantized.zero is not None:
        sources.append(add_initializer(graph, "zero", quantized.zero))
    blocks = {"axis": 1, "block_size": quantized.group_size} if quantized.group_size else {"axis": 0}
    weight = ir.node("DequantizeLinear", sources, attributes=blocks)
    turned = ir.node("Transpose", [weight.outputs[0]], attributes={"perm": [1, 0]})
    matmul = ir.node("MatMul", [x, turned.outputs[0]])
    graph.extend([weight, turned, matmul])
    y = matmul.outputs[0]
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape(["t", quantized.q.shape[0]])  # type: ignore[list-item]
    graph.outputs.append(y)
    activations.insert(graph, x, [matmul], dtype, block_size=block_size, limit=limit)
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(
    ("weights", "group", "block_size", "limit"),
    [
        ("int8", 0, 64, 0.0),
        ("int4", 64, 64, 0.0),
        ("int4", 32, 32, 0.0),
        ("int4 rtn", 64, 64, 0.0),
        ("int8", 0, 0, 30.0),
        ("fp8", 0, 0, 30.0),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_layer_rounds_alike(weights: str, group: int, block_size: int, limit: float, num_tokens: int, tmp_path: Path) -> None:
    """Inputs of very different size in each group and token: a scale over more or fewer of them would give other codes."""
    rng = np.random.default_rng(num_tokens)
    width, rows = 576, 192
    matrix = (rng.standard_normal((rows, width)) * 0.05).astype(np.float32)
    x = (rng.standard_normal((num_tokens, width)) * np.exp(rng.standard_normal((num_tokens, width)))).astype(np.float32)
    dtype = "fp8" if weights == "fp8" else "int8"
    if group == 0:
        quantized = {"int8": weight_only.int8, "fp8": fp8.quantize}[weights](matrix)
    else:
        quantized = (
            weight_only.int4(matrix, group) if "rtn" in weights else gptq.int4(matrix, np.eye(width, dtype=np.float32), group)
        )
    model = layer(width, quantized, dtype, block_size, limit)
    ir.save(attach(model), tmp_path / "canonical.onnx")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # as the reference executor has it
    session = ort.InferenceSession(tmp_path / "canonical.onnx", options, providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, {"x": x})

    lowered = ir.load(tmp_path / "canonical.onnx")
    rounding = lower_rounding(lowered)
    assert rounding.group_size == block_size
    ir.save(lowered, tmp_path / "lowered.onnx")
    core = ov.Core()
    how = compile_options(
        key_dtype="f32", value_dtype="f32", head_dims=[], dynamic_quantization_group_size=block_size, num_threads=1
    )
    engine = core.compile_model(core.read_model(tmp_path / "lowered.onnx"), "CPU", how)(x)[0]

    expected = activations.rounded(x, dtype, block_size=block_size, limit=limit) @ quantized.dense().T
    assert relative_error(reference, expected) < 3e-6
    assert relative_error(engine, expected) < 3e-6
    assert relative_error(x @ quantized.dense().T, expected) > 1e-3  # rounding shows


@pytest.mark.parametrize(
    ("name", "dtype", "loses"),
    [("llama", "f16", 1e-5), ("llama", "u8", 1e-4), ("llama", "u8:u4", 1e-3), ("llama_wide_heads", "u8:u4", 1e-3)],
)
def test_a_cache_gives_back_alike(name: str, dtype: str, loses: float, exported: Callable[[str], Any], tmp_path: Path) -> None:
    """Prefill, a chunk behind it, and decodes. float32 weights, so nothing else rounds."""
    built = build(exported(name), tmp_path / "engine", kv_cache_dtype=dtype)
    work = [
        {"a": prompt(40, 1)},
        {"a": prompt(9, 2), "b": prompt(3, 3)},
        *({"a": [token], "b": [token]} for token in prompt(4, 4)),
    ]

    def logits(executor: Any) -> dict[str, np.ndarray]:
        return Sequences(executor).run(work)

    graph = tmp_path / "engine" / "plan" / "canonical.onnx"
    model = ir.load(graph)
    kv_cache.insert(model, *kv_cache.parse_pair(dtype))
    ir.save(model, graph)
    engine = logits(built.executor())
    reference = logits(ReferenceExecutor(graph, num_blocks=16, block_size=32, num_threads=1))
    exact = logits(build(exported(name), tmp_path / "exact", kv_cache_dtype="f32").executor())
    for row in ("a", "b"):
        lost = relative_error(reference[row], exact[row])
        assert lost > loses
        assert relative_error(engine[row], reference[row]) < lost / 20
