"""Memory and time before anything is built: what a model will need on a machine, and the least time a token can take there.

    weights          parameters × bytes of the precision; embedding and head apart, since schemes treat them apart
    KV cache         2 · L · H_kv · D · bytes per token (a sliding layer keeps its window only)
    decode floor     weights and the batch's cached tokens through memory once, plus 2 · parameters operations per sequence
    prefill floor    2 · parameters operations per token

On the CPU the need is that of a whole serving process, with the arithmetic that loading enforces (runtime/memory.py).
Floors are what the hardware's data sheet allows; nothing runs faster.

Units    bytes, seconds, operations (a multiply-add is two); bare sizes are tokens
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from plugins.paged_attention.openvino import u4_group
from plugins.quantized_matmul import native
from runtime.contract import LayerSpec
from runtime.errors import BuildError
from runtime.memory import BesidePool, beside_pool, loaded_weight_bytes

GIB = 1 << 30
_WEIGHT_BYTES = {  # (attention and mlp, embedding and head), scales included
    "fp32": (4.0, 4.0), "fp16": (2.0, 2.0), "bf16": (2.0, 2.0), "fp8": (1.005, 2.0), "int8": (1.005, 1.005),
    "int8-wo": (1.005, 1.005), "int8-sq": (1.005, 1.005), "int4": (0.5 + 4.5 / 64, 1.005),
}  # fmt: skip
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "f8": 1.0, "i8": 1.0, "u8": 1.0, "u4": 0.5}
_SCALE = 8  # bytes of a scale and its zero point, per token and head; for u4 per group of a head


@dataclass(frozen=True)
class Hardware:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second
    operations: float  # per second, dense, 16 bit


GPUS = {  # memory and dense 16-bit figures of the vendor's data sheets
    "a100": Hardware("A100 80 GB", 80 * GIB, 2.0e12, 312e12),
    "h100": Hardware("H100 SXM", 80 * GIB, 3.35e12, 989e12),
    "h200": Hardware("H200", 141 * GIB, 4.8e12, 989e12),
    "l4": Hardware("L4", 24 * GIB, 0.3e12, 121e12),
    "l40s": Hardware("L40S", 48 * GIB, 0.864e12, 362e12),
    "b200": Hardware("B200", 180 * GIB, 8.0e12, 2250e12),
    "rtx4090": Hardware("RTX 4090", 24 * GIB, 1.008e12, 165e12),
    "rtx5090": Hardware("RTX 5090", 32 * GIB, 1.792e12, 209e12),
}


@dataclass(frozen=True)
class Shape:
    """Of a model, as far as memory and time go."""

    name: str
    num_parameters: int
    table_parameters: int  # embedding, and the head where it is not tied
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int


def kv_bytes_per_token(layers: tuple[LayerSpec, ...], key_dtype: str, value_dtype: str) -> float:
    """Of a token that every layer keeps."""
    group = u4_group(layer.head_dim for layer in layers)
    groups = {"u8": 0, "u4": group}  # 0: the head
    return sum(
        layer.num_kv_heads
        * (
            layer.head_dim * KV_BYTES[dtype]
            + (_SCALE * layer.head_dim // (groups[dtype] or layer.head_dim) if dtype in groups else 0)
        )
        for layer in layers
        for dtype in (key_dtype, value_dtype)
    )


def weight_bytes(shape: Shape, precision: str) -> float:
    if precision not in _WEIGHT_BYTES:
        raise BuildError(f"unknown precision {precision!r}; the precisions are {', '.join(_WEIGHT_BYTES)}")
    body, tables = _WEIGHT_BYTES[precision]
    return (shape.num_parameters - shape.table_parameters) * body + shape.table_parameters * tables


def process_need(
    shape: Shape, precision: str, max_num_seqs: int, max_num_batched_tokens: int, compute_dtype: str = "f32"
) -> BesidePool:
    """What a process that serves the model on the CPU has resident beside its KV cache."""
    weights = weight_bytes(shape, precision)
    rounded, own = precision in ("int8", "int8-sq", "int4"), compute_dtype == "f32" and not native.why_not()
    counts = (weights, shape.num_parameters, shape.table_parameters)
    return beside_pool(
        loaded_weights=loaded_weight_bytes(*counts, precision, emulated=precision == "fp8", arithmetic=compute_dtype),
        parameters=shape.num_parameters,
        tables=shape.table_parameters,
        num_layers=len(shape.layers),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        generated_kernels=rounded and not own,
        own_kernels=rounded and own,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def decode_floor(
    weights: float, parameters: float, hardware: Hardware, *, batch: int = 1, kv_bytes: float = 0
) -> dict[str, float]:
    """Seconds of one step for `batch` sequences whose cached tokens take `kv_bytes` together."""
    memory = (weights + kv_bytes) / hardware.bandwidth
    arithmetic = 2 * parameters * batch / hardware.operations
    return {
        "memory_s": memory,
        "arithmetic_s": arithmetic,
        "step_s": memory + arithmetic if batch > 1 else max(memory, arithmetic),
        "arithmetic_idle": 1 - min(1.0, arithmetic / memory),
    }


def prefill_floor(weights: float, parameters: float, hardware: Hardware, tokens: int) -> float:
    """Seconds."""
    return max(weights / hardware.bandwidth, 2 * parameters * tokens / hardware.operations)


def make_plan(
    shape: Shape,
    *,
    precision: str,
    key_dtype: str,
    value_dtype: str,
    hardware: Hardware | None,
    memory: int | None,
    context: int,
    concurrency: int,
    max_num_batched_tokens: int = 512,
    process: bool = False,
    compute_dtype: str = "f32",
) -> dict[str, Any]:
    """`process`: a serving process on the CPU, not weights and cache on a GPU.

    Raises  BuildError when there is no room for a token.
    """
    weights = weight_bytes(shape, precision)
    per_token = kv_bytes_per_token(shape.layers, key_dtype, value_dtype)
    activations = _activations(shape, concurrency, max_num_batched_tokens)
    budget = memory or (hardware.memory if hardware else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    need = process_need(shape, precision, concurrency, max_num_batched_tokens, compute_dtype) if process else None
    beside = weights + activations if need is None else need.total
    left = budget - beside
    remedy = "choose a narrower --precision or more memory"
    if left < per_token:  # would it do with steps as small as they may be?
        few = min(max_num_batched_tokens, 512)
        least = process_need(shape, precision, 1, few, compute_dtype).total if process else weights + _activations(shape, 1, few)
        larger = (("--concurrency", concurrency > 1), ("--max-num-batched-tokens", max_num_batched_tokens > few))
        if least + per_token <= budget:
            remedy = f"lower {' or '.join(name for name, given in larger if given)}, or give more memory"
    if need is not None and left < per_token:
        raise BuildError(
            f"{shape.name} in {precision} needs {_size(beside)} for a process that serves it, {_size(need.weights)} of "
            f"them weights, and {per_token:.0f} bytes per token but there are {_size(budget)}; {remedy}"
        )
    if left <= 0:
        raise BuildError(
            f"{shape.name} in {precision} needs {_size(weights)} of weights and {_size(activations)} of "
            f"activations but there are {_size(budget)}; {remedy}"
        )
    tokens = int(left // per_token)
    plan: dict[str, Any] = {
        "model": shape.name,
        "precision": precision,
        "num_parameters": shape.num_parameters,
        "memory_bytes": budget,
        "weight_bytes": int(weights),
        "activation_bytes": int(activations),
        "key_dtype": key_dtype,
        "value_dtype": value_dtype,
        "kv_bytes_per_token": per_token,
        "kv_bytes_by_dtype": {dtype: kv_bytes_per_token(shape.layers, dtype, dtype) for dtype in KV_BYTES},
        "kv_bytes_per_sequence": per_token * context,
        "context": context,
        "concurrency": concurrency,
        "max_tokens": tokens,
        "max_sequences": tokens // context,
        "max_position_embeddings": shape.max_position_embeddings,
        "largest_context": min(tokens // concurrency, shape.max_position_embeddings),
        "fits": tokens >= context * concurrency,
        "total_bytes": int(beside + per_token * context * concurrency),
    }
    if need is not None:
        plan["activation_bytes"] = need.activations + need.logits
        plan["process_bytes"] = dataclasses.asdict(need)
    if hardware is not None:
        cached = per_token * context
        plan["hardware"] = hardware.name
        plan["decode"] = decode_floor(weights, shape.num_parameters, hardware)
        plan["decode_batch"] = decode_floor(weights, shape.num_parameters, hardware, batch=concurrency)
        plan["decode_batch_full_context"] = decode_floor(
            weights, shape.num_parameters, hardware, batch=concurrency, kv_bytes=cached * concurrency
        )
        plan["prefill_s"] = prefill_floor(weights, shape.num_parameters, hardware, context)
    return plan


def _activations(shape: Shape, concurrency: int, max_num_batched_tokens: int) -> float:
    widest = max(layer.num_heads * layer.head_dim for layer in shape.layers)
    return 4.0 * (max_num_batched_tokens * (8 * shape.hidden_size + 4 * widest) + concurrency * shape.vocab_size)


def _size(count: float) -> str:
    """Bytes in the largest unit of which there is a tenth."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{2 if milliseconds >= 1 else 3}f} ms" if milliseconds >= 0.01 else f"{milliseconds:.2g} ms"


