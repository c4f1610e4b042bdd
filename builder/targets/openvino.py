"""The CPU target: canonical graph → lowered ONNX that OpenVINO compiles when an engine is loaded. Compiles once here, to check.

    plan/canonical.onnx   the quantized canonical graph with its functions; the reference executor runs it
    plan/model.onnx       the lowered graph
    plan/weights.bin      weights of both, memory-mapped
    plan/kernels.so       kernels of our own for quantized layers, compiled here (plugins/quantized_matmul); OpenVINO's without it

Arithmetic is f32 (integers where layers are quantized), also for bf16 weights: they take two bytes in the file and are widened on
loading. bf16 arithmetic (`--compute-dtype bf16`) is faster, but its results change with the shape of the batch, so
the tokens of a request may depend on what shares its steps.

OpenVINO cannot cache a compiled model that contains its paged attention, so the plan is ONNX and loading compiles it.

Units    bytes unless the name says otherwise; times in ms
Raises   UnsupportedModel, BuildError for options; PrecisionLost, FusionMismatch when the compiled model is not what was meant
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import openvino as ov

from builder.quantize.kv_dtypes import parse_pair
from builder.targets import openvino_check
from builder.targets.openvino_lower import DECOMPOSED, PAGED, attention_mode, lower, unsupported_attention
from builder.targets.openvino_quantize import lower_rounding
from plugins.decoder_layers import openvino as decoder_layers
from plugins.paged_attention import openvino as paged
from plugins.paged_attention.native.attention import supports
from plugins.paged_attention.op import PAGED_ATTENTION, attach_functions
from plugins.paged_attention.openvino_own import OwnAttention
from plugins.quantized_matmul import openvino as quantized
from runtime.contract import PLAN_DIR, KVSpec, ModelSpec
from runtime.errors import BuildError, UnsupportedModel

_WIDE_KV = {"f32": "f16", "bf16": "bf16"}  # by the type it computes in: for weights of two bytes
_WEIGHTS = "weights.bin"
_LIBRARY = "kernels.so"
_PAGE = 4096  # bytes: mapped tensors start on a page


@dataclass(frozen=True)
class PlanResult:
    plan: dict[str, str]  # role → path inside the bundle
    kv_cache: KVSpec
    libraries: dict[str, str]
    weight_bytes: int  # of the weights file
    activations: str  # fp32, bf16, or int8, fp8 where quantized layers round their inputs
    emulated: bool  # inputs are rounded by f32 arithmetic, for accuracy, not for speed
    details: dict[str, Any]  # for PrecisionSpec.details: what the executor compiles with
    runtime_types: dict[str, int]  # "layer type:precision" → count, in the compiled model
    compile_ms: float


def require(compute_dtype: str) -> None:
    """Raises  BuildError when this CPU does not compute in that type."""
    core = ov.Core()
    if compute_dtype == "bf16" and not paged.has_bf16(core):
        listed = ", ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        raise BuildError(
            f"--compute-dtype bf16 needs a CPU with bf16 arithmetic (AVX512-BF16 or AMX) but OpenVINO lists {listed} for this "
            "one; leave it out, or build where the engine will run"
        )


def check_kv_dtype(requested: str, compute_dtype: str = "f32") -> None:
    """Raises  BuildError for what no model can have."""
    chosen = None if requested == "auto" else parse_pair(requested)
    if chosen is not None and chosen not in paged.KV_PAIRS[compute_dtype]:
        known = ", ".join(key if key == value else f"{key}:{value}" for key, value in paged.KV_PAIRS[compute_dtype])
        raise BuildError(
            f"the cpu target, computing in {compute_dtype}, cannot store the KV cache as {requested} (keys as {chosen[0]}, "
            f"values as {chosen[1]}); choose one of auto, {known}"
        )


def resolve_kv_dtype(requested: str, precision: str, canonical: ir.Model, compute_dtype: str = "f32") -> tuple[str, str]:
    """(key, value) types for `--kv-cache-dtype`: auto, a type, or keys:values. auto: f32 for fp32, 16 bit for bf16, else u8."""
    chosen = None if requested == "auto" else parse_pair(requested)
    if attention_mode(canonical) != DECOMPOSED:
        check_kv_dtype(requested, compute_dtype)
    if attention_mode(canonical) == DECOMPOSED:
        if chosen not in (None, ("f32", "f32")):
            node = next(n for n in canonical.graph if n.op_type == PAGED_ATTENTION and unsupported_attention(n))
            raise UnsupportedModel(
                f"the model has {unsupported_attention(node)}, so the cpu target runs its attention unfused and stores the KV "
                f"cache as f32 only, not {requested}; use --kv-cache-dtype f32 or auto"
            )
        return "f32", "f32"
    auto = {"fp32": "f32", "bf16": _WIDE_KV[compute_dtype]}.get(precision, "u8")
    return chosen or (auto, auto)


def build_plan(
    canonical: ir.Model,
    plan_dir: Path,
    spec: ModelSpec,
    *,
    key_dtype: str,
    value_dtype: str,
    precision: str,
    compute_dtype: str = "f32",
    kernels: Path | None = None,
    num_threads: int = 1,
) -> PlanResult:
    """Write the plan into `plan_dir` (the bundle's plan directory) and check what OpenVINO makes of it.

    `canonical` is fused and quantized; it is left as it was, apart from functions attached to it. `kernels`: our own, compiled,
    for layers whose inputs are rounded to int8 while they run; None, or a model without such layers: OpenVINO's.
    """
    plan_dir.mkdir(parents=True, exist_ok=True)
    attach_functions(canonical)
    path = plan_dir / "canonical.onnx"
    ir.save(canonical, path, external_data=_WEIGHTS, alignment=_PAGE, align_threshold=_PAGE)
    lowered = ir.load(path)  # its weights refer to the file just written
    rounding = lower_rounding(lowered)
    attention = (
        kernels is not None
        and attention_mode(lowered) == PAGED
        and all(supports(layer.head_dim, key_dtype, value_dtype) for layer in spec.layers)
    )
    facts = lower(lowered, input_group=rounding.group_size if kernels is not None else 0, own_attention=attention)
    want = openvino_check.expected(lowered.graph, facts.rotary, attention)
    ir.save(lowered, plan_dir / "model.onnx")
    del lowered

    core = ov.Core()
    group_size = rounding.group_size
    options = paged.compile_options(
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        head_dims=[layer.head_dim for layer in spec.layers],
        dynamic_quantization_group_size=group_size,
        num_threads=num_threads,
        compute_dtype=compute_dtype,
    )
    assert compute_dtype == "f32" or not rounding.emulated, f"{rounding.emulated} would be emulated in {compute_dtype}"
    start = time.perf_counter()
    library = plan_dir / _LIBRARY
    if kernels is not None and (facts.own or attention):
        shutil.copyfile(kernels, library)
        quantized.add_to(core, library)
    attend = OwnAttention(library, key_dtype, value_dtype) if attention else None
    if attend:
        decoder_layers.add_to(core, library, attend)
    compiled = core.compile_model(paged.read_model(core, plan_dir / "model.onnx", attend), "CPU", options)
    compile_ms = (time.perf_counter() - start) * 1e3
    runtime_types = openvino_check.check(compiled, want, compute_dtype)
    stored = {value.element_type for value in paged.pool_blocks(compiled).values()} if attend is None else set()
    assert stored <= {key_dtype, value_dtype}, f"OpenVINO stores the KV cache as {stored}, not as {key_dtype}, {value_dtype}"
    layout = paged.LAYOUT_OWN if attend else paged.LAYOUT_PLAIN if facts.mode == DECOMPOSED else paged.LAYOUT_PAGED
    return PlanResult(
        plan={
            "model": f"{PLAN_DIR}/model.onnx",
            "canonical": f"{PLAN_DIR}/canonical.onnx",
            **({"kernels": f"{PLAN_DIR}/{_LIBRARY}"} if library.is_file() else {}),
        },
        kv_cache=KVSpec(key_dtype, value_dtype, paged.BLOCK_SIZE, layout, _bytes_per_token(compiled, spec)),
        libraries={paged.LIBRARY: paged.library_version()},
        weight_bytes=(plan_dir / _WEIGHTS).stat().st_size,
        activations="int8" if group_size else rounding.emulated or {"f32": "fp32"}.get(compute_dtype, compute_dtype),
        emulated=bool(rounding.emulated),
        details={
            "arithmetic": f"f32, emulating {rounding.emulated}" if rounding.emulated else compute_dtype,
            "weights_widened_on_load": precision == "bf16",
            "dynamic_quantization_group_size": group_size,
            "kernels": _kernels(facts.own, runtime_types),
            "rows_independent": attention and not _matrices(runtime_types),
        },
        runtime_types=runtime_types,
        compile_ms=compile_ms,
    )


def _matrices(runtime_types: dict[str, int]) -> int:
    """Layers that OpenVINO's matrix kernels run."""
    return sum(count for kind, count in runtime_types.items() if kind.partition(":")[0] in ("FullyConnected", "MatMul"))


def _kernels(own: int, runtime_types: dict[str, int]) -> str:
    """Whose kernels run the layers with weights: openvino, forgeline or both."""
    return "openvino" if not own else "both" if _matrices(runtime_types) else "forgeline"


def _bytes_per_token(compiled: ov.CompiledModel, spec: ModelSpec) -> int:
    """Keys and values of all layers, scales included, from the shapes OpenVINO chose."""
    blocks = paged.pool_blocks(compiled).values()
    assert len(blocks) == 2 * len(spec.layers), f"{len(blocks)} pools for {len(spec.layers)} layers"
    per_block = sum(block.num_bytes for block in blocks)
    assert per_block % paged.BLOCK_SIZE == 0, f"{per_block} bytes per block of {paged.BLOCK_SIZE} tokens"
    return per_block // paged.BLOCK_SIZE
