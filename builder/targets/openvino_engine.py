"""The CPU target as the build sees it: calibrate what the precision needs, quantize, compile, and how to run the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from builder import calibration_data
from builder.calibration import Calibration, collect
from builder.config import BuildConfig
from builder.quantize import kv_cache, layer_inputs, quantize
from builder.quantize.scheme import scheme_of
from builder.quantized.grid import Origin
from builder.stages import Stages
from builder.targets import openvino_kernels
from builder.targets.compiled import Compiled
from builder.targets.openvino import build_plan, check_kv_dtype, require, resolve_kv_dtype
from runtime.contract import PLAN_DIR, TOKENIZER_DIR, Manifest, ModelSpec
from runtime.errors import BuildError
from runtime.executors.base import Executor
from runtime.executors.openvino import OpenVINOExecutor
from runtime.tokenizer import Tokenizer

_REPORT_SAMPLES, _REPORT_CONTEXT = 1, 256  # enough text to say which layers are noisy, where nothing needs calibration


def check_options(config: BuildConfig) -> None:
    """What can be refused before there is a graph."""
    compute_dtype = config.compute_dtype or "f32"
    require(compute_dtype)
    openvino_kernels.require(config.cpu_kernels, compute_dtype)
    if config.kv_cache_dtype not in ("f32", "f32:f32"):  # which a model with its attention unfused has whatever it computes in
        check_kv_dtype(config.kv_cache_dtype, compute_dtype)


def compile_engine(
    config: BuildConfig, stages: Stages, canonical: Path, spec: ModelSpec, staging: Path, overrides: Mapping[str, str]
) -> Compiled:
    threads = len(os.sched_getaffinity(0))
    model = ir.load(canonical / "model.onnx")  # weights stay on disk, mapped
    compute_dtype = config.compute_dtype or "f32"
    key_dtype, value_dtype = resolve_kv_dtype(config.kv_cache_dtype, config.precision, model, compute_dtype)
    scheme = scheme_of(config.precision)
    static = scheme.static if config.activation_scales == "auto" else config.activation_scales == "static"
    with stages("quantize"):
        calibration = _calibrate(config, stages, canonical, model, static, threads)
        quantization = quantize(
            model,
            config.precision,
            group_size=config.group_size,
            tables=config.quantize_lm_head,
            static_activations=static,
            calibration_method=config.calibration_method,
            stats=calibration.stats,
            overrides=overrides,
            origin=Origin.load(canonical),
            progress=stages.progress,
        )
        kv_cache.insert(model, key_dtype, value_dtype)
    with stages("compile"):
        kernels, without = openvino_kernels.choose(config.cpu_kernels, compute_dtype, use_cache=config.use_cache)
        shutil.rmtree(staging / PLAN_DIR, ignore_errors=True)  # of an attempt before
        plan = build_plan(
            model,
            staging / PLAN_DIR,
            spec,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            precision=config.precision,
            compute_dtype=compute_dtype,
            kernels=kernels,
            num_threads=threads,
        )
    if without and plan.activations == "int8":
        stages.note(f"OpenVINO's kernels, not forgeline's own: {without}")
    if plan.emulated:
        stages.note(
            f"{plan.activations} arithmetic is emulated on the cpu target: it judges accuracy and says nothing about speed"
        )

    def executor(manifest: Manifest, context: int) -> Executor:
        return OpenVINOExecutor(staging, manifest, -(-context // manifest.kv_cache.block_size), threads)

    rounds_inputs = plan.activations not in ("fp32", "bf16")
    return Compiled(
        quantization=quantization,
        plan=plan.plan,
        kv_cache=plan.kv_cache,
        libraries=plan.libraries,
        weight_bytes=plan.weight_bytes,
        activations=plan.activations,
        emulated=plan.emulated,
        details={**plan.details, **({"activation_scales": "static" if static else "dynamic"} if rounds_inputs else {})},
        runtime_types=plan.runtime_types,
        compile_ms=plan.compile_ms,
        executor=executor,
        graph=staging / plan.plan["canonical"],
        manifest={"calibration_sha256": calibration.sha256 if _needs(config, static) else ""},
    )


def _needs(config: BuildConfig, static: bool) -> bool:
    scheme = scheme_of(config.precision)
    return bool(scheme.activations and static) or scheme.smooth or (scheme.hessians and config.calibration_samples > 0)


def _calibrate(config: BuildConfig, stages: Stages, canonical: Path, model: ir.Model, static: bool, threads: int) -> Calibration:
    scheme = scheme_of(config.precision)
    needed = _needs(config, static)
    if needed and not config.calibration_samples:
        raise BuildError(
            f"--precision {config.precision} with {'static' if static else 'dynamic'} scales needs calibration, but "
            "--calibration-samples is 0; leave it out"
        )
    if not needed and not (config.eval_tokens or config.fallback):
        return Calibration()
    tokenizer = Tokenizer.load(canonical / TOKENIZER_DIR)
    size = {} if needed else {"context": _REPORT_CONTEXT}
    samples = config.calibration_samples if needed else _REPORT_SAMPLES
    return collect(
        canonical / "model.onnx",
        calibration_data.load(config.calibration_data, tokenizer, samples=samples, **size),
        layer_inputs(model, config.precision, tables=config.quantize_lm_head),
        {},
        model_key=canonical.name if config.use_cache else "",
        hessians=scheme.hessians and needed,
        num_threads=threads,
        progress=stages.progress,
    )
