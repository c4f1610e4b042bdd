"""What a build was asked for. `BuildConfig.key` names everything that can change the result, so equal keys mean equal engines."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BuildError

_GPU_PRECISIONS = ("fp16", "bf16", "fp8", "int8", "int8-sq", "int4")
PRECISIONS = {
    "cpu": ("fp32", "bf16", "int8", "int8-wo", "int8-sq", "int4", "fp8"),
    "tensorrt": _GPU_PRECISIONS,
    "tensorrt-rtx": _GPU_PRECISIONS,
}
TARGETS = tuple(PRECISIONS)
# What an engine takes at least; scales, norms and layers that stay wider come on top.
BYTES_PER_WEIGHT = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int8-wo": 1.0, "int8-sq": 1.0, "int4": 0.5,
}  # fmt: skip
_TARGET_PACKAGES = {"cpu": "openvino", "tensorrt": "tensorrt_cu13", "tensorrt-rtx": "tensorrt_rtx_cu13"}
COMPUTE_DTYPES = ("f32", "bf16")
CPU_KERNELS = ("auto", "forgeline", "openvino")  # of quantized layers
METHODS = ("max", "percentile", "mse", "entropy")  # of choosing a static range
ACTIVATION_SCALES = ("auto", "dynamic", "static")
KV_CACHE_SCALES = ("calibrated", "unit")
_NOT_IN_KEY = ("source", "output", "use_cache", "timing_cache")  # options that do not change the engine
_CODE = (".py", ".cpp", ".h")
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "openvino", "numpy")


@dataclass(frozen=True)
class BuildConfig:
    source: str
    output: Path
    target: str = "cpu"
    precision: str = "fp32"
    kv_cache_dtype: str = "auto"
    kv_cache_scales: str = "calibrated"  # of f8 keys and values; unit: 1, as servers have it that were given none
    compute_dtype: str | None = None  # cpu only: f32 or bf16; None: f32
    cpu_kernels: str = "auto"  # cpu only: forgeline, openvino; auto: forgeline's own where they can be compiled
    group_size: int | None = None  # int4 only; None: the largest of 128, 64, 32 that divides every layer's width
    max_model_len: int | None = None  # None: what the model was trained for, at most 8192
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    eval_tokens: int = 2048  # held-out tokens for the accuracy report; 0 = none
    max_ppl_increase: float = 5.0  # per cent; more fails the build
    max_kl: float | None = None  # nats, mean over tokens; more fails the build; None: 2·ln(1 + max_ppl_increase/100)
    fallback: bool = False  # raise the precision of the noisiest layers instead of failing
    quantize_lm_head: bool | None = None  # and the embedding; None: as the precision has it
    activation_scales: str = "auto"  # dynamic, or static from calibration; auto: as the precision has it
    calibration_data: Path | None = None  # None: the built-in text
    calibration_samples: int = 32  # windows of 512 tokens; 0 = none: int4 rounds to nearest
    calibration_method: str = "max"  # how a static range is chosen
    use_cache: bool = True
    # The TensorRT targets only
    target_arch: tuple[str, ...] = ()  # such as ("sm89", "sm120"); empty: the target's default
    workspace: int | None = None  # bytes a layer may use; None: as much as there is
    timing_cache: Path | None = None  # file that is read and written
    optimization_level: int = 3  # 0 to 5: the builder's effort
    detailed_profiling: bool = False  # keep layer names in the plan

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise BuildError(f"unknown target {self.target!r}; the targets are {', '.join(TARGETS)}")
        if self.precision not in PRECISIONS[self.target]:
            raise BuildError(
                f"--precision {self.precision} is not available for --target {self.target}; its precisions are "
                f"{', '.join(PRECISIONS[self.target])}"
            )
        if self.target == "cpu":
            for name, given in (
                ("target-arch", self.target_arch),
                ("workspace", self.workspace),
                ("timing-cache", self.timing_cache),
            ):
                if given:
                    raise BuildError(f"--{name} is for the TensorRT targets, not for --target cpu; leave it out")
        self._check_compute_dtype()
        if self.cpu_kernels not in CPU_KERNELS:
            raise BuildError(f"unknown --cpu-kernels {self.cpu_kernels!r}; choose one of {', '.join(CPU_KERNELS)}")
        if self.cpu_kernels != "auto" and self.target != "cpu":
            raise BuildError(
                f"--cpu-kernels {self.cpu_kernels} is for --target cpu, not for --target {self.target}; leave it out"
            )
        if not 0 <= self.optimization_level <= 5:
            raise BuildError(f"--optimization-level is {self.optimization_level} but must be from 0 to 5")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "group_size", "workspace"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BuildError(f"--{name.replace('_', '-')} is {value} but must be at least 1")
        if self.max_model_len == 1:
            raise BuildError("--max-model-len is 1 but must be at least 2: a prompt and an output token")
        if self.group_size is not None and self.precision != "int4":
            raise BuildError(f"--group-size {self.group_size} is for --precision int4, not {self.precision}; leave it out")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BuildError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is smaller than --max-num-seqs {self.max_num_seqs}, "
                f"so a full batch could not decode; raise it to at least {self.max_num_seqs}"
            )
        for name in ("max_ppl_increase", "max_kl"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise BuildError(f"--{name.replace('_', '-')} is {value} but must be finite and 0 or more")
        if self.activation_scales not in ACTIVATION_SCALES:
            raise BuildError(
                f"unknown --activation-scales {self.activation_scales!r}; choose one of {', '.join(ACTIVATION_SCALES)}"
            )
        self._check_activation_scales()
        self._check_kv_cache_scales()
        if self.calibration_samples < 0:
            raise BuildError(f"--calibration-samples is {self.calibration_samples} but must be 0 or more")
        if self.eval_tokens < 0 or self.eval_tokens == 1:
            raise BuildError(f"--eval-tokens is {self.eval_tokens} but must be 0 (no evaluation) or at least 2")
        for name, given in (("max-kl", self.max_kl is not None), ("fallback", self.fallback)):
            if given and not self.eval_tokens:
                raise BuildError(
                    f"--{name} needs a measurement, and with --eval-tokens 0 nothing is measured; leave one of them out"
                )

    def _check_compute_dtype(self) -> None:
        if self.compute_dtype is None:
            return
        asked = f"--compute-dtype {self.compute_dtype}"
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise BuildError(f"unknown {asked}; choose one of {', '.join(COMPUTE_DTYPES)}")
        if self.target != "cpu":
            raise BuildError(
                f"{asked} is for --target cpu, not for --target {self.target}, where --precision decides; leave it out"
            )
        if self.compute_dtype == "bf16" and self.precision == "fp32":
            raise BuildError(
                f"{asked} is not available for --precision fp32, which means f32 arithmetic too; choose --precision bf16"
            )
        if self.compute_dtype == "bf16" and (self.precision == "fp8" or self.activation_scales == "static"):
            rounding = "--precision fp8" if self.precision == "fp8" else "--activation-scales static"
            raise BuildError(f"{asked} is not available with {rounding}, whose rounding is emulated in exact f32; leave it out")

    def _check_activation_scales(self) -> None:
        from builder.quantize.scheme import SCHEMES  # its package needs this file

        if self.target == "cpu" and self.activation_scales != "auto" and not SCHEMES[self.precision].activations:
            rounding = ", ".join(name for name in PRECISIONS["cpu"] if SCHEMES[name].activations)
            raise BuildError(
                f"--activation-scales {self.activation_scales} has no meaning for --precision {self.precision}, whose layers "
                f"take their inputs as they are; leave it out, or choose one of {rounding}"
            )

    def _check_kv_cache_scales(self) -> None:
        if self.kv_cache_scales not in KV_CACHE_SCALES:
            raise BuildError(f"unknown --kv-cache-scales {self.kv_cache_scales!r}; choose one of {', '.join(KV_CACHE_SCALES)}")
        if self.kv_cache_scales == "calibrated":
            return
        if self.target == "cpu":
            raise BuildError(
                "--kv-cache-scales unit is not available for --target cpu, whose caches have no scale from outside: u8 and u4 "
                "compute one per token, f32 and f16 need none; leave it out, or judge an FP8 cache with --target tensorrt-rtx"
            )
        from builder.quantize.kv_dtypes import parse_pair  # its package needs this file

        if self.kv_cache_dtype == "auto" or "f8" not in (pair := parse_pair(self.kv_cache_dtype)) or "i8" in pair:
            raise BuildError(
                f"--kv-cache-scales unit is for keys or values stored as f8, not for --kv-cache-dtype {self.kv_cache_dtype}; use "
                "f8 or a pair such as bf16:f8, or leave it out"
            )

    def key(self, source_sha256: str) -> str:
        """Hash of the model's content, every option that shapes the engine, this package's code and the libraries' versions."""
        options = dataclasses.asdict(self)
        for name in _NOT_IN_KEY:
            del options[name]
        options["calibration_data"] = content_sha256(self.calibration_data)
        options["target_library"] = _version(_TARGET_PACKAGES[self.target])
        if self.target == "cpu" and self.cpu_kernels != "openvino":
            from plugins.quantized_matmul import native  # needs openvino

            options["compiled_kernels"] = native.why_not() or native.identity()
        return _digest({"source": source_sha256, "options": options, "code": code_sha256("builder", "plugins", "runtime")})


