"""From the canonical graph to a TensorRT engine's plans: calibrate, quantize, lower, build, and something to measure accuracy on.

No GPU runs here, so accuracy is that of the lowered graph on ONNX Runtime (tensorrt_reference.py): the same weights, quantizers
and 16-bit roundings, by other kernels. `details` in the manifest says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from builder.config import BuildConfig
from builder.quantized.grid import Origin
from builder.stages import Stages
from builder.targets import tensorrt, tensorrt_quantize
from builder.targets.compiled import Compiled
from builder.targets.tensorrt_adapter import TENSORRT_RTX, BuildOptions, library
from builder.targets.tensorrt_calibrate import calibrate
from builder.targets.tensorrt_reference import to_reference
from runtime.contract import PLAN_DIR, Manifest, ModelSpec
from runtime.errors import BuildError
from runtime.executors.base import Executor
from runtime.executors.reference import ReferenceExecutor

_BLOCK_SIZE = 32  # of the reference executor


def check_options(config: BuildConfig) -> None:
    """What can be refused before there is a graph."""
    _check_activation_scales(config, tensorrt_quantize.SCHEMES[config.precision].activations)
    tensorrt.resolve_kv_dtype(config.kv_cache_dtype, config.precision)
    tensorrt.resolve_architectures(config.target, config.target_arch)
    library(config.target)


def compile_engine(
    config: BuildConfig,
    stages: Stages,
    canonical: Path,
    spec: ModelSpec,
    staging: Path,
    work_dir: Path,
    max_model_len: int,
    overrides: Mapping[str, str] | None = None,
) -> Compiled:
    """Plans in `staging`; the lowered graph in `work_dir`, which may go when accuracy has been measured.

    `overrides`   weight → a wider type than the precision's, of a fallback
    """
    scheme = tensorrt_quantize.SCHEMES[config.precision]
    kv = tensorrt.resolve_kv_dtype(config.kv_cache_dtype, config.precision)
    architectures = tensorrt.resolve_architectures(config.target, config.target_arch)
    if config.timing_cache is not None and config.target == TENSORRT_RTX:
        stages.note("--timing-cache has no effect: TensorRT-RTX times no kernels when it builds, it compiles them when it runs")
    model = ir.load(canonical / "model.onnx")
    origin = Origin.load(canonical)
    with stages("quantize"):
        calibration = calibrate(
            config,
            canonical,
            model,
            [tensorrt.KINDS[each] for each in kv],
            origin=origin,
            num_threads=len(os.sched_getaffinity(0)),
            progress=stages.progress,
        )
        roles = tensorrt_quantize.roles(model)
        quantization = tensorrt_quantize.quantize(
            model,
            config.precision,
            group_size=config.group_size,
            narrow=tensorrt.activations(config.precision),
            head=config.quantize_lm_head,
            calibration_method=config.calibration_method,
            stats=calibration.stats,
            overrides=overrides,
            origin=origin,
            keep_values=bool(calibration.kv_scales),
            progress=stages.progress,
        )
    with stages("compile"):
        for place in (staging / PLAN_DIR, work_dir):
            shutil.rmtree(place, ignore_errors=True)  # of an attempt before
        plan = tensorrt.build_plan(
            model,
            staging / PLAN_DIR,
            spec,
            roles=roles,
            target=config.target,
            precision=config.precision,
            kv=kv,
            architectures=architectures,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            work_dir=work_dir,
            kv_scales=calibration.kv_scales,
            options=BuildOptions(
                workspace_bytes=config.workspace,
                timing_cache=config.timing_cache,
                optimization_level=config.optimization_level,
                detailed=config.detailed_profiling,
            ),
        )
        del model

    reference = work_dir / "reference.onnx"

    def executor(_manifest: Manifest, context: int) -> Executor:
        ir.save(to_reference(ir.load(work_dir / "model.onnx")), reference, external_data="reference.bin")
        return ReferenceExecutor(reference, num_blocks=-(-context // _BLOCK_SIZE), block_size=_BLOCK_SIZE)

    return Compiled(
        quantization=quantization,
        plan=plan.plan,
        kv_cache=plan.kv_cache,
        libraries=plan.libraries,
        weight_bytes=plan.weight_bytes,
        activations=plan.activations,
        details={**plan.details, "calibrated_kv_scales": bool(calibration.kv_scales) and config.kv_cache_scales == "calibrated"},
        runtime_types=plan.runtime_types,
        compile_ms=plan.compile_ms,
        executor=executor,
        graph=reference,
        manifest={
            "gpu_architectures": plan.gpu_architectures,
            "buckets": plan.buckets,
            "profiles": plan.profiles,
            "plugin_sha256": plan.plugin_sha256,
            "calibration_sha256": calibration.sha256,
        },
        report={"plans": tensorrt.report(plan)},
        wider=scheme.wider,
    )


def _check_activation_scales(config: BuildConfig, rounds: str) -> None:
    wanted = config.activation_scales
    if wanted != "auto" and (wanted, bool(rounds)) != ("static", True):
        only = "they are static" if rounds else "its inputs stay 16 bit; fp8 and int8-sq round theirs, by static scales"
        raise BuildError(
            f"--activation-scales {wanted} is not available for --target {config.target} --precision {config.precision}: {only}; "
            "leave the option out"
        )
