"""The TensorRT targets: canonical graph → one serialized plan per GPU architecture. Builds with no GPU in the machine (RTX).

    plan/sm89.plan      engine for SM89, weights inside
    plan/kernels/sm89   attention and sampling kernels the plugin launches

Arithmetic is 16 bit with fp32 where tensorrt_types.py says so; products accumulate in fp32. Whether TensorRT kept every weight in
the type it was given is read back from the plan (tensorrt_check.py).

Units    bytes unless the name says otherwise
Raises   UnsupportedModel, BuildError for options and TensorRT's refusals; PrecisionLost when a weight was widened
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from builder.targets import tensorrt_kernels, tensorrt_quantize
from builder.targets.buckets import Profile, decode_buckets, profiles
from builder.targets.tensorrt_adapter import MODULES, RTX_ARCHITECTURES, TENSORRT_RTX, Adapter, BuildOptions, BuiltPlan
from builder.targets.tensorrt_check import Stored, bytes_per_weight, check_plan
from builder.targets.tensorrt_lower import KVScales, Lowered, lower
from builder.targets.tensorrt_types import narrow, plugin_spec
from plugins.paged_attention import tensorrt as plugin
from plugins.paged_attention import tensorrt_op
from plugins.paged_attention.tensorrt_step import StepShape, step_launches, workspace_bytes
from plugins.paged_attention.tuning import ARCHITECTURES, KV_BYTES
from runtime.contract import PLAN_DIR, KVSpec, ModelSpec
from runtime.errors import BuildError, FusionMismatch

KV_DTYPES = ("auto", "f16", "bf16", "f8", "i8")
KINDS = {"f16": "fp16", "bf16": "bf16", "f8": "fp8", "i8": "int8"}  # manifest's names → the kernels'
BLOCK_SIZE = 64
LAYOUT = "paged-heads-first"  # [num_blocks, Hkv, block_size, D], keys and values apart
KERNELS_DIR = "kernels"
_DTYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def activations(precision: str) -> str:
    """The 16-bit type of what is not quantized."""
    return "bf16" if precision == "bf16" else "fp16"


def resolve_kv_dtype(requested: str, precision: str) -> tuple[str, str]:
    """(key, value) types for `--kv-cache-dtype`: auto, one of KV_DTYPES, or keys:values. "auto" follows the activations."""
    own = {"fp16": "f16", "bf16": "bf16"}[activations(precision)]
    key, _, value = requested.partition(":")
    chosen = tuple(own if each == "auto" else each for each in (key, value or key))
    for each in chosen:
        if each not in KV_DTYPES:
            raise BuildError(
                f"the TensorRT targets cannot store the KV cache as {each}; choose one of {', '.join(KV_DTYPES)}, or KEYS:VALUES"
            )
        if each in ("f16", "bf16") and each != own:
            raise BuildError(
                f"with --precision {precision} attention computes in {activations(precision)}, so 16-bit keys and values are "
                f"{own}, not {each}; use {own}, f8 or i8"
            )
    return chosen[0], chosen[1]


def resolve_architectures(target: str, requested: Sequence[str]) -> tuple[str, ...]:
    """`requested` empty: sm89 and sm120 for RTX."""
    known = RTX_ARCHITECTURES if target == TENSORRT_RTX else tuple(f"sm{arch}" for arch in ARCHITECTURES)
    chosen = tuple(requested) or (("sm89", "sm120") if target == TENSORRT_RTX else ())
    for arch in chosen:
        if arch not in known:
            raise BuildError(f"--target {target} does not build for {arch}; it builds for {', '.join(known)}")
    if target != TENSORRT_RTX and len(chosen) != 1:
        raise BuildError(
            f"--target {target} builds for the GPU of this machine, so --target-arch must name its architecture alone, as in sm90"
        )
    return chosen


# ----------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class PlanResult:
    """As the cpu target's, with what only GPUs have."""

    plan: dict[str, str]
    kv_cache: KVSpec
    libraries: dict[str, str]
    weight_bytes: int  # of the largest plan
    activations: str
    details: dict[str, Any]
    runtime_types: dict[str, int]  # "layer type:output type" → layers of the network
    compile_ms: float
    gpu_architectures: tuple[str, ...]
    buckets: tuple[int, ...]
    profiles: tuple[dict[str, Any], ...]
    plugin_sha256: str
    weights: dict[str, list[Stored]]  # architecture → what its plan holds
    plans: dict[str, BuiltPlan]
    lowered: Lowered


