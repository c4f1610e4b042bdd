"""`builder plan MODEL`: its options, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builder.config import COMPUTE_DTYPES, PRECISIONS, BuildConfig
from builder.plan import GPUS, make_plan, summary
from builder.quantize.kv_dtypes import parse_pair
from runtime.errors import BuildError, InvalidRequest

_PRECISIONS = tuple(dict.fromkeys(name for names in PRECISIONS.values() for name in names))

_GPU_KV = ("f16", "bf16", "f8", "i8")


def add_parser(commands: Any, size: Callable[[str], int]) -> None:
    plan = commands.add_parser("plan", help="memory and least times of a model on a machine, before building it")
    plan.add_argument("model", help="as for build; a directory needs its config.json only")
    plan.add_argument(
        "--precision",
        choices=_PRECISIONS,
        default="fp16",
        help="default: fp16. Without --gpu, one that the CPU target has is planned for the CPU: all but fp16",
    )
    plan.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="a type or KEYS:VALUES; auto: as the build; on the CPU f32 for fp32, 16 bit for bf16, else u8; on a GPU 16 bit",
    )
    plan.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, help="as for build, on the CPU; default: f32")
    plan.add_argument("--memory", type=size, help="such as 24GiB; default: the GPU's, or this machine's")
    plan.add_argument("--gpu", choices=tuple(GPUS), help="take memory, bandwidth and arithmetic from its data sheet")
    plan.add_argument("--context", type=int, help="tokens of one sequence; default: 4096, or the model's positions if fewer")
    plan.add_argument("--concurrency", type=int, default=1, help="sequences at once; default: 1")
    plan.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens per step; default: 512")
    plan.add_argument("--parameters", type=float, help="count this many instead, e.g. 7e9")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, errors too")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from builder.plan_model import shape_of

    for name in ("context", "concurrency", "parameters", "max_num_batched_tokens"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} is {value} but must be at least 1")
    if arguments.parameters is not None and arguments.parameters > 1e18:
        raise InvalidRequest(f"--parameters is {arguments.parameters} but must be at most 1e18")
    if arguments.gpu and arguments.precision not in PRECISIONS["tensorrt"]:
        raise InvalidRequest(
            f"--precision {arguments.precision} is not available on a GPU; choose one of {', '.join(PRECISIONS['tensorrt'])}, "
            f"or leave --gpu {arguments.gpu} out"
        )
    on_cpu = arguments.gpu is None and arguments.precision in PRECISIONS["cpu"]
    if arguments.compute_dtype is not None:
        where = {"target": "cpu"} if on_cpu else {"target": "tensorrt", "precision": "fp16"}
        BuildConfig(arguments.model, Path(), **{"precision": arguments.precision, **where}, compute_dtype=arguments.compute_dtype)
    compute_dtype = arguments.compute_dtype or "f32"
    key_dtype, value_dtype = _kv_types(arguments.kv_cache_dtype, arguments.precision, on_cpu, compute_dtype)
    shape = shape_of(arguments.model)
    if arguments.parameters:
        shape = dataclasses.replace(shape, num_parameters=int(arguments.parameters))
    result = make_plan(
        shape,
        precision=arguments.precision,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        hardware=GPUS[arguments.gpu] if arguments.gpu else None,
        memory=arguments.memory,
        context=arguments.context or min(4096, shape.max_position_embeddings),
        concurrency=arguments.concurrency,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        process=on_cpu,
        compute_dtype=compute_dtype,
    )
    if not arguments.json:
        print(summary(result))
    return result


def _kv_types(requested: str, precision: str, on_cpu: bool, compute_dtype: str) -> tuple[str, str]:
    """(key, value) types: the build's. Raises BuildError for a pair that the CPU target cannot store."""
    wide = "bf16" if compute_dtype == "bf16" else "f16"
    narrow = "u8" if on_cpu and precision != "bf16" else wide
    if requested == "auto":
        auto = "f32" if precision == "fp32" else narrow
        return auto, auto
    chosen = parse_pair(requested)
    if on_cpu:
        from plugins.paged_attention.openvino import KV_PAIRS

        if chosen not in KV_PAIRS[compute_dtype]:
            known = ", ".join(key if key == value else f"{key}:{value}" for key, value in KV_PAIRS[compute_dtype])
            raise BuildError(
                f"the cpu target cannot store the KV cache as {requested}; choose one of auto, {known}, "
                "or plan for a GPU with --gpu"
            )
    elif not set(chosen) <= set(_GPU_KV):
        raise BuildError(
            f"the TensorRT targets cannot store the KV cache as {requested}; choose from {', '.join(_GPU_KV)} or KEYS:VALUES"
        )
    return chosen
