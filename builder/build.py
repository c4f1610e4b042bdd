"""The one path from a model to an engine directory. Each stage is a call into the file of that name; order and bookkeeping here.

    resolve → checkpoint → export → fuse ──(build cache)──► quantize → compile → accuracy → bundle

The exported and fused fp32 graph is cached by content, so an interrupted build resumes after it and every further precision of
the same model starts from it without torch. A build whose inputs have not changed returns the engine that is already there.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from builder import gate, model_zoo
from builder.bundle import atomic_directory, check_apart, check_replaceable, disk_errors, make_directory, require_space
from builder.cache import REMEDY as CACHE_REMEDY
from builder.cache import canonical_entry, is_whole, prune, seal, touch
from builder.checkpoint import load_checkpoint, max_positions, num_weights, source_sha256
from builder.config import BYTES_PER_WEIGHT, PRECISIONS, BuildConfig, canonical_key
from builder.report import write_report
from builder.reuse import copied, engine_at, remember
from builder.source import resolve
from builder.stages import Stages, peak_rss_bytes
from builder.staging import sweep
from runtime import __version__
from runtime.contract import (
    MANIFEST_FILE,
    PLAN_DIR,
    SCHEMA_VERSION,
    TOKENIZER_DIR,
    LayerSpec,
    Manifest,
    ModelSpec,
    PrecisionSpec,
    file_sha256,
)
from runtime.errors import BuildError

if TYPE_CHECKING:
    from builder.targets.compiled import Compiled

DEFAULT_MAX_MODEL_LEN = 8192
UNROUNDED_KV = (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"))  # of engines without quantized weights: nothing to tell apart
EXPORT_DIR = ".canonical"  # inside the staging directory, when the cache is not used
EXPORTED_BYTES_PER_WEIGHT = 4
LOWERED_DIR = ".lowered"  # inside the staging directory
STAGES = ("resolve", "export", "quantize", "compile", "accuracy", "parts", "bundle")


@dataclass(frozen=True)
class BuildResult:
    engine: Path
    report: dict[str, Any]
    up_to_date: bool  # nothing had to be done
    copied_from: Path | None = None  # the same engine, found elsewhere


def build(config: BuildConfig, *, quiet: bool = False) -> BuildResult:
    """Raises BuildError and its kinds; `config.output` is then as it was before."""
    stages = Stages(STAGES, quiet=quiet)
    try:
        return _build(config, stages)
    finally:
        stages.close()


def _build(config: BuildConfig, stages: Stages) -> BuildResult:
    with stages("resolve"):
        source = model_zoo.resolve(config.source)
        check_apart(config.output, resolve(source).path)
        _check_length(config, max_positions(source), source)
        sha256 = source_sha256(source)
        key = config.key(sha256)
        if (report := engine_at(config.output, key)) is not None:
            return BuildResult(config.output, report, up_to_date=True)
        check_replaceable(config.output)
        if config.use_cache and (found := copied(config.output, key)) is not None:
            return BuildResult(config.output, found[1], up_to_date=True, copied_from=found[0])
        _check_options(config)
        per_weight = BYTES_PER_WEIGHT[config.precision] + (0 if config.use_cache else EXPORTED_BYTES_PER_WEIGHT)
        require_space(config.output, int(per_weight * num_weights(source)), "the engine")
    with atomic_directory(config.output) as staging:
        with stages("export"):
            canonical = _canonical(source, sha256, config, staging, stages)
        spec = _read_spec(canonical)
        report = _finish(config, stages, canonical, spec, staging, key)
    if config.use_cache:
        remember(key, config.output)
    return BuildResult(config.output, report, up_to_date=False)


def _check_options(config: BuildConfig) -> None:
    """Before the minutes that export and calibration take."""
    if config.calibration_data is not None:
        from builder.calibration_data import read

        read(config.calibration_data)
    if config.target == "cpu":
        from builder.targets.openvino_engine import check_options as check_cpu

        check_cpu(config)
    else:
        from builder.targets.tensorrt_engine import check_options

        check_options(config)


def _check_length(config: BuildConfig, positions: int | None, name: str) -> None:
    if positions is not None and (config.max_model_len or 0) > positions:
        raise BuildError(
            f"--max-model-len {config.max_model_len} exceeds the {positions} positions {name} was trained for; "
            f"use {positions} or less"
        )


# ------------------------------------------------------------------------------------------------------- canonical graph


def _canonical(source: str, sha256: str, config: BuildConfig, staging: Path, stages: Stages) -> Path:
    """Directory with model.onnx, spec.json, fusion.json and tokenizer/: from the cache, or exported now."""
    if not config.use_cache:
        return _export(source, staging / EXPORT_DIR)
    entry = canonical_entry(canonical_key(sha256))
    with disk_errors(entry.parent, CACHE_REMEDY):
        make_directory(entry.parent, CACHE_REMEDY)
        sweep(entry.parent)
        if not is_whole(entry):
            if entry.exists():
                stages.note(f"{entry} is not as it was written; the model is exported again")
            need = EXPORTED_BYTES_PER_WEIGHT * num_weights(source)
            require_space(entry.parent, need, "the exported graph in the build cache", CACHE_REMEDY)
            with atomic_directory(entry, replace=True, remedy=CACHE_REMEDY) as place:  # another build may have been faster
                _export(source, place)
                seal(place)
            prune(entry.parent, keep=entry)
        touch(entry)
    return entry


def _export(source: str, place: Path) -> Path:
    from builder.export import export_model
    from builder.fuse import fuse
    from builder.fuse.merge import PARTS
    from plugins.paged_attention.op import attach_functions

    place.mkdir(exist_ok=True)
    checkpoint = load_checkpoint(source)
    model = export_model(checkpoint.model, checkpoint.spec)
    checkpoint.write_tokenizer(place / TOKENIZER_DIR)
    spec, origin = checkpoint.spec, checkpoint.origin
    del checkpoint
    gc.collect()
    fusion = fuse(model, spec)
    parts = {name: value.meta[PARTS] for name, value in model.graph.initializers.items() if PARTS in value.meta}
    origin.fused(parts, model.graph.initializers).save(place)
    attach_functions(model)
    ir.save(model, place / "model.onnx", external_data="weights.bin")
    (place / "fusion.json").write_text(json.dumps(dataclasses.asdict(fusion), indent=2))
    (place / "spec.json").write_text(json.dumps(dataclasses.asdict(spec), indent=2))
    return place


def _read_spec(canonical: Path) -> ModelSpec:
    data = json.loads((canonical / "spec.json").read_text(encoding="utf-8"))
    data["layers"] = tuple(LayerSpec(**layer) for layer in data["layers"])
    data["eos_token_ids"] = tuple(data["eos_token_ids"])
    return ModelSpec(**data)


# --------------------------------------------------------------------------------------------------- target and accuracy


@dataclass(frozen=True)
class Attempt:
    plan: Compiled
    manifest: Manifest
    accuracy: dict[str, Any]


def _finish(config: BuildConfig, stages: Stages, canonical: Path, spec: ModelSpec, staging: Path, key: str) -> dict[str, Any]:
    max_model_len = config.max_model_len or min(spec.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    _check_length(config, spec.max_position_embeddings, spec.name)
    shutil.copytree(canonical / TOKENIZER_DIR, staging / TOKENIZER_DIR)
    attempt = _accepted(config, stages, canonical, spec, staging, max_model_len)
    plan, manifest, accuracy = attempt.plan, attempt.manifest, attempt.accuracy
    quantization = plan.quantization
    with stages("bundle"):
        files = sorted(file for place in (PLAN_DIR, TOKENIZER_DIR) for file in (staging / place).rglob("*") if file.is_file())
        build = {
            "key": key,
            "seconds": {name: round(s, 3) for name, s in stages.seconds.items()},
            "peak_rss_bytes": peak_rss_bytes(),
        }
        manifest = dataclasses.replace(
            manifest,
            checksums={str(file.relative_to(staging)): file_sha256(file) for file in files},
            accuracy=accuracy,
            build=build,
        )
        report = {
            "model": {**dataclasses.asdict(spec), "layers": len(spec.layers)},
            "target": manifest.target,
            "precision": manifest.precision.name,
            "fusion": json.loads((canonical / "fusion.json").read_text(encoding="utf-8")),
            "weights": quantization.to_dict(),
            "memory": {
                "key_dtype": plan.kv_cache.key_dtype,
                "value_dtype": plan.kv_cache.value_dtype,
                "block_size": plan.kv_cache.block_size,
                "kv_bytes_per_token": plan.kv_cache.bytes_per_token,
                "max_model_len": max_model_len,
                "kv_bytes_per_sequence": plan.kv_cache.bytes_per_token * max_model_len,
                "unit_scales": config.kv_cache_scales == "unit",
            },
            "compiled": {
                "activations": plan.activations,
                "arithmetic": plan.details.get("arithmetic", ""),
                "emulated": plan.emulated,
                "runtime_types": plan.runtime_types,
                "compile_ms": round(plan.compile_ms, 1),
            },
            **plan.report,
            "accuracy": accuracy,
            "build": build,
        }
        write_report(staging, report)
        for scratch in (EXPORT_DIR, LOWERED_DIR):
            shutil.rmtree(staging / scratch, ignore_errors=True)
        (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return report


def _accepted(
    config: BuildConfig, stages: Stages, canonical: Path, spec: ModelSpec, staging: Path, max_model_len: int
) -> Attempt:
    """Compile and measure, with --fallback again and again, until the accuracy limits hold.

    Raises  AccuracyGate
    """
    limits = gate.Limits.of(config.max_ppl_increase, config.max_kl)
    overrides: dict[str, str] = {}
    steps: list[dict[str, Any]] = []
    count = 1
    while True:
        attempt = _attempt(config, stages, canonical, spec, staging, max_model_len, overrides)
        if not attempt.accuracy:
            return attempt
        verdict = gate.check(attempt.accuracy, limits)
        layers = attempt.plan.quantization.layers
        attempt.accuracy["gate"] = {**dataclasses.asdict(limits), "passed": verdict.passed}
        wider = overrides
        if not verdict.passed and config.fallback:
            wider = gate.raised(config.precision, layers, overrides, count, attempt.plan.wider)
        if verdict.passed or wider == overrides:
            with stages("parts"):
                attempt.accuracy.update(_parts(config, canonical, staging, attempt, stages.progress))
        if verdict.passed:
            attempt.accuracy["fallback"] = {"steps": steps, "raised": overrides} if steps else {}
            return attempt
        if wider == overrides:
            kv = attempt.plan.kv_cache
            raise gate.refusal(
                config.precision,
                kv.key_dtype,
                kv.value_dtype,
                verdict,
                layers,
                attempt.accuracy.get("parts", {}),
                static=attempt.manifest.precision.details.get("activation_scales") == "static",
                fallback=config.fallback,
                available=PRECISIONS[config.target],
                cache=attempt.accuracy.get("kv_cache_sqnr_db", {}),
                unit_scales=config.kv_cache_scales == "unit",
            )
        steps.append({"ppl_increase": verdict.ppl_increase, "mean_kl": verdict.mean_kl, "raised": len(overrides)})
        stages.note(f"{'; '.join(verdict.failures)}: raising {len(wider)} of {len(layers)} layers")
        overrides, count = wider, 2 * count


def _attempt(
    config: BuildConfig,
    stages: Stages,
    canonical: Path,
    spec: ModelSpec,
    staging: Path,
    max_model_len: int,
    overrides: dict[str, str],
) -> Attempt:
    if config.target == "cpu":
        from builder.targets.openvino_engine import compile_engine as compile_cpu

        plan = compile_cpu(config, stages, canonical, spec, staging, overrides)
    else:
        from builder.targets.tensorrt_engine import compile_engine

        plan = compile_engine(config, stages, canonical, spec, staging, staging / LOWERED_DIR, max_model_len, overrides)
    gc.collect()
    quantization = plan.quantization
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        forgeline_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        target=config.target,
        model=spec,
        precision=PrecisionSpec(
            name=config.precision,
            weights=quantization.dtype_of("mlp"),
            activations=plan.activations,
            embedding=quantization.dtype_of("embedding"),
            lm_head=quantization.dtype_of("lm_head"),
            group_size=quantization.group_size,
            emulated=plan.emulated,
            details=plan.details,
        ),
        kv_cache=plan.kv_cache,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        libraries=plan.libraries,
        plan=plan.plan,
        checksums={},
        weight_bytes=plan.weight_bytes,
        **plan.manifest,
    )
    with stages("accuracy"):
        accuracy = _accuracy(config, canonical, staging, manifest, plan, stages) if config.eval_tokens else {}
    return Attempt(plan, manifest, accuracy)


def _accuracy(
    config: BuildConfig, canonical: Path, staging: Path, manifest: Manifest, plan: Compiled, stages: Stages
) -> dict[str, Any]:
    """The compiled engine on held-out text, beside the fp32 graph on the reference executor."""
    from builder.judge import judge, pool_tokens

    text = _heldout(config, staging, manifest)
    return judge(
        canonical / "model.onnx",
        lambda: plan.executor(manifest, pool_tokens(text["context"])),
        **text,
        progress=stages.progress,
    )


def _parts(
    config: BuildConfig, canonical: Path, staging: Path, attempt: Attempt, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """What weights, activations and KV cache lose, each with those before it, and how noisy each layer's cache is.

    Nothing where nothing is rounded to eight bits or fewer.
    """
    from builder.judge import PART_TOKENS, parts
    from builder.kv_noise import cache_noise

    kv = attempt.manifest.kv_cache
    if not attempt.plan.quantization.is_quantized and (kv.key_dtype, kv.value_dtype) in UNROUNDED_KV:
        return {}
    text = _heldout(config, staging, attempt.manifest)
    tokens = text["token_ids"] = text["token_ids"][:PART_TOKENS]
    windows = [tokens[begin : begin + text["context"]] for begin in range(0, len(tokens), text["context"])]
    return {
        "parts": parts(canonical / "model.onnx", attempt.plan.graph, **text, progress=progress),
        "kv_cache_sqnr_db": cache_noise(attempt.plan.graph, windows, num_threads=text["num_threads"]),
    }


def _heldout(config: BuildConfig, staging: Path, manifest: Manifest) -> dict[str, Any]:
    from builder.calibration_data import added_bos
    from builder.data import heldout_text
    from builder.judge import CONTEXT
    from runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(staging / TOKENIZER_DIR)
    return {
        "token_ids": tokenizer.encode(heldout_text(), add_special_tokens=False)[: config.eval_tokens],
        "context": min(CONTEXT, manifest.max_model_len),
        "bos_token_id": added_bos(tokenizer),
        "num_threads": len(os.sched_getaffinity(0)),
    }
