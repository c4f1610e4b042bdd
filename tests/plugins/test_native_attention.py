"""The CPU's paged attention against the numpy reference, against itself in other steps, and as an operation of OpenVINO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops
from openvino.utils.node_factory import NodeFactory

from plugins.paged_attention import reference
from plugins.paged_attention.native.attention import BLOCK_SIZE, KV_PAIRS, NATIVE_OP, Attention, Library

# f32 sums in another order; 16 bits are stored exactly alike. With 8 bits queries and weights are rounded to 16 bits, which moves
# a score of these inputs (|q| up to 8) by up to 5e-4.
TOLERANCE = {"f32": 2e-5, "f16": 2e-5, "bf16": 2e-5, "u8": 1e-3}
SPARE = 2  # blocks that belong to nobody


@pytest.fixture(scope="module")
def library(cpu_kernels: Path) -> Library:
    return Library(cpu_kernels)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rounded(x: np.ndarray, levels: int, group: int) -> np.ndarray:
    """As if stored: `group` values share a scale and a zero point."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    low = parts.min(-1, keepdims=True)
    scale = ((parts.max(-1, keepdims=True) - low) / np.float32(levels)).astype(np.float32)
    zero = -low / scale
    return ((np.clip(np.rint(parts / scale + zero), 0, levels) - zero) * scale).reshape(x.shape)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in ("u8", "u4"):
        return rounded(x, 255, x.shape[-1]) if dtype == "u8" else rounded(x, 15, 32)
    return x if dtype == "f32" else reference.quantize(x, {"f16": "fp16", "bf16": "bf16"}[dtype], np.ones(1)).astype(np.float32)