# What turns a checkpoint into the exported, fused graph; a change elsewhere leaves cached graphs valid.
CANONICAL_CODE = (
    "builder/attention_hook.py", "builder/checkpoint.py", "builder/export.py", "builder/families.py", "builder/fuse",
    "builder/normal_form.py", "builder/quantized", "builder/source.py", "plugins/paged_attention/op.py",
    "plugins/paged_attention/spec.py",
)  # fmt: skip


def canonical_key(source_sha256: str) -> str:
    """Names the exported and fused graph, which every precision and target of one model shares."""
    return _digest({"source": source_sha256, "code": code_sha256(*CANONICAL_CODE)})


def _digest(parts: dict[str, object]) -> str:
    parts["libraries"] = {name: _version(name) for name in LIBRARIES}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def content_sha256(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        if path.exists() and not path.is_file():  # a pipe could be read once only, a device without end
            raise BuildError(f"{path} is {'a directory' if path.is_dir() else 'no regular file'}; give a .txt or .jsonl file")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"{path} cannot be read ({error.strerror}); give a readable .txt or .jsonl file") from error


def code_sha256(*parts: str) -> str:
    """Hash of this installation's own source under the given packages or files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for part in parts:
        place = root / part
        for file in sorted(file for file in place.rglob("*") if file.suffix in _CODE) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
