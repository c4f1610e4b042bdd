"""The lowered attention op on our own kernels (native/): what reading a model makes of it, and of its pools."""

from __future__ import annotations

import os
from typing import Any

import openvino as ov
from openvino.utils.node_factory import NodeFactory

from plugins.paged_attention.native.attention import BLOCK_SIZE, NATIVE_OP, attributes, bytes_per_head

NUM_INPUTS = 9  # of the lowered op, the longest context left out: our kernels read each sequence's own


class OwnAttention:
    """For one model, whose pools hold keys and values of these types."""

    def __init__(self, library: str | os.PathLike[str], key_dtype: str, value_dtype: str) -> None:
        self.types = (key_dtype, value_dtype)
        self._factory = NodeFactory()
        self._factory.add_extension(os.fspath(library))
        self._pools: dict[str, list[int]] = {}  # shapes, by input

    def convert(self, node: Any) -> list[ov.Output]:
        inputs = [node.get_input(index) for index in range(NUM_INPUTS)]
        self.add_pools(inputs[3], inputs[4], node.get_attribute("num_kv_heads"), node.get_attribute("head_dim"))
        return [self._factory.create(NATIVE_OP, inputs, attributes(node, *self.types)).output(0)]

    def add_pools(self, keys: ov.Output, values: ov.Output, num_kv_heads: int, head_dim: int) -> None:
        """Of a layer: what `shape_pools` makes of these parameters."""
        for pool, dtype in zip((keys, values), self.types, strict=True):
            width = bytes_per_head(head_dim, dtype)
            self._pools[pool.get_node().get_friendly_name()] = [-1, num_kv_heads, BLOCK_SIZE, width]

    def shape_pools(self, model: ov.Model) -> None:
        """Pools become bytes."""
        for parameter in model.get_parameters():
            if (shape := self._pools.get(parameter.get_friendly_name())) is not None:
                parameter.set_element_type(ov.Type.u8)
                parameter.set_partial_shape(ov.PartialShape(shape))
        model.validate_nodes_and_infer_types()