def summary(plan: dict[str, Any]) -> str:
    kv = plan["kv_bytes_per_token"]
    kv_text = f"{kv / (1 << 20):.4g} MiB" if kv >= 1 << 18 else f"{kv / 1024:.4g} KiB"
    lines = [
        f"model       {plan['model']}, {_count(plan['num_parameters'])} parameters, precision {plan['precision']}",
        f"weights     {_size(plan['weight_bytes'])}; activations {_size(plan['activation_bytes'])}",
        f"KV cache    {kv_text} per token ({plan['key_dtype']}:{plan['value_dtype']}), "
        f"{_size(plan['kv_bytes_per_sequence'])} per sequence of {plan['context']} tokens",
        "            "
        + ", ".join(f"{dtype} {size / 1024:.4g} KiB" for dtype, size in plan["kv_bytes_by_dtype"].items())
        + " per token",
        f"memory      {_size(plan['memory_bytes'])} hold {plan['max_tokens']} tokens: "
        f"{plan['max_sequences']} × {plan['context']}; the largest context for {plan['concurrency']} is "
        f"{plan['largest_context']}",
        f"asked       {plan['concurrency']} × {plan['context']} tokens need {_size(plan['total_bytes'])}: "
        + ("fits" if plan["fits"] else "does not fit"),
    ]
    if plan["context"] > plan["max_position_embeddings"]:
        lines.append(
            f"            --context {plan['context']} is beyond the {plan['max_position_embeddings']} positions of the model: "
            "`builder build` refuses it"
        )
    if "process_bytes" in plan:
        parts = ", ".join(f"{name} {size / (1 << 20):.0f}" for name, size in plan["process_bytes"].items())
        lines.insert(2, f"process     {_size(sum(plan['process_bytes'].values()))} beside the KV cache (MiB: {parts})")
    if "hardware" in plan:
        one, batch, full = plan["decode"], plan["decode_batch"], plan["decode_batch_full_context"]
        count = plan["concurrency"]
        lines += [
            f"decode      {plan['hardware']}: {_milliseconds(one['memory_s'])} per token reading weights, "
            f"{_milliseconds(one['arithmetic_s'])} of arithmetic ({100 * one['arithmetic_idle']:.1f} % idle)",
            "            "
            + (
                f"batch {count}: {_milliseconds(batch['step_s'])} a step against "
                f"{1e3 * count * one['step_s']:.3g} ms one by one; "
                if count > 1
                else ""
            )
            + f"{_milliseconds(full['step_s'])} with {plan['context']} cached tokens{' each' if count > 1 else ''}",
            f"prefill     {_milliseconds(plan['prefill_s'])} for {plan['context']} tokens",
        ]
    return "\n".join(lines)
