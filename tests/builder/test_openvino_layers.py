"""Which decoder layers become one operation, what breaks their chain, and that engines made of it compute what nodes compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_engines import STEPS, Built, Sequences, build, prompt

from builder.targets import openvino_lower
from builder.targets.openvino_build import NodeBuilder
from builder.targets.openvino_layers import lower_layers
from plugins.decoder_layers.openvino import LAYERS_OP
from plugins.paged_attention.op import PAGED_ATTENTION
from plugins.paged_attention.openvino import LOWERED_OP as ATTENTION_OP
from plugins.quantized_matmul.openvino import LOWERED_OP as QUANTIZED_OP
from runtime.executors.openvino import OpenVINOExecutor
from runtime.executors.reference import ReferenceExecutor

Change = Callable[[ir.Graph], None]
Maker = Callable[..., Built]
LLAMA = "llama_wide_heads"  # four heads of 64, so that values of 4 bits can be stored


def graph_of(built: Built) -> ir.Graph:
    return ir.load(built.directory / built.plan.plan["model"]).graph


def chains(built: Built) -> list[int]:
    """Layers of each node."""
    return [len(node.attributes.get_floats("scales", ())) for node in graph_of(built) if node.op_type == LAYERS_OP]


def left(built: Built) -> tuple[int, int]:
    """Matrices and attention that are nodes of their own; the head is one."""
    kinds = [node.op_type for node in graph_of(built)]
    return kinds.count(QUANTIZED_OP), kinds.count(ATTENTION_OP)


def reference(built: Built) -> ReferenceExecutor:
    return ReferenceExecutor(built.directory / built.plan.plan["canonical"], num_blocks=16, num_threads=1)


def off_by(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> np.ndarray:
    """Of each token, the largest error of its logits."""
    return np.concatenate([np.abs(found[name] - expected[name]).max(-1) / np.abs(expected[name]).max() for name in expected])


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Where sums differ in their last bits, a code turns now and then: 3 % of a logit, in few tokens."""
    off = off_by(found, expected)
    assert np.median(off) < 1e-5 and off.max() < 0.05


@pytest.fixture(scope="module")
def make(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory, cpu_kernels: Path) -> Maker:
    """An engine. `whole`: its layers may be one operation; `change`: of the graph before they become that."""
    made: dict[tuple[Any, ...], Built] = {}

    def get(name: str, precision: str = "int8", kv: str = "f32", whole: bool = True, change: Change | None = None) -> Built:
        def lower(graph: ir.Graph, metadata: Any) -> int:
            if change is not None:
                change(graph)
            return lower_layers(graph, metadata) if whole else 0

        key = (name, precision, kv, whole, change)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(openvino_lower, "lower_layers", lower)
                made[key] = build(exported(name), tmp_path_factory.mktemp("engine"), precision, kv, kernels=cpu_kernels)
        return made[key]

    return get


@pytest.mark.parametrize(
    ("name", "layers", "matrices", "attention"),
    [
        (LLAMA, [2], 1, 0),
        ("qwen2", [2], 1, 0),  # a bias of q, k and v; a window in the second layer only
        ("mistral", [2], 1, 0),
        ("qwen3", [2], 1, 0),  # norms of heads
        ("phi3", [2], 1, 0),  # q, k and v are slices
        ("smollm3", [1], 5, 1),  # the second has no rotary embedding
    ],
)
def test_layers_that_are_taken(make: Maker, name: str, layers: list[int], matrices: int, attention: int) -> None:
    built = make(name)
    assert chains(built) == layers
    assert left(built) == (matrices, attention)
    assert left(make(name, whole=False)) == (9, 2)
    assert built.plan.details["rows_independent"] and built.plan.kv_cache == make(name, whole=False).plan.kv_cache
    found = Sequences(built.executor()).run(STEPS)
    assert_close(found, Sequences(make(name, whole=False).executor()).run(STEPS))
    assert_close(found, Sequences(reference(built)).run(STEPS))