def build_plan(
    quantized: ir.Model,
    plan_dir: Path,
    spec: ModelSpec,
    *,
    roles: Mapping[str, str],
    target: str,
    precision: str,
    kv: tuple[str, str],
    architectures: Sequence[str],
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    work_dir: Path,
    kv_scales: KVScales | None = None,
    block_size: int = BLOCK_SIZE,
    options: BuildOptions | None = None,
    with_kernels: bool = True,
) -> PlanResult:
    """Write the plans into `plan_dir` and check them. The lowered graph stays in `work_dir`, as model.onnx and weights.bin.

    `roles`          of tensorrt_quantize.roles, before it was quantized
    `quantized`      of tensorrt_quantize.quantize; it is changed
    `with_kernels`   False leaves the kernels out, for tests: such an engine cannot run
    """
    adapter = Adapter(target)
    narrow_dtype, rounds = activations(precision), tensorrt_quantize.SCHEMES[precision].activations
    kinds = (KINDS[kv[0]], KINDS[kv[1]])
    lowered = lower(quantized, key_kind=kinds[0], value_kind=kinds[1], block_size=block_size, kv_scales=kv_scales)
    narrow(quantized, _DTYPES[narrow_dtype])
    work_dir.mkdir(parents=True, exist_ok=True)
    plan_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / "model.onnx"
    ir.save(quantized, path, external_data="weights.bin")
    graph = ir.load(path)  # its weights refer to the file just written

    shapes = profiles(max_num_seqs, max_num_batched_tokens, coarse=target == TENSORRT_RTX)
    blocks_per_seq = -(-max_model_len // block_size)
    plans: dict[str, BuiltPlan] = {}
    weights: dict[str, list[Stored]] = {}
    for arch in architectures:
        if with_kernels:
            capped = [each.softcap > 0 for each in lowered.attention]
            wanted = tensorrt_kernels.variants(spec, narrow_dtype, *kinds, block_size, softcap=capped)
            occupied = tensorrt_kernels.compile_kernels(wanted, arch, plan_dir / KERNELS_DIR)
            for node in attention_nodes(graph):
                for name, value in tensorrt_kernels.attributes(occupied, node.attributes.get_int("head_dim", 0)).items():
                    node.attributes[name] = ir.AttrInt64(name, value)
        _check_workspace(options, arch, attention_workspace(graph, narrow_dtype, arch, shapes, blocks_per_seq))
        ir.save(graph, path)
        plugin.register(adapter.trt, arch=int(arch.removeprefix("sm")))
        file = plan_dir / f"{arch}.plan"
        plans[arch] = adapter.build(
            path, file, shapes, blocks_per_seq=blocks_per_seq, arch=arch, options=options or BuildOptions()
        )
        _check_network(plans[arch], spec)
        weights[arch] = check_plan(file, graph, roles)
    files = {arch: f"{PLAN_DIR}/{arch}.plan" for arch in architectures}
    if with_kernels:
        files["kernels"] = f"{PLAN_DIR}/{KERNELS_DIR}"
    first = plans[architectures[0]]
    return PlanResult(
        plan=files,
        kv_cache=KVSpec(*kv, block_size, LAYOUT, kv_bytes_per_token(spec, kinds)),
        libraries={MODULES[target]: adapter.version},
        weight_bytes=max(plan.num_bytes for plan in plans.values()),
        activations=rounds or narrow_dtype,
        details={
            "arithmetic": narrow_dtype,
            **({"activation_scales": "static"} if rounds else {}),
            "calibrated_kv_scales": bool(kv_scales),
            "accuracy": "lowered graph on ONNX Runtime",
        },
        runtime_types=first.network.precisions,
        compile_ms=1e3 * sum(plan.seconds for plan in plans.values()),
        gpu_architectures=tuple(architectures),
        buckets=decode_buckets(max_num_seqs),
        profiles=tuple(_profile_dict(profile) for profile in shapes),
        plugin_sha256=plugin.sha256(),
        weights=weights,
        plans=plans,
        lowered=lowered,
    )


def attention_nodes(graph: ir.Model) -> list[ir.Node]:
    return [node for node in graph.graph if node.domain == tensorrt_op.NODE_DOMAIN and node.op_type == tensorrt_op.NAME]


def attention_workspace(graph: ir.Model, dtype: str, arch: str, shapes: Sequence[Profile], blocks_per_seq: int) -> int:
    """The most that an attention plugin asks for in any of the profiles."""
    largest = [StepShape(shape.num_tokens[-1], shape.num_seqs[-1], blocks_per_seq) for shape in shapes]
    number = int(arch.removeprefix("sm"))
    return max(workspace_bytes(plugin_spec(node), dtype, number, each) for node in attention_nodes(graph) for each in largest)


def _check_workspace(options: BuildOptions | None, arch: str, needed: int) -> None:
    """Given less, TensorRT-RTX 1.7 does not refuse: it corrupts its heap."""
    limit = options.workspace_bytes if options else None
    if limit is not None and limit < needed:
        raise BuildError(
            f"--workspace is {limit} bytes but the attention of the largest step needs {needed} on {arch}; give at least "
            f"{-(-needed // (1 << 20))}M, lower --max-num-batched-tokens, or leave it out"
        )


def kv_bytes_per_token(spec: ModelSpec, kinds: Sequence[str]) -> int:
    """Keys and values of all layers; their scales are constants of the plan."""
    per_element = sum(KV_BYTES[kind] for kind in kinds)
    return sum(layer.num_kv_heads * layer.head_dim * per_element for layer in spec.layers)


def _check_network(plan: BuiltPlan, spec: ModelSpec) -> None:
    if len(plan.network.plugins) != len(spec.layers):
        raise FusionMismatch(
            f"the network has {len(plan.network.plugins)} attention plugins for {len(spec.layers)} layers, so the others run as "
            "something else; use the TensorRT version forgeline is tested with"
        )


def _profile_dict(profile: Profile) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in profile.to_dict().items()}


