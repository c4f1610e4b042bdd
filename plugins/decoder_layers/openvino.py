"""Decoder layers on the CPU as one operation, of the library of plugins.quantized_matmul (layers.h). `builder.targets.openvino`
lowers whole layers to it, and reading such a model packs their matrices into one constant.

Inputs   x [1, T, hidden], cos, sin [1, T, D/2] f32; past_lens, subsequence_begins, block_indices, block_indices_begins int32
         of each layer, for each of its matrices (q, k and v; output; gate and up; down): weight, scale, zero points (uint4) where
         its shape has them, norm where `normed`; the bias of q, k and v where `biased`; norms of the heads of q and of k where
         `heads_normed`; key pool, value pool
         rows int32 where `picks`
         → [1, T, hidden], or [1, rows, hidden]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino.op as ov_op
from openvino.frontend.onnx import ConversionExtension
from openvino.utils.node_factory import NodeFactory

from plugins.paged_attention.op import DOMAIN
from plugins.paged_attention.openvino_own import OwnAttention
from plugins.quantized_matmul.openvino import Library, Shape, pack_constants

LAYERS_OP = "DecoderLayers"
MATRICES = 4  # of a layer
MATRIX_VALUES = ("outputs", "width", "bits", "group", "input_group", "zero_points", "gated", "normed")  # layers_op.cpp
LAYER_VALUES = ("num_heads", "num_kv_heads", "head_dim", "sliding_window", "biased", "heads_normed")
COMMON_INPUTS = 7  # before those of the first layer
_LINE = 64  # bytes of a cache line, on which each matrix begins
_ATTRIBUTES = ("matrices", "epsilons", "head_epsilons", "layers", "scales")


def add_to(core: ov.Core, path: str | os.PathLike[str], own: OwnAttention) -> None:
    """Teach `core` to read models with the op, by the library at `path`; `own` has the types of their pools."""
    library = Library(path)
    factory = NodeFactory()
    factory.add_extension(os.fspath(path))

    def convert(node: Any) -> list[ov.Output]:
        attributes = {name: node.get_attribute(name) for name in _ATTRIBUTES}
        inputs = iter([node.get_input(index) for index in range(node.get_input_size())])
        common = [next(inputs) for _ in range(COMMON_INPUTS)]
        shapes = [
            _shape(*values) for values in zip(_rows(attributes["matrices"], MATRIX_VALUES), attributes["epsilons"], strict=True)
        ]
        offsets = np.cumsum([0, *(_lines(library.packed_bytes(shape)) for shape, _ in shapes)])
        packed = library.take(int(offsets[-1]))
        floats, pools = [], []
        for index, layer in enumerate(_rows(attributes["layers"], LAYER_VALUES)):
            for matrix in range(index * MATRICES, (index + 1) * MATRICES):
                shape, normed = shapes[matrix]
                constants = [next(inputs).get_node() for _ in range(2 + shape.zero_points)]
                pack_constants(library, shape, constants, packed[offsets[matrix] : offsets[matrix + 1]])
                if normed:
                    floats.append(next(inputs).get_node().data)
            for _ in range(layer["biased"] + 2 * layer["heads_normed"]):
                floats.append(next(inputs).get_node().data)
            keys, values = next(inputs), next(inputs)
            own.add_pools(keys, values, layer["num_kv_heads"], layer["head_dim"])
            pools += [keys, values]
        constants = [ov_op.Constant(packed, shared_memory=True), ov_op.Constant(np.concatenate(floats, dtype=np.float32))]
        types = dict(zip(("key_type", "value_type"), own.types, strict=True))
        rows = list(inputs)
        made = factory.create(LAYERS_OP, [*common, *constants, *pools, *rows], {**attributes, **types, "picks": bool(rows)})
        return [made.output(0)]

    core.add_extension(ConversionExtension(LAYERS_OP, DOMAIN, convert))


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _rows(values: list[int], names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    for begin in range(0, len(values), len(names)):
        yield dict(zip(names, values[begin : begin + len(names)], strict=True))


def _shape(values: dict[str, int], epsilon: float) -> tuple[Shape, bool]:
    flags = {name: bool(values[name]) for name in ("zero_points", "gated")}
    return Shape(**{**{name: values[name] for name in MATRIX_VALUES[:5]}, **flags, "epsilon": epsilon}), bool(values["normed"])