@pytest.mark.parametrize(
    ("name", "precision", "kv"),
    [
        (LLAMA, "int4", "f32"),
        (LLAMA, "int8", "u8"),
        (LLAMA, "int4", "u8:u4"),
        ("qwen2", "int4", "u8"),
        ("mistral", "int8", "f16"),
    ],
)
def test_other_weights_and_pools(make: Maker, name: str, precision: str, kv: str) -> None:
    built = make(name, precision, kv)
    assert chains(built) == [2]
    assert_close(Sequences(built.executor()).run(STEPS), Sequences(make(name, precision, kv, whole=False).executor()).run(STEPS))
    if kv == "f32":
        assert_close(Sequences(built.executor()).run(STEPS), Sequences(reference(built)).run(STEPS))


class Layers:
    """Two layers of llama, as nodes that `lower_layers` is about to look at, and ways to add others."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.matrices = [node for node in graph if node.op_type == QUANTIZED_OP]  # four of each layer, and the head
        self.attention = [node for node in graph if node.op_type == PAGED_ATTENTION]
        self.turns = [node for node in graph if node.op_type == "RotaryEmbedding"]
        assert (len(self.matrices), len(self.attention), len(self.turns)) == (9, 2, 4)

    def out(self, matrix: int) -> ir.Value:
        return self.matrices[matrix].outputs[0]

    def behind(self, value: ir.Value, op_type: str, *others: ir.Value | np.ndarray | None, readers: bool = False) -> ir.Value:
        """op(value, others) right behind it, of its shape; with `readers`, in its place."""
        node = value.producer()
        assert node is not None
        nodes = list(self.graph)
        build = NodeBuilder(self.graph, anchor=nodes[nodes.index(node) + 1])
        inputs = [build.array("other", each) if isinstance(each, np.ndarray) else each for each in others]
        uses = [(use.node, use.idx) for use in value.uses()]
        new = build.op(op_type, [value, *inputs])
        new.shape, new.type = value.shape, value.type
        for reader, index in uses if readers else ():
            reader.replace_input_with(index, new)
        return new

    def into_head(self, value: ir.Value, picked: bool) -> None:
        """Adds [1, T, hidden], or its rows that have logits, to what the head reads."""
        head = self.matrices[8]
        build = NodeBuilder(self.graph, anchor=head)
        if not picked:
            rows = next(each for each in self.graph.inputs if each.name == "logits_indices")
            value = build.op("Gather", [value, build.op("Reshape", [rows, build.constant([-1])])], {"axis": 1})
        total = build.op("Add", [head.inputs[0], value])
        total.shape, total.type = head.inputs[0].shape, head.inputs[0].type  # type: ignore[union-attr]
        head.replace_input_with(0, total)


def nothing(graph: ir.Graph) -> None:
    Layers(graph)


def result_read(graph: ir.Graph) -> None:
    """As drafting heads read it."""
    net = Layers(graph)
    net.into_head(net.out(3), picked=False)


def result_is_an_output(graph: ir.Graph) -> None:
    graph.outputs.append(Layers(graph).out(3))


def result_scaled(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.behind(net.out(3), "Mul", np.full(1, 0.5, np.float32), readers=True)


def residual_of_another(graph: ir.Graph) -> None:
    net = Layers(graph)
    x = net.matrices[0].inputs[0]
    assert x is not None
    net.matrices[1].replace_input_with(len(net.matrices[1].inputs) - 1, net.behind(x, "Neg"))


def residual_rows_of_another(graph: ir.Graph) -> None:
    """The second layer's, whose rows are picked: by others than attention's."""
    net = Layers(graph)
    gather = net.matrices[5].inputs[-1].producer()  # type: ignore[union-attr]
    assert gather is not None and gather.op_type == "Gather" and gather.inputs[1] is not None
    gather.replace_input_with(1, net.behind(gather.inputs[1], "Abs"))


def residual_rows_read(graph: ir.Graph) -> None:
    net = Layers(graph)
    picked = net.matrices[5].inputs[-1]
    assert picked is not None
    net.into_head(picked, picked=True)


def middle_read(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.into_head(net.out(1), picked=False)


def middle_is_an_output(graph: ir.Graph) -> None:
    graph.outputs.append(Layers(graph).out(1))


def other_residual_of_mlp(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.matrices[3].replace_input_with(len(net.matrices[3].inputs) - 1, net.matrices[0].inputs[0])


def product_read(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.into_head(net.behind(net.out(2), "Slice", *(np.array([n], np.int64) for n in (0, 64, 2))), picked=False)


def other_angles(graph: ir.Graph) -> None:
    """In the second layer."""
    net = Layers(graph)
    cos = net.turns[2].inputs[1]
    assert cos is not None and cos is net.turns[0].inputs[1]
    new = net.behind(cos, "Neg")
    for turn in net.turns[2:]:
        turn.replace_input_with(1, new)


def angles_of_k_alone(graph: ir.Graph) -> None:
    net = Layers(graph)
    assert net.turns[3].inputs[1] is not None
    net.turns[3].replace_input_with(1, net.behind(net.turns[3].inputs[1], "Neg"))


def with_bias(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.behind(net.out(0), "Add", np.linspace(-2, 2, 512, dtype=np.float32), readers=True)


def with_one_number(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.behind(net.out(4), "Add", np.full(1, 0.5, np.float32), readers=True)


def with_computed_bias(graph: ir.Graph) -> None:
    net = Layers(graph)
    net.behind(net.out(0), "Add", net.out(0), readers=True)


def bias_behind_its_reader(graph: ir.Graph) -> None:
    """The projection without its bias is read as well."""
    net = Layers(graph)
    plain = net.behind(net.out(0), "Slice", *(np.array([n], np.int64) for n in (0, 64, 2)))
    reader = plain.producer()
    net.behind(net.out(0), "Add", np.linspace(-2, 2, 512, dtype=np.float32), readers=True)
    assert reader is not None and reader.inputs[0] is not None
    reader.replace_input_with(0, net.out(0))
    net.into_head(plain, picked=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (nothing, [2]),
        (result_read, [1, 1]),
        (result_is_an_output, [1]),
        (other_angles, [1, 1]),
        (with_bias, [2]),
        (result_scaled, [1, 1]),
        (residual_of_another, [1]),
        (residual_rows_of_another, [1]),
        (residual_rows_read, [1]),
        (middle_read, [1]),
        (middle_is_an_output, [1]),
        (other_residual_of_mlp, [1]),
        (product_read, [1]),
        (angles_of_k_alone, [1]),
        (with_one_number, [1]),
        (with_computed_bias, [1]),
        (bias_behind_its_reader, [1]),
    ],
)
def test_what_breaks_a_chain(make: Maker, change: Change, expected: list[int]) -> None:
    built, single = (make(LLAMA, whole=whole, change=change) for whole in (True, False))
    assert chains(built) == expected and chains(single) == []
    assert left(built) == (9 - 4 * sum(expected), 2 - sum(expected))
    found = Sequences(built.executor()).run(STEPS)
    assert_close(found, Sequences(single.executor()).run(STEPS))
    if change not in (nothing, result_is_an_output, middle_is_an_output, residual_rows_of_another):  # which change no number
        plain = Sequences(make(LLAMA, change=nothing).executor()).run(STEPS)
        assert np.median(off_by(found, plain)) > 1e-3


@pytest.mark.parametrize("rows", [[0], [27], [6], [27, 3, 3, 11], [19, 26], list(range(28)) * 2, list(range(1, 28)), []], ids=len)
def test_rows_that_have_logits(make: Maker, rows: list[int]) -> None:
    """Of a step of 20, 7 and 1 tokens: the bits of a step in which all have. Those of one engine, and of other rows earlier."""
    work = {"a": prompt(20, 1), "b": prompt(7, 2), "c": prompt(1, 3)}
    after = {"b": [5], "c": [6, 7], "a": [8]}
    for name in (LLAMA, "smollm3"):
        executor = make(name).executor()
        every = Sequences(executor)
        expected = every.step(work)[0], every.step(after)[0]
        some = Sequences(executor)
        assert np.array_equal(some.step(work, rows=rows)[0], expected[0][rows])
        assert np.array_equal(some.step(after, rows=[3, 1])[0], expected[1][[3, 1]])


def with_threads(built: Built, num_threads: int, num_blocks: int = 48) -> OpenVINOExecutor:
    return OpenVINOExecutor(built.directory, built.manifest, num_blocks, num_threads)


PARTS = [(0, 1), (1, 34), (34, 50), (50, 90), (90, 91), (91, 92)]  # of a prompt of 92 tokens


@pytest.mark.parametrize(
    ("name", "precision", "kv"), [(LLAMA, "int8", "u8"), ("qwen2", "int4", "u8"), ("mistral", "int8", "f16")]
)
def test_bits_depend_on_nothing_else_in_the_step(make: Maker, name: str, precision: str, kv: str) -> None:
    """A prompt whole; in parts, beside others; with other numbers of threads."""
    tokens = prompt(92, 7)
    built = make(name, precision, kv)
    whole, _ = Sequences(with_threads(built, 1)).step({"a": tokens})
    for num_threads in (1, 2, 3):
        executor = with_threads(built, num_threads)
        assert np.array_equal(Sequences(executor).step({"a": tokens})[0], whole)
        shared = Sequences(executor)
        for step, (begin, end) in enumerate(PARTS):
            work = {f"{n}": prompt(1 + (step * 13 + n * 7) % 30, n) for n in range(step)}
            first = sum(map(len, work.values()))
            found, _ = shared.step({**work, "a": tokens[begin:end]}, rows=range(first, first + end - begin))
            assert np.array_equal(found, whole[begin:end]), (num_threads, begin)


def rounds(executor: OpenVINOExecutor, count: int) -> list[list[np.ndarray]]:
    """The same prompts and decode steps again and again, on pools that hold garbage."""
    prompts = {f"{n}": prompt(3 + 5 * n, n) for n in range(9)}
    found = []
    for _ in range(count):
        for pool in executor._cache.pools.values():
            pool.view(np.uint8)[...] = 0x7F
        sequences = Sequences(executor)
        ends = (np.cumsum([len(each) for each in prompts.values()]) - 1).tolist()
        logits = [sequences.step(prompts, rows=ends)[0]]
        logits += [sequences.step({name: [3 + step + int(name)] for name in prompts})[0] for step in range(3)]
        logits += [sequences.step({"4": [9]})[0]]
        found.append(logits)
    return found


def assert_same(found: list[list[np.ndarray]], expected: list[np.ndarray]) -> None:
    for logits in found:
        assert [np.array_equal(*pair) for pair in zip(logits, expected, strict=True)] == [True] * len(expected)


def test_steps_repeat_to_the_last_bit(make: Maker) -> None:
    """What a missing wait between two threads would change."""
    built = make(LLAMA, "int8", "u8")
    (expected,) = rounds(with_threads(built, 1), 1)
    assert_same(rounds(with_threads(built, 2), 20), expected)


def test_engines_run_at_the_same_time(make: Maker) -> None:
    """In threads of one process: of several models, and one of them twice."""
    builts = [make(LLAMA, "int8", "u8"), make("qwen2", "int4", "u8"), make("mistral", "int8", "f16"), make(LLAMA, "int8", "u8")]
    alone = [rounds(with_threads(built, 1), 1)[0] for built in builts]
    executors = [with_threads(built, 2) for built in builts]
    found: dict[int, list[list[np.ndarray]]] = {}
    start = threading.Barrier(len(executors))

    def work(index: int) -> None:
        start.wait()
        found[index] = rounds(executors[index], 20)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(executors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert_same(found[index], expected)
