"""The attention op of TensorRT engines: its name, inputs and attributes. Standard library only.

    forgeline::PagedAttention, plugin version 1: q/k norm, rotary embedding, KV write and attention in one node

    qkv               [T, (Hq + 2 Hkv) * D]   fp16 or bf16, one fused projection, before norm and rotary embedding
    rows              [T]          int64      row of cos and sin that belongs to each token
    slot_mapping      [T]          int32      -1 = padding: nothing is stored
    block_table       [B, M]       int32
    query_start_loc   [B+1]        int32
    seq_lens          [B]          int32      0 = padding
    kv_pointers       [layers, 2]  int64      device addresses of the key and value pools [num_blocks, Hkv, block_size, D]
    cos, sin          [N, R/2]     fp32       when rotary_dim = R > 0
    q_norm, k_norm    [D]                     when has_norm; qkv's type
    k_scale, v_scale  [Hkv]        fp32       when a KV kind is fp8 or int8
    sinks             [Hq]         fp32       when has_sinks
 →  out               [T, Hq * D]             qkv's type

The pools are reached through addresses, not tensors: an engine that returns its pools, aliased or not, makes the compiler keep a
copy of each layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from plugins.paged_attention.tuning import KV_KINDS

NAME = "PagedAttention"
NAMESPACE = "forgeline"
VERSION = "1"
NODE_DOMAIN = "forgeline.tensorrt"  # of the lowered ONNX node: the canonical op has the same name and other inputs

KV_POINTERS = "kv_pointers"
STEP_INPUTS = ("qkv", "rows", "slot_mapping", "block_table", "query_start_loc", "seq_lens", KV_POINTERS)
_EIGHT_BIT = ("fp8", "int8")


@dataclass(frozen=True)
class AttentionSpec:
    """Attributes of one node; plugin fields of the same names."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    key_kind: str  # one of KV_KINDS
    value_kind: str
    sliding_window: int = 0  # tokens; 0 = all
    softcap: float = 0.0
    rotary_dim: int = 0  # leading elements of a head that are rotated
    interleaved: int = 0
    has_norm: int = 0
    eps: float = 0.0
    has_sinks: int = 0
    decode_blocks_per_sm: int = 1  # resident programs of the two attention kernels, from the compiled kernels' registers
    prefill_blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        assert self.key_kind in KV_KINDS and self.value_kind in KV_KINDS, (self.key_kind, self.value_kind)
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the node's inputs, in order."""
        optional = (
            ("cos", "sin") if self.rotary_dim else (),
            ("q_norm", "k_norm") if self.has_norm else (),
            ("k_scale", "v_scale") if self.has_scales else (),
            ("sinks",) if self.has_sinks else (),
        )
        return (*STEP_INPUTS, *(name for names in optional for name in names))

    @property
    def has_scales(self) -> bool:
        return self.key_kind in _EIGHT_BIT or self.value_kind in _EIGHT_BIT

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, int | float | str]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionSpec:
        """Unknown names are an error, and so are missing ones without a default."""
        return cls(**values)
