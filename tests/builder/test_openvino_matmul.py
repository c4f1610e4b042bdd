"""Which layers become forgeline's own matrix kernels, what is fused into them, and that engines made of them compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import openvino as ov
import pytest
from cpu_engines import STEPS, Built, Sequences, build, prompt

from builder.targets.openvino_matmul import lower_matmuls
from plugins.decoder_layers.openvino import LAYERS_OP
from plugins.paged_attention import openvino as paged
from plugins.quantized_matmul import openvino as quantized
from plugins.quantized_matmul.openvino import LOWERED_OP
from runtime.executors.reference import ReferenceExecutor

TYPES = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "uint4": ir.DataType.UINT4}


class Net:
    """A graph on x [1, t, width], layer by layer."""

    def __init__(self, width: int = 64) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="net")
        self.model = ir.Model(self.graph, ir_version=11)
        self.rng = np.random.default_rng(0)
        self.x = self.input("x", width)

    def input(self, name: str, width: int) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape([1, "t", width]), type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.inputs.append(value)
        return value

    def constant(self, array: np.ndarray | ir.Tensor) -> ir.Value:
        tensor = array if isinstance(array, ir.Tensor) else ir.Tensor(array)
        tensor.name = f"c{len(self.graph.initializers)}"
        value = ir.Value(name=tensor.name, const_value=tensor, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype))
        self.graph.register_initializer(value)
        return value

    def ops(
        self, op_type: str, inputs: Sequence[ir.Value | None], widths: Sequence[int], **attributes: Any
    ) -> Sequence[ir.Value]:
        node = ir.node(op_type, inputs, attributes=attributes, num_outputs=len(widths))
        self.graph.append(node)
        for value, width in zip(node.outputs, widths, strict=True):
            value.name = f"{op_type}.{len(self.graph)}.{len(value.name or '')}.{width}.{value.index()}"
            value.shape, value.type = ir.Shape([1, "t", width]), ir.TensorType(ir.DataType.FLOAT)
        return node.outputs

    def op(self, op_type: str, inputs: Sequence[ir.Value | None], width: int, **attributes: Any) -> ir.Value:
        return self.ops(op_type, inputs, [width], **attributes)[0]

    def dense(self, outputs: int, width: int, dtype: str = "int8", block: int = 0, zeros: bool = False) -> ir.Value:
        """A weight as MatMul reads it, [width, outputs]."""
        low, high, kind = {"int8": (-127, 128, np.int8), "int4": (-8, 8, ml_dtypes.int4), "uint4": (0, 16, ml_dtypes.uint4)}[
            dtype
        ]
        q = ir.Tensor(self.rng.integers(low, high, (outputs, width)).astype(kind), dtype=TYPES[dtype])
        groups = (outputs, width // block) if block else (outputs,)
        scale = (self.rng.uniform(0.5, 1.5, groups) / high / 8).astype(np.float32)
        sources = [self.constant(q), self.constant(scale)]
        if zeros:
            sources.append(self.constant(ir.Tensor(np.full(groups, 1).astype(kind), dtype=TYPES[dtype])))
        blocks = {"axis": 1, "block_size": block} if block else {"axis": 0}
        weight = self.op("DequantizeLinear", sources, width, **blocks)
        return self.op("Transpose", [weight], outputs, perm=[1, 0])

    def layer(self, x: ir.Value, outputs: int, **how: Any) -> ir.Value:
        assert x.shape is not None
        return self.op("MatMul", [x, self.dense(outputs, int(x.shape[2]), **how)], outputs)  # type: ignore[arg-type]

    def halves(self, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        return self.ops("Split", [x, self.constant(np.array(sizes, np.int64))], sizes, axis=-1)

    def product(self, gate: ir.Value, up: ir.Value, width: int) -> ir.Value:
        return self.op("Mul", [self.op("Mul", [gate, self.op("Sigmoid", [gate], width)], width), up], width)

    def norm(self, x: ir.Value, width: int, **attributes: Any) -> ir.Value:
        weight = self.constant(self.rng.uniform(0.5, 1.5, width).astype(np.float32))
        return self.op("RMSNormalization", [x, weight], width, **attributes)

    def lower(self, *outputs: ir.Value, input_group: int = 32) -> list[tuple[int, int, int]]:
        """(gated, normed, added) of each layer taken."""
        self.graph.outputs.extend(self.op("Identity", [value], int(value.shape[2])) for value in outputs)  # type: ignore
        taken = lower_matmuls(self.model, input_group)
        nodes = [node for node in self.graph if node.op_type == LOWERED_OP]
        assert taken == len(nodes)
        return [tuple(node.attributes.get_int(name, 0) for name in ("gated", "normed", "added")) for node in nodes]  # type: ignore[misc]

    def kinds(self) -> list[str]:
        return [node.op_type for node in self.graph if node.op_type != "Identity"]


PLAIN, GATED, NORMED, ADDED = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)


@pytest.mark.parametrize(
    ("how", "width", "input_group", "group"),
    [
        ({}, 96, 64, 64),  # a scale per row: the largest group of sums that the inputs' divides
        ({}, 160, 128, 128),
        ({"dtype": "int4", "block": 32}, 64, 32, 32),
        ({"dtype": "int4", "block": 32}, 128, 128, 32),  # inputs in larger groups than weights
        ({"dtype": "int4", "block": 128}, 256, 64, 64),  # and in smaller ones
        ({"dtype": "int4", "block": 96}, 96, 96, 32),
        ({"dtype": "uint4", "block": 32, "zeros": True}, 64, 32, 32),
    ],
)
def test_layers_that_are_taken(how: dict[str, Any], width: int, input_group: int, group: int) -> None:
    net = Net(width)
    y = net.layer(net.x, 48, **how)
    name = y.name
    assert net.lower(y, input_group=input_group) == [PLAIN]
    node = net.graph[0]
    found = {key: node.attributes.get_int(key, -1) for key in ("outputs", "width", "bits", "group", "input_group")}
    bits = 4 if how.get("dtype", "").endswith("int4") else 8
    assert found == {"outputs": 48, "width": width, "bits": bits, "group": group, "input_group": input_group}
    assert (node.name, node.outputs[0].name) == (name, name)  # OpenVINO reports layers by name


@pytest.mark.parametrize(
    ("how", "width", "input_group"),
    [
        ({"dtype": "int4", "block": 32, "zeros": True}, 64, 32),
        ({"zeros": True}, 64, 32),
        ({"dtype": "uint4", "block": 32}, 64, 32),
        ({}, 48, 32),  # no multiple of 32
        ({"dtype": "int4", "block": 16}, 64, 32),
        ({"block": 64}, 64, 64),  # 8 bits have a scale per row
        ({}, 64, 16),
    ],
)
def test_layers_that_stay_with_openvino(how: dict[str, Any], width: int, input_group: int) -> None:
    net = Net(width)
    assert net.lower(net.layer(net.x, 64, **how), input_group=input_group) == []
    assert net.kinds() == ["DequantizeLinear", "Transpose", "MatMul"]


def test_weights_that_are_no_quantized_matrix_stay() -> None:
    net = Net()
    floats = net.op("MatMul", [net.x, net.constant(np.ones((64, 32), np.float32))], 32)
    experts = net.constant(net.rng.integers(-8, 8, (2, 64, 64)).astype(np.int8))
    scales = net.constant(np.ones((2, 64, 1), np.float32))
    dequantized = net.op("DequantizeLinear", [experts, scales], 64, axis=2, block_size=64)
    product = net.op("MatMul", [net.x, net.op("Transpose", [dequantized], 64, perm=[0, 2, 1])], 64)
    assert net.lower(floats, product) == []


def test_a_weight_read_twice_serves_both() -> None:
    """Two layers on one matrix; and a tied embedding, which goes on looking up its rows."""
    net = Net()
    weight = net.dense(64, 64)
    dequantize = weight.producer().inputs[0].producer()  # type: ignore[union-attr]
    assert dequantize is not None
    rows = net.op("Gather", [dequantize.inputs[0], net.constant(np.arange(3, dtype=np.int64))], 64)
    first = net.op("MatMul", [net.x, weight], 64)
    second = net.op("MatMul", [first, weight], 64)
    assert net.lower(second, rows) == [PLAIN, PLAIN]
    assert sorted(net.kinds()) == ["Gather", LOWERED_OP, LOWERED_OP]


@pytest.mark.parametrize("by_number", [False, True])
def test_a_gated_layer_is_one_node(by_number: bool) -> None:
    net = Net()
    y = net.layer(net.x, 96)
    gate, up = net.ops("Split", [y], [48, 48], axis=2, num_outputs=2) if by_number else net.halves(y, [48, 48])
    product = net.product(gate, up, 48)
    name = product.name
    assert net.lower(product) == [GATED]
    assert net.kinds() == [LOWERED_OP]
    assert net.graph[0].outputs[0].name == name
    assert net.graph[0].attributes.get_int("outputs", 0) == 96


def _unequal(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [95, 1])
    return [net.product(gate, up, 95)]


def _three(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up, rest = net.halves(y, [32, 32, 32])
    return [net.product(gate, up, 32), rest]


def _exchanged(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    return [net.product(up, gate, 48)]


def _crossed(net: Net, y: ir.Value) -> list[ir.Value]:
    """gate * sigmoid(up) * up"""
    gate, up = net.halves(y, [48, 48])
    return [net.op("Mul", [net.op("Mul", [gate, net.op("Sigmoid", [up], 48)], 48), up], 48)]


def _squared(net: Net, y: ir.Value) -> list[ir.Value]:
    """silu(gate) * gate"""
    gate, up = net.halves(y, [48, 48])
    return [net.product(gate, gate, 48), net.op("Neg", [up], 48)]


def _gate_read(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    return [net.product(gate, up, 48), net.op("Neg", [gate], 48)]


def _gate_multiplied(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    return [net.op("Mul", [gate, net.constant(np.ones(48, np.float32))], 48), net.product(gate, up, 48)]


def _up_read(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    return [net.product(gate, up, 48), net.op("Neg", [up], 48)]


def _silu_read(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    silu = net.op("Mul", [gate, net.op("Sigmoid", [gate], 48)], 48)
    return [net.op("Mul", [silu, up], 48), net.op("Neg", [silu], 48)]


def _whole_read(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.halves(y, [48, 48])
    return [net.product(gate, up, 48), net.op("Neg", [y], 96)]


def _other_axis(net: Net, y: ir.Value) -> list[ir.Value]:
    gate, up = net.ops("Split", [y, net.constant(np.array([1, 1], np.int64))], [96, 96], axis=1)
    return [net.product(gate, up, 96)]


@pytest.mark.parametrize(
    "behind",
    [
        _unequal, _three, _exchanged, _crossed, _squared, _gate_read, _gate_multiplied, _up_read, _silu_read, _whole_read,
        _other_axis,
    ],
)  # fmt: skip
def test_what_only_looks_like_a_gate_stays(behind: Callable[[Net, ir.Value], list[ir.Value]]) -> None:
    net = Net()
    outputs = behind(net, net.layer(net.x, 96))
    assert net.lower(*outputs) == [PLAIN]
    assert net.kinds()[0] == LOWERED_OP and {"Split", "Sigmoid", "Mul"} <= set(net.kinds())


def test_a_bias_stays_behind_the_layer() -> None:
    net = Net()
    y = net.op("Add", [net.layer(net.x, 48), net.constant(np.ones(48, np.float32))], 48)
    assert net.lower(y) == [PLAIN]
    assert net.kinds() == [LOWERED_OP, "Add"]


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_before_and_a_residual_behind_go_in(first: bool) -> None:
    net = Net()
    residual = net.op("Neg", [net.x], 64)
    y = net.layer(net.norm(net.x, 64, axis=-1, epsilon=0.125), 64)
    total = net.op("Add", [residual, y] if first else [y, residual], 64)
    name = total.name
    assert net.lower(total) == [(0, 1, 1)]
    assert net.kinds() == ["Neg", LOWERED_OP]
    node = net.graph[1]
    assert node.attributes.get_float("epsilon", 0.0) == 0.125
    assert node.inputs[0] is net.x and node.inputs[4] is residual
    assert node.outputs[0].name == name


def test_a_norm_with_other_readers_axes_or_weights_stays() -> None:
    net = Net()
    shared = net.norm(net.x, 64, axis=-1)
    wide = net.op("RMSNormalization", [net.x, net.constant(np.ones((1, 64), np.float32))], 64, axis=1)
    one = net.op("RMSNormalization", [net.x, net.constant(np.ones(1, np.float32))], 64, axis=-1)
    outputs = [net.layer(shared, 64), net.layer(shared, 32), net.layer(wide, 48), net.layer(one, 96)]
    assert net.lower(*outputs) == [PLAIN] * 4
    assert net.kinds().count("RMSNormalization") == 3


def test_sums_that_are_no_residual_stay() -> None:
    net = Net()
    twice = net.layer(net.x, 64)
    read = net.layer(net.x, 64)
    row = net.op("ReduceMax", [net.x, net.constant(np.array([1], np.int64))], 64)
    row.shape = ir.Shape([1, 1, 64])
    outputs = [
        net.op("Add", [twice, twice], 64),
        net.op("Add", [read, net.op("Neg", [net.x], 64)], 64),
        net.op("Neg", [read], 64),
        net.op("Add", [net.layer(net.x, 64), row], 64),
    ]
    assert net.lower(*outputs) == [PLAIN] * 3
    assert net.kinds().count("Add") == 3


def test_a_sum_of_two_layers_goes_into_one_of_them() -> None:
    net = Net()
    assert net.lower(net.op("Add", [net.layer(net.x, 64), net.layer(net.x, 64)], 64)) in ([PLAIN, ADDED], [ADDED, PLAIN])
    assert net.kinds() == [LOWERED_OP] * 2


def compiled(net: Net, directory: Path, input_group: int, library: Path | None, num_threads: int = 1) -> ov.CompiledModel:
    path = directory / "model.onnx"
    ir.save(net.model, path)
    core = ov.Core()
    if library is not None:
        quantized.add_to(core, library)
    options = paged.compile_options(
        key_dtype="f32", value_dtype="f32", head_dims=[], dynamic_quantization_group_size=input_group, num_threads=num_threads
    )
    return core.compile_model(core.read_model(path), "CPU", options)


def block(**first: Any) -> tuple[Net, ir.Value]:
    """A gated MLP with its norm and its residual, then a head with another norm. `first`: how its first layer is quantized."""
    net = Net(160)
    gate, up = net.halves(net.layer(net.norm(net.x, 160, axis=-1, epsilon=0.01), 192, block=32, **first), [96, 96])
    hidden = net.op("Add", [net.op("Neg", [net.x], 160), net.layer(net.product(gate, up, 96), 160)], 160)
    return net, net.layer(net.norm(hidden, 160, axis=-1), 50)


@pytest.mark.parametrize("first", [{"dtype": "int4"}, {"dtype": "uint4", "zeros": True}])
def test_the_lowered_graph_computes_what_openvino_computed(first: dict[str, Any], tmp_path: Path, cpu_kernels: Path) -> None:
    net, y = block(**first)
    net.graph.outputs.append(net.op("Identity", [y], 50))
    x = np.random.default_rng(1).standard_normal((1, 21, 160)).astype(np.float32)
    expected = compiled(net, tmp_path, 32, None)(x)[0]
    exact = compiled(net, tmp_path, 0, None)(x)[0]
    assert net.lower() == [(1, 1, 0), (0, 0, 1), (0, 1, 0)]
    model = compiled(net, tmp_path, 32, cpu_kernels)
    found = model(x)[0]
    off = np.abs(found - expected).max(-1)[0] / np.abs(expected).max()
    assert np.median(off) < 1e-5 and off.max() < 0.02  # a sum in another order turns a code now and then
    assert np.median(np.abs(exact - expected).max(-1)[0] / np.abs(expected).max()) > 1e-3  # rounding shows
    kinds = [op.get_rt_info()["layerType"].astype(str) for op in model.get_runtime_model().get_ops()]
    assert kinds.count("Reference") == 3 and "FullyConnected" not in kinds
    for other in (compiled(net, tmp_path, 32, cpu_kernels, num_threads=2), model):
        assert np.array_equal(other(x)[0], found)
        assert np.array_equal(other(x[:, 20:])[0], found[:, 20:])


MATRICES = {"mixtral": 15}
LAYERS = {"llama_tied": 2, "qwen2": 2, "qwen3": 2, "phi3": 2}  # as one node


def off_by(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> np.ndarray:
    """Of each token, the largest error of its logits."""
    return np.concatenate([np.abs(found[name] - expected[name]).max(-1) / np.abs(expected[name]).max() for name in expected])


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama_tied", "int8"), ("llama_tied", "int4"), ("gemma2", "int8"), ("qwen2", "int4"), ("qwen3", "int8"), ("opt", "int8"),
        ("phi3", "int8"), ("cohere", "int8"), ("mixtral", "int4"),
    ],
)  # fmt: skip
def test_engines_with_either_kernels_and_the_reference_agree(
    name: str, precision: str, exported: Callable[[str], Any], tmp_path: Path, cpu_kernels: Path
) -> None:
    """Where sums differ in their last bits a code turns in one of them and not in the other: 3 % of a logit, in few tokens."""
    own = build(exported(name), tmp_path / "own", precision, "f32", kernels=cpu_kernels)
    other = build(exported(name), tmp_path / "other", precision, "f32")
    assert own.plan.plan["kernels"] == "plan/kernels.so" and "kernels" not in other.plan.plan
    whose = "both" if name in ("gemma2", "mixtral") else "forgeline"  # unfused attention, a router: matrices of OpenVINO's
    assert (own.plan.details["kernels"], other.plan.details["kernels"]) == (whose, "openvino")
    assert (own.plan.details["rows_independent"], other.plan.details["rows_independent"]) == (whose == "forgeline", False)
    graph = ir.load(own.directory / own.plan.plan["model"]).graph
    whole = sum(len(node.attributes.get_floats("scales", ())) for node in graph if node.op_type == LAYERS_OP)
    assert whole == LAYERS.get(name, 0)
    assert sum(node.op_type == LOWERED_OP for node in graph) == MATRICES.get(name, 9) - 4 * whole
    assert not [kind for kind in own.plan.runtime_types if kind in ("FullyConnected:i8", "FullyConnected:i4")]
    assert own.plan.activations == other.plan.activations == "int8"
    canonical = own.directory / own.plan.plan["canonical"]
    reference = Sequences(ReferenceExecutor(canonical, num_blocks=16, num_threads=1)).run(STEPS)
    logits = Sequences(own.executor()).run(STEPS)
    found = off_by(logits, Sequences(other.executor()).run(STEPS))
    assert np.median(found) < 1e-5 and found.max() < 0.05
    found = off_by(logits, reference)
    # The graph does not show that the kernels also round what flows between the two layers of an expert.
    assert np.median(found) < (0.02 if name == "mixtral" else 1e-5) and found.max() < 0.05


@pytest.fixture(scope="module")
def llama(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory, cpu_kernels: Path) -> Built:
    return build(exported("llama"), tmp_path_factory.mktemp("llama"), "int8", kernels=cpu_kernels)


def test_logits_do_not_depend_on_what_shares_the_step(llama: Built) -> None:
    """To the last bit: in company and alone, where a step of one row gets a neighbour."""
    together = Sequences(llama.executor(num_blocks=32))
    names = [f"{n}" for n in range(14)]
    prompts = {name: prompt(3 + n, n) for n, name in enumerate(names)}
    found = [together.step(prompts, rows=(np.cumsum([len(each) for each in prompts.values()]) - 1).tolist())[0]]
    found += [together.step({name: [5 + n + step] for n, name in enumerate(names)})[0] for step in range(3)]
    for n in (0, 6, 13):
        alone = Sequences(llama.executor())
        steps = [prompts[names[n]], *([5 + n + step] for step in range(3))]
        for expected, tokens in zip(found, steps, strict=True):
            assert np.array_equal(alone.step({"a": tokens})[0][-1], expected[n])
