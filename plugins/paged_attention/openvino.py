"""PagedAttention on the CPU: OpenVINO's own paged attention, reached from ONNX through a ConversionExtension.

`builder.targets.openvino` lowers forgeline::PagedAttention to forgeline::OpenVINOPagedAttention; reading such a model turns each
of those nodes into `_PagedAttentionExtension`, a private operation of OpenVINO with 28 inputs: openvino is pinned in pyproject.
The plug-in chooses the layout of the pools: `[num_blocks, Hkv, 32, D (+ 8 bytes of scale and zero point when 8-bit)]`, updated in
place. Used by the builder (compile and check) and by the runtime's executor alike, so that both see the same engine.

Shapes   q [T, Hq*D]   k, v [T, Hkv*D]   → [T, Hq*D]
         past_lens [B], subsequence_begins [B+1], block_indices [N], block_indices_begins [B+1], max_context_len []   int32
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.op as ov_op
from openvino.frontend.onnx import ConversionExtension

from plugins.paged_attention.op import DOMAIN
from plugins.paged_attention.openvino_own import OwnAttention

LIBRARY = "openvino"  # in Manifest.libraries
LOWERED_OP = "OpenVINOPagedAttention"
METADATA = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")
BLOCK_SIZE = 32  # fixed by the CPU plug-in
POOL_PREFIXES = ("k_pool.", "v_pool.")
KV_PAIRS = {  # by the type it computes in: keys, values that the plug-in has kernels for
    "f32": (("f32", "f32"), ("f16", "f16"), ("u8", "u8"), ("u8", "u4")),
    "bf16": (("bf16", "bf16"), ("u8", "u8"), ("u8", "u4")),  # f16 it would turn into bf16
}
COMPUTE_DTYPES = tuple(KV_PAIRS)
_U4_GROUP = 32  # values of four bits under one scale
LAYOUT_PAGED = "openvino-paged-by-token"  # [num_blocks, Hkv, 32, D or D + 8]
LAYOUT_OWN = "forgeline-paged"  # [num_blocks, Hkv, 32, bytes]: native/attention.h
LAYOUT_PLAIN = "plain"  # [num_blocks, 32, Hkv, D]: models whose attention is decomposed

_NOT_IN_NUMPY = {"u4": ov.Type.u4, "bf16": ov.Type.bf16}

_NO_I32 = np.zeros((0,), np.int32)
_NO_F32 = np.zeros((0,), np.float32)
_ZERO_I32 = np.zeros((), np.int32)


def _convert(node: Any) -> list[ov.Output]:
    """One lowered node → the private op. Every optional feature is off: an empty constant, or zero where a scalar is required."""

    def constant(value: np.ndarray) -> ov.Output:
        return ov_op.Constant(value).output(0)

    inputs = [node.get_input(index) for index in range(10)]  # q, k, v, pools, METADATA
    scale = np.array(node.get_attribute("scale"), np.float32)
    window = np.array(node.get_attribute("sliding_window"), np.int32)
    op = ov_op._PagedAttentionExtension(
        [
            *inputs[:9],
            constant(scale),  # 9
            constant(window),  # 10
            constant(_NO_F32),  # 11 alibi slopes
            inputs[9],  # 12 max_context_len
            constant(_NO_I32),  # 13 score aggregation window
            constant(_NO_I32),  # 14 rotated block indices
            constant(_NO_I32),  # 15 rotation deltas
            constant(_NO_F32),  # 16 rotation table
            constant(_NO_F32),  # 17 xattention threshold
            constant(_ZERO_I32),  # 18 xattention block size
            constant(_ZERO_I32),  # 19 xattention stride
            constant(np.zeros((0, 0, 0, 0), np.float32)),  # 20 sinks
            constant(_ZERO_I32),  # 21 adaptive eviction: start size
            constant(_NO_I32),  # 22   evictable sizes
            constant(_NO_I32),  # 23   diversity block indices
            constant(_NO_I32),  # 24   their begins
            constant(_NO_I32),  # 25 token types
            constant(np.zeros((0,), np.uint8)),  # 26 query-query mask
            constant(_NO_I32),  # 27   its begins
        ]
    )
    info = op.get_rt_info()  # the plug-in sizes the pools from these
    for side in ("k", "v"):
        info[f"num_{side}_heads"] = node.get_attribute("num_kv_heads")
        info[f"{side}_head_size"] = node.get_attribute("head_dim")
    return [op.output(0)]


def is_pool(name: str) -> bool:
    return name.startswith(POOL_PREFIXES)


def read_model(core: ov.Core, path: str | os.PathLike[str], own: OwnAttention | None = None) -> ov.Model:
    """Read a lowered model. Pools of a paged model become inputs whose type and layout the plug-in chooses when it compiles.

    own: attention runs on our kernels instead of the plug-in's, and pools are bytes in an order of theirs.
    """
    core.add_extension(ConversionExtension(LOWERED_OP, DOMAIN, own.convert if own else _convert))
    model = core.read_model(os.fspath(path))
    if own:
        own.shape_pools(model)
    elif any(op.get_type_name() == "PagedAttentionExtension" for op in model.get_ops()):
        for parameter in model.get_parameters():
            if is_pool(parameter.get_friendly_name()):
                parameter.set_element_type(ov.Type.dynamic)
                parameter.set_partial_shape(ov.PartialShape([-1] * 4))
        model.validate_nodes_and_infer_types()
    return model


def u4_group(head_dims: Iterable[int]) -> int:
    """Values of four bits under one scale, in every layer; 0: the whole head, since 32 does not divide one.

    SmolLM2 (u8 keys, 2,047 tokens): perplexity 1.0006 times that of f32 with groups, 1.0088 without, for 7 % more bytes.
    """
    return _U4_GROUP if all(size % _U4_GROUP == 0 for size in head_dims) else 0


def compile_options(
    *,
    key_dtype: str,
    value_dtype: str,
    head_dims: Iterable[int],
    dynamic_quantization_group_size: int,
    num_threads: int,
    compute_dtype: str = "f32",
) -> dict[str, Any]:
    """Options of `core.compile_model(model, "CPU", ...)`.

    Threads are not pinned: with other work on the cores, pinning cost 7 to 17 % of a step (SmolLM2 int8, two cores under load).
    Keys quantize by token: quantizing them by channel makes the stored keys depend on how a prompt was cut into chunks.
    dynamic_quantization_group_size: activations a scale covers in layers with quantized weights; 0 leaves them as they are.
    compute_dtype: f32 or bf16. Where the CPU has no bf16 the plug-in computes in f32 and says nothing; `computes_in` tells.
    """
    return {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": compute_dtype,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # the server's threads and clients need the same cores
        "KEY_CACHE_PRECISION": key_dtype,
        "VALUE_CACHE_PRECISION": value_dtype,
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "VALUE_CACHE_GROUP_SIZE": u4_group(head_dims) if value_dtype == "u4" else 0,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic_quantization_group_size,
    }


@dataclass(frozen=True)
class PoolBlock:
    """One block of a pool, as the compiled model wants it."""

    shape: tuple[int, ...]
    element_type: str  # f32, f16, bf16, u8, u4
    dtype: np.dtype  # of the array that holds it: u4 lies two in a byte, bf16 as if it were f16

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Of that array."""
        assert self.element_type != "u4" or self.shape[-1] % 2 == 0, f"{self.shape} values of four bits do not fill bytes"
        return (*self.shape[:-1], self.shape[-1] // 2) if self.element_type == "u4" else self.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.storage_shape) * self.dtype.itemsize

    def tensor(self, pool: np.ndarray) -> ov.Tensor:
        """Shares the memory of `pool`, [num_blocks, *storage_shape]."""
        if self.element_type in _NOT_IN_NUMPY:
            return ov.Tensor(pool, ov.Shape([len(pool), *self.shape]), _NOT_IN_NUMPY[self.element_type])
        return ov.Tensor(pool, shared_memory=True)


def pool_blocks(compiled: ov.CompiledModel) -> dict[str, PoolBlock]:
    """By pool. Where the model leaves the block size open (decomposed attention) it is BLOCK_SIZE."""
    found = {}
    for value in compiled.inputs:
        name = value.get_any_name()
        if is_pool(name):
            dims = list(value.partial_shape)[1:]
            shape = tuple(BLOCK_SIZE if dim.is_dynamic else dim.get_length() for dim in dims)
            element_type = value.element_type.get_type_name()
            found[name] = PoolBlock(shape, element_type, np.dtype(value.element_type.to_dtype()))
    return found


def has_bf16(core: ov.Core) -> bool:
    """Whether this CPU, and the plug-in on it, computes in bf16."""
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def computes_in(compiled: ov.CompiledModel) -> str:
    """The type that the plug-in chose, whatever it was asked for."""
    return str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())


def library_version() -> str:
    """As the package index names it."""
    return ov.get_version().split("-")[0]
