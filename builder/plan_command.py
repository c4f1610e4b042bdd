"""`builder plan MODEL`: its options, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from builder.config import PRECISIONS
from builder.plan import GPUS, make_plan, summary
from builder.quantize.kv_dtypes import parse_pair
from runtime.errors import InvalidRequest

_PRECISIONS = tuple(dict.fromkeys(name for names in PRECISIONS.values() for name in names))


def add_parser(commands: Any, size: Callable[[str], int]) -> None:
    plan = commands.add_parser("plan", help="memory and least times of a model on a machine, before building it")
    plan.add_argument("model", help="as for build; a directory needs its config.json only")
    plan.add_argument("--precision", choices=_PRECISIONS, default="fp16")
    plan.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="a type or KEYS:VALUES; auto: f32 for fp32, u8 for int8 and int4 on the CPU, else f16",
    )
    plan.add_argument("--memory", type=size, help="such as 24GiB; default: the GPU's, or this machine's")
    plan.add_argument("--gpu", choices=tuple(GPUS), help="take memory, bandwidth and arithmetic from its data sheet")
    plan.add_argument("--context", type=int, default=4096, help="tokens of one sequence")
    plan.add_argument("--concurrency", type=int, default=1, help="sequences at once")
    plan.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens per step")
    plan.add_argument("--parameters", type=float, help="count this many instead, e.g. 7e9")
    plan.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from builder.plan_model import shape_of

    for name in ("context", "concurrency", "parameters", "max_num_batched_tokens"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} is {value} but must be at least 1")
    on_cpu = arguments.gpu is None and arguments.precision in PRECISIONS["cpu"]
    narrow = "u8" if on_cpu and arguments.precision != "bf16" else "f16"
    auto = ("f32", "f32") if arguments.precision == "fp32" else (narrow, narrow)
    key_dtype, value_dtype = auto if arguments.kv_cache_dtype == "auto" else parse_pair(arguments.kv_cache_dtype)
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
        context=arguments.context,
        concurrency=arguments.concurrency,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        process=on_cpu,
    )
    if not arguments.json:
        print(summary(result))
    return result
