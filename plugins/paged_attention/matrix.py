"""Every kernel that can be compiled, by name: what an engine needs, what the wheel ships, what CI checks. Standard library only.

A `KernelSpec` is a kernel's source function, its run-time parameters in order with their types, and its constants. Pointers are
16-byte aligned: `align` names the parameters the compiler may rely on it for.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.paged_attention.tuning import (
    HEAD_DIMS,
    MERGE_SPLITS,
    PLAN_BLOCK,
    PLAN_WAVES,
    SAMPLE_BLOCK,
    SAMPLE_PIVOTS,
    WRITE_HEADS,
    AttentionVariant,
    head_pad,
)

Constant = int | str | bool  # evaluated lazily: annotations only

_PLAN_PARAMS = {
    "query_start_loc": "*i32", "seq_lens": "*i32", "plan": "*i32", "num_seqs": "i32", "block_tokens": "i32", "window": "i32",
    "slots": "i32", "min_tiles": "i32", "fixed_tiles": "i32", "min_query": "i32", "max_query": "i32",
}  # fmt: skip
_ATTENTION_PARAMS = {
    "query": "*{q}", "kv_table": "*i64", "block_table": "*i32", "query_start_loc": "*i32", "seq_lens": "*i32", "plan": "*i32",
    "k_scale": "*fp32", "v_scale": "*fp32", "sinks": "*fp32", "out": "*{q}", "partial": "*fp32", "partial_lse": "*fp32",
    "layer": "i32", "num_seqs": "i32", "table_stride": "i32", "num_heads": "i32", "num_kv_heads": "i32", "window": "i32",
    "scale": "fp32", "softcap": "fp32", "has_sinks": "i32",
}  # fmt: skip
_MERGE_PARAMS = {
    "query_start_loc": "*i32", "plan": "*i32", "partial": "*fp32", "partial_lse": "*fp32", "sinks": "*fp32", "out": "*{q}",
    "num_seqs": "i32", "num_heads": "i32", "num_kv_heads": "i32", "has_sinks": "i32", "rows_per_program": "i32",
}  # fmt: skip
_WRITE_PARAMS = {
    "query": "*{q}", "key": "*{q}", "value": "*{q}", "positions": "*i64", "slot_mapping": "*i32", "cos": "*fp32", "sin": "*fp32",
    "q_norm": "*{q}", "k_norm": "*{q}", "k_scale": "*fp32", "v_scale": "*fp32", "kv_table": "*i64", "query_out": "*{q}",
    "layer": "i32", "q_stride": "i32", "k_stride": "i32", "v_stride": "i32", "num_heads": "i32", "num_kv_heads": "i32",
    "block_size": "i32", "rotary_dim": "i32", "interleaved": "i32", "has_norm": "i32", "eps": "fp32",
}  # fmt: skip
_SAMPLE_PARAMS = {
    "logits": "*fp32", "scratch": "*i32", "slots": "*i32", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32",
    "min_p": "*fp32", "repetition": "*fp32", "presence": "*fp32", "frequency": "*fp32", "seeds": "*i64", "steps": "*i32",
    "counts": "*i32", "masks": "*i32", "next_token": "*i64", "logprob": "*fp32", "vocab_size": "i32", "mask_words": "i32",
}  # fmt: skip
_HISTORY_PARAMS = {
    "counts": "*i32", "slot": "i32", "tokens": "*i64", "num_prompt": "i32", "num_tokens": "i32", "vocab_size": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class KernelSpec:
    name: str
    function: str  # module:function
    params: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int = 4
    num_stages: int = 1
    align: tuple[str, ...] = ()  # parameters that are multiples of 16 (addresses: bytes; integers: elements)


_UNALIGNED = ("k_scale", "v_scale", "sinks", "query_start_loc", "seq_lens", "plan")  # may be slices of larger tensors


def _spec(
    name: str, function: str, params: dict[str, str], constants: dict[str, Constant], dtype: str, **rest: int
) -> KernelSpec:
    typed = tuple((key, kind.format(q=dtype)) for key, kind in params.items())
    aligned = tuple(key for key, kind in typed if (kind[0] == "*" and key not in _UNALIGNED) or key.endswith("_stride"))
    aligned = tuple(key for key in aligned if key != "table_stride")
    return KernelSpec(name, function, typed, tuple(constants.items()), align=aligned, **rest)


def device_kind(kind: str, arch: int) -> str:
    """How `kind` is read on this architecture: E4M3 is converted in hardware from SM89 on."""
    return "fp8soft" if kind == "fp8" and arch < 89 else kind


def attention(variant: AttentionVariant, arch: int) -> KernelSpec:
    tiles = variant.tiles(arch)
    constants: dict[str, Constant] = {
        "HEAD_DIM": variant.head_dim, "HEAD_PAD": head_pad(variant.head_dim), "BLOCK_M": tiles.block_m, "TILE": tiles.tile,
        "PAGE": variant.block_size, "K_KIND": device_kind(variant.key_kind, arch),
        "V_KIND": device_kind(variant.value_kind, arch), "SOFTCAP": variant.softcap,
    }  # fmt: skip
    return _spec(
        variant.name, "plugins.paged_attention.kernels:paged_attention", _ATTENTION_PARAMS, constants, variant.query_dtype,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def plan(tile: int) -> KernelSpec:
    constants: dict[str, Constant] = {"TILE": tile, "BLOCK": PLAN_BLOCK, "WAVES": PLAN_WAVES}
    return _spec(f"plan_t{tile}", "plugins.paged_attention.kernels:plan_splits", _PLAN_PARAMS, constants, "")


def merge(head_dim: int, dtype: str, block_m: int) -> KernelSpec:
    constants: dict[str, Constant] = {
        "HEAD_DIM": head_dim, "HEAD_PAD": head_pad(head_dim), "BLOCK_M": block_m, "SPLITS": MERGE_SPLITS,
    }  # fmt: skip
    name = f"merge_d{head_dim}_{dtype}_m{block_m}"
    return _spec(name, "plugins.paged_attention.kernels:merge_splits", _MERGE_PARAMS, constants, dtype)


def write(head_dim: int, dtype: str, key_kind: str, value_kind: str) -> KernelSpec:
    constants: dict[str, Constant] = {
        "HEAD_DIM": head_dim, "HEAD_PAD": head_pad(head_dim), "HEADS": WRITE_HEADS, "K_KIND": key_kind, "V_KIND": value_kind,
    }  # fmt: skip
    name = f"write_d{head_dim}_{dtype}_k{key_kind}_v{value_kind}"
    return _spec(name, "plugins.paged_attention.kv_write:write_kv", _WRITE_PARAMS, constants, dtype)


def sampling() -> tuple[KernelSpec, ...]:
    constants: dict[str, Constant] = {"BLOCK": SAMPLE_BLOCK, "PIVOTS": SAMPLE_PIVOTS}
    return (
        _spec("sample", "plugins.sampling.kernels:sample", _SAMPLE_PARAMS, constants, "", num_warps=8),
        _spec("load_history", "plugins.sampling.kernels:load_history", _HISTORY_PARAMS, {"BLOCK": SAMPLE_BLOCK}, ""),
    )


def for_variants(variants: list[AttentionVariant], arch: int) -> list[KernelSpec]:
    """Attention kernels that `arch` supports, with the plan, merge, write and sampling kernels they need; no name twice."""
    specs: dict[str, KernelSpec] = {}
    for variant in variants:
        if not variant.supported(arch):
            continue
        tiles = variant.tiles(arch)
        needed = (
            attention(variant, arch),
            plan(tiles.tile),
            merge(variant.head_dim, variant.query_dtype, tiles.block_m),
            write(variant.head_dim, variant.query_dtype, variant.key_kind, variant.value_kind),
        )
        specs.update((spec.name, spec) for spec in needed)
    specs.update((spec.name, spec) for spec in sampling())
    return list(specs.values())


def for_layers(
    head_dims: list[int], query_dtype: str, key_kind: str, value_kind: str, block_size: int, *, softcap: bool = False
) -> list[AttentionVariant]:
    """What one engine needs: both phases of every head size in it."""
    return [
        AttentionVariant(phase, head_dim, query_dtype, key_kind, value_kind, block_size, softcap)
        for head_dim in sorted(set(head_dims))
        for phase in ("decode", "prefill")
    ]


def shipped(block_sizes: tuple[int, ...] = (64,)) -> list[AttentionVariant]:
    """Every head size, in both query types, with KV of the same type, FP8, INT8, and 16-bit keys beside 8-bit values."""
    variants = []
    for dtype in ("bf16", "fp16"):
        pairs = [(dtype, dtype), ("fp8", "fp8"), ("int8", "int8"), (dtype, "fp8"), (dtype, "int8")]
        for key_kind, value_kind in pairs:
            for block_size in block_sizes:
                variants += for_layers(list(HEAD_DIMS), dtype, key_kind, value_kind, block_size)
        variants += for_layers([128, 256], dtype, dtype, dtype, block_sizes[0], softcap=True)
    return variants


def representative() -> list[AttentionVariant]:
    """Few variants that together take every branch of the sources: for CI."""
    return [
        AttentionVariant("decode", 128, "fp16", "fp16", "fp16", 64),
        AttentionVariant("decode", 80, "fp16", "fp8", "int8", 16, softcap=True),
        AttentionVariant("prefill", 64, "bf16", "bf16", "fp8", 64),
        AttentionVariant("prefill", 256, "fp16", "int8", "fp16", 16),
    ]