@dataclass
class Sequences:
    """Whole sequences, of which a step computes some tokens; pools hold garbage until something is stored."""

    layer: Attention
    lengths: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        heads, kv_heads, dim = self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim
        self.q = [2 * rng.standard_normal((n, heads * dim), np.float32) for n in self.lengths]
        self.k = [2 * rng.standard_normal((n, kv_heads * dim), np.float32) + 0.3 for n in self.lengths]
        self.v = [rng.standard_normal((n, kv_heads * dim), np.float32) for n in self.lengths]
        self.width = -(-max(self.lengths) // BLOCK_SIZE)
        blocks = rng.permutation(len(self.lengths) * self.width + SPARE).astype(np.int32)
        self.table = blocks[: len(self.lengths) * self.width].reshape(-1, self.width)
        self.new_pools()

    def new_pools(self) -> None:
        self.pools = self.layer.pools(self.table.size + SPARE)
        for pool in self.pools:
            pool[...] = 0xFF  # NaN as float of any width

    def step(self, library: Library, *parts: tuple[int, int, int]) -> list[np.ndarray]:
        """parts: (sequence, first token, end) → a result each."""
        q, k, v = (np.concatenate([of[s][begin:end] for s, begin, end in parts]) for of in (self.q, self.k, self.v))
        begins = ints(0, *np.cumsum([end - begin for _, begin, end in parts]))
        past = ints(*(begin for _, begin, _ in parts))
        out = library.attend(
            self.layer, q, k, v, *self.pools, past, begins, self.table.ravel(), ints(*(s * self.width for s, _, _ in parts))
        )
        return np.split(out, begins[1:-1])

    def expected(self, sequence: int, begin: int, end: int) -> np.ndarray:
        layer = self.layer
        pools = []
        for x, dtype in ((self.k, layer.key_dtype), (self.v, layer.value_dtype)):
            whole = np.zeros((self.width * BLOCK_SIZE, layer.num_kv_heads, layer.head_dim), np.float32)
            whole[: len(x[sequence])] = stored(x[sequence].reshape(-1, *whole.shape[1:]), dtype)
            pools.append(whole.reshape(self.width, BLOCK_SIZE, *whole.shape[1:]))
        q = self.q[sequence][begin:end].reshape(-1, layer.num_heads, layer.head_dim)
        table = np.arange(self.width, dtype=np.int32)[None]
        rows = {"scale": layer.scale, "sliding_window": layer.sliding_window}
        return reference.attention(q, *pools, table, ints(0, end - begin), ints(end), **rows).reshape(end - begin, -1)


def layer_of(group: int = 3, kv_heads: int = 2, dim: int = 64, kv: tuple[str, str] = ("u8", "u8"), window: int = 0) -> Attention:
    return Attention(group * kv_heads, kv_heads, dim, *kv, scale=1 / math.sqrt(dim), sliding_window=window)


CASES = [  # heads per head of keys, their number, D, window
    (1, 3, 64, 0), (2, 2, 32, 7), (3, 3, 64, 40), (4, 2, 128, 0), (7, 1, 96, 100), (8, 1, 64, 33), (30, 1, 32, 0),
]  # fmt: skip


@pytest.mark.parametrize("kv", KV_PAIRS, ids=":".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ragged_step_equals_the_reference(library, kv, case):
    group, kv_heads, dim, window = case
    sequences = Sequences(layer_of(group, kv_heads, dim, kv, window), [200, 37, 65, 1, 128])
    sequences.step(library, (0, 0, 199), (2, 0, 20), (4, 0, 95))  # pasts
    parts = [(0, 199, 200), (1, 0, 37), (2, 20, 65), (3, 0, 1), (4, 95, 128)]
    for result, part in zip(sequences.step(library, *parts), parts, strict=True):
        assert np.abs(result - sequences.expected(*part)).max() < TOLERANCE[kv[0]], part


@pytest.mark.parametrize("dim", [16, 48, 80, 112, 256])
@pytest.mark.parametrize("kv", [("f16", "f16"), ("u8", "u8")], ids=":".join)
def test_other_head_sizes(library, kv, dim):
    sequences = Sequences(layer_of(2, 1, dim, kv), [50])
    (result,) = sequences.step(library, (0, 0, 50))
    assert np.abs(result - sequences.expected(0, 0, 50)).max() < TOLERANCE[kv[0]]


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("kv", KV_PAIRS, ids=":".join)
def test_long_contexts_are_added_up_by_spans(library, kv, window):
    sequences = Sequences(layer_of(3, 1, 64, kv, window), [1300])
    sequences.step(library, (0, 0, 1290))
    (result,) = sequences.step(library, (0, 1290, 1300))
    assert np.abs(result - sequences.expected(0, 1290, 1300)).max() < TOLERANCE[kv[0]]


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("kv", KV_PAIRS, ids=":".join)
def test_bits_depend_on_nothing_else_in_the_step(library, kv, group):
    """A prompt whole, in parts of any size, token by token beside others: the same bits."""
    lengths = [75, 1100, 40]
    sequences = Sequences(layer_of(group, 2, 64, kv, window=0), lengths)
    whole = [sequences.step(library, (s, 0, n))[0] for s, n in enumerate(lengths)]
    sequences.new_pools()
    done = [0, 0, 0]
    for counts in ([1, 300, 0], [31, 1, 7], [1, 700, 1], [1, 1, 1], [40, 97, 2], [1, 1, 29]):
        parts = [(s, done[s], done[s] + count) for s, count in enumerate(counts) if count]
        for (s, begin, end), result in zip(parts, sequences.step(library, *parts), strict=True):
            assert np.array_equal(result, whole[s][begin:end]), (s, begin, end)
            done[s] = end
    assert done == lengths


def test_a_window_moves_nothing_else(library):
    """The rows of a tile start at different keys; a row alone starts at its own."""
    sequences = Sequences(layer_of(window=45), [150])
    (whole,) = sequences.step(library, (0, 0, 150))
    sequences.new_pools()
    for token in range(150):
        (alone,) = sequences.step(library, (0, token, token + 1))
        assert np.array_equal(alone[0], whole[token]), token


def test_only_the_step_s_own_slots_are_written(library):
    sequences = Sequences(layer_of(), [40, 33])
    sequences.step(library, (0, 0, 40))
    before = [pool.copy() for pool in sequences.pools]
    sequences.step(library, (1, 0, 33))
    for pool, earlier in zip(sequences.pools, before, strict=True):
        changed = np.flatnonzero((pool != earlier).any(axis=(1, 2, 3)))
        assert sorted(changed) == sorted(sequences.table[1])


def test_stored_as_openvino_stores(library):
    """Codes, scales and zero points of 8 bits, by hand."""
    layer = layer_of(1, 1, 16)
    keys, values = layer.pools(1)
    x = np.array([[-1.0, 4.1, *range(14)], [2.0] * 16], np.float32)
    library.attend(layer, x, x, x, keys, values, ints(0), ints(0, 2), ints(0), ints(0))
    k = keys.reshape(-1)[: 16 * BLOCK_SIZE].reshape(4, BLOCK_SIZE, 4).transpose(1, 0, 2).reshape(BLOCK_SIZE, 16)
    v = values.reshape(-1)[: 16 * BLOCK_SIZE].reshape(8, 16, 4).transpose(0, 2, 1).reshape(BLOCK_SIZE, 16)
    scales = keys.reshape(-1)[16 * BLOCK_SIZE :].view(np.float32).reshape(2, BLOCK_SIZE)
    # steps of 14 / 255 from -1 on: 4.1 is 92.9 steps up, n is (n + 1) * 18.2; a constant head has a scale of 1e-4 and codes 0
    assert k[0].tolist() == [0, 93, *(round((n + 1) * 255 / 14) for n in range(14))] and k[1].tolist() == [0] * 16
    assert np.array_equal(k, v)
    assert np.allclose(scales[:, 0], [14 / 255, 255 / 14]) and np.allclose(scales[:, 1], [1e-4, -20000])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_openvino_runs_it_on_the_memory_of_the_request(cpu_kernels, library, threads):
    sequences = Sequences(layer_of(), [140, 700, 20])
    layer = sequences.layer
    names = ("q", "k", "v", "k_pool", "v_pool", "past", "begins", "blocks", "block_begins", "max_context_len")
    floats = [ops.parameter([-1, heads * 64], ov.Type.f32) for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)]
    pools = [ops.parameter([-1, *pool.shape[1:]], ov.Type.u8) for pool in sequences.pools]
    metadata = [ops.parameter([-1], ov.Type.i32) for _ in range(4)] + [ops.parameter([], ov.Type.i32)]
    inputs = [*floats, *pools, *metadata]
    for name, parameter in zip(names, inputs, strict=True):
        parameter.output(0).set_names({name})
    factory = NodeFactory()
    factory.add_extension(str(cpu_kernels))
    attributes = {
        "scale": layer.scale,
        "sliding_window": 0,
        "num_kv_heads": 2,
        "head_dim": 64,
        "key_type": "u8",
        "value_type": "u8",
    }
    model = ov.Model([factory.create(NATIVE_OP, [each.output(0) for each in inputs], attributes)], inputs)
    core = ov.Core()
    core.add_extension(str(cpu_kernels))
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads}).create_infer_request()

    arrays = {name: np.concatenate(of) for name, of in (("q", sequences.q), ("k", sequences.k), ("v", sequences.v))}
    arrays |= {
        "k_pool": sequences.pools[0],
        "v_pool": sequences.pools[1],
        "past": ints(0, 0, 0),
        "begins": ints(0, 140, 840, 860),
    }
    width = sequences.width
    arrays |= {
        "blocks": sequences.table.ravel(),
        "block_begins": ints(0, width, 2 * width),
        "max_context_len": np.array(700, np.int32),
    }
    for name, array in arrays.items():
        request.set_tensor(name, ov.Tensor(array, shared_memory=True))
    request.infer()
    result = request.get_output_tensor(0).data.copy()
    written = [pool.copy() for pool in sequences.pools]
    sequences.new_pools()
    assert np.array_equal(result, np.concatenate(sequences.step(library, (0, 0, 140), (1, 0, 700), (2, 0, 20))))
    for pool, other in zip(written, sequences.pools, strict=True):
        assert np.array_equal(pool, other) and (pool != 0xFF).any()


@pytest.mark.parametrize("first", [512, 515, 590])
def test_keys_that_are_no_numbers_spoil_the_rows_that_see_them(first: int, library: Library) -> None:
    """Also where a whole span of 512 has no other keys."""
    layer = Attention(2, 1, 64, "f32", "f32", 0.125)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((600, heads * 64), np.float32) for heads in (2, 1, 1))
    k[first:] = np.nan
    blocks = np.arange(19, dtype=np.int32)
    out = library.attend(layer, q, k, v, *layer.pools(19), ints(0), ints(0, 600), blocks, ints(0, 19))
    assert np.isnan(out[first:]).all() and not np.isnan(out[:512]).any()