def _launches(result: PlanResult, arch: int) -> dict[str, int]:
    """Kernels that the attention of one decoder layer launches."""
    spec, dtype = result.lowered.attention[0], result.details["arithmetic"]
    shapes = {"decode": StepShape(1, 1, 1), "mixed": StepShape(2, 1, 1)}
    return {kind: len(step_launches(spec, dtype, arch, 1, shape)) for kind, shape in shapes.items()}


def report(result: PlanResult) -> dict[str, Any]:
    """Figures per architecture, for report.json."""
    found: dict[str, Any] = {}
    for arch, plan in result.plans.items():
        by_role: dict[str, list[Stored]] = {}
        for each in result.weights[arch]:
            by_role.setdefault(each.role, []).append(each)
        layers = [each for role in ("attention", "mlp") for each in by_role.get(role, ())]
        found[arch] = {
            "plan_bytes": plan.num_bytes,
            "build_seconds": round(plan.seconds, 2),
            "network_layers": plan.network.layers,
            "attention_plugins": len(plan.network.plugins),
            "launches_per_plugin": _launches(result, int(arch.removeprefix("sm"))),
            "bytes_per_weight": {role: round(bytes_per_weight(each), 4) for role, each in by_role.items() if role != "other"},
            "layers_bytes_per_weight": round(bytes_per_weight(layers), 4),
            "code_bytes": plan.num_bytes - sum(each.copies * each.num_bytes + each.scale_bytes for each in result.weights[arch]),
            "second_copies": sum(each.copies > 1 for each in result.weights[arch]),
        }
    return found
