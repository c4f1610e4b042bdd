"""From the canonical graph to a TensorRT engine's plans: calibrate, quantize, lower, build, and something to measure accuracy on.

No GPU runs here, so accuracy is that of the lowered graph on ONNX Runtime (tensorrt_reference.py): the same weights, quantizers
and 16-bit roundings, by other kernels. `details` in the manifest says so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from builder.config import BuildConfig
from builder.stages import Stages
from builder.targets import tensorrt, tensorrt_quantize
from builder.targets.compiled import Compiled
from builder.targets.tensorrt_adapter import BuildOptions
from builder.targets.tensorrt_reference import to_reference
from runtime.contract import PLAN_DIR, TOKENIZER_DIR, Manifest, ModelSpec
from runtime.executors.base import Executor
from runtime.executors.reference import ReferenceExecutor

CALIBRATION_TOKENS = 4096
_BLOCK_SIZE = 32  # of the reference executor


def compile_engine(
    config: BuildConfig, stages: Stages, canonical: Path, spec: ModelSpec, staging: Path, work_dir: Path, max_model_len: int
) -> Compiled:
    """Plans in `staging`; the lowered graph in `work_dir`, which may go when accuracy has been measured."""
    kv = tensorrt.resolve_kv_dtype(config.kv_cache_dtype, config.precision)
    architectures = tensorrt.resolve_architectures(config.target, config.target_arch)
    model = ir.load(canonical / "model.onnx")
    with stages("quantize"):
        threads = len(os.sched_getaffinity(0))
        calibration = tensorrt.calibrate_for(
            canonical / "model.onnx", model, config.precision, kv, lambda: _calibration_tokens(canonical), threads
        )
        roles = tensorrt_quantize.roles(model)
        quantization = tensorrt_quantize.quantize(
            model,
            config.precision,
            group_size=config.group_size,
            activations=tensorrt.activations(config.precision),
            amax=calibration.amax,
        )
    with stages("compile"):
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

    def executor(_manifest: Manifest, context: int) -> Executor:
        reference = work_dir / "reference.onnx"
        ir.save(to_reference(ir.load(work_dir / "model.onnx")), reference, external_data="reference.bin")
        return ReferenceExecutor(reference, num_blocks=-(-context // _BLOCK_SIZE), block_size=_BLOCK_SIZE)

    return Compiled(
        quantization=quantization,
        plan=plan.plan,
        kv_cache=plan.kv_cache,
        libraries=plan.libraries,
        weight_bytes=plan.weight_bytes,
        activations=plan.activations,
        details=plan.details,
        runtime_types=plan.runtime_types,
        compile_ms=plan.compile_ms,
        executor=executor,
        manifest={
            "gpu_architectures": plan.gpu_architectures,
            "buckets": plan.buckets,
            "profiles": plan.profiles,
            "plugin_sha256": plan.plugin_sha256,
            "calibration_sha256": calibration.sha256,
        },
        report={"plans": tensorrt.report(plan)},
    )


def _calibration_tokens(canonical: Path) -> Sequence[int]:
    from builder.data import calibration_text
    from runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(canonical / TOKENIZER_DIR)
    return tokenizer.encode(calibration_text(), add_special_tokens=False)[:CALIBRATION_TOKENS]
