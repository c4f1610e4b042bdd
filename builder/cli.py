"""`builder build | plan | inspect | deploy`: from a model to an engine to a Triton model repository."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from builder import plan_command
from builder.config import (
    ACTIVATION_SCALES,
    COMPUTE_DTYPES,
    CPU_KERNELS,
    KV_CACHE_SCALES,
    METHODS,
    PRECISIONS,
    TARGETS,
    BuildConfig,
)
from builder.quantize.kv_dtypes import canonical
from builder.termination import EXIT_STATUS, Terminated, sigterm_raises
from builder.trtllm_flags import translate
from runtime import __version__
from runtime.contract import REPORT_JSON, load_manifest
from runtime.errors import EngineError, ForgelineError, InvalidRequest, sentence

KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "u8", "u4", "f8", "i8")  # of some target; each says which are its own
_EVERY_PRECISION = tuple(dict.fromkeys(name for names in PRECISIONS.values() for name in names))
BUILD_MODULES = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "ml_dtypes", "gguf", "safetensors", "tqdm")


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="builder", description="Build, inspect and deploy Forgeline engines.")
    main.add_argument("--version", action="version", version=f"forgeline {__version__}")
    commands = main.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="turn a model into an engine directory")
    build.add_argument(
        "model", help="Hugging Face directory, .gguf file, hub id, or a bundled name: smollm2-135m-instruct, gemma-3-270m"
    )
    build.add_argument("--output", "--output_dir", type=Path, required=True, help="the engine directory")
    build.add_argument("--target", choices=TARGETS, default="cpu", help="what runs the engine; default: cpu")
    build.add_argument("--precision", choices=_EVERY_PRECISION, help="default: fp32 on the CPU, fp16 on a GPU")
    build.add_argument("--kv-cache-dtype", type=_kv_dtype, default="auto", help="auto: by precision; or KEYS:VALUES")
    build.add_argument(
        "--compute-dtype", choices=COMPUTE_DTYPES, help="cpu: bf16 is faster, but tokens may depend on the batch; default: f32"
    )
    build.add_argument(
        "--cpu-kernels",
        choices=CPU_KERNELS,
        default="auto",
        help="cpu, of quantized layers; auto: forgeline's own with a C++ compiler and AVX512-VNNI, else OpenVINO's",
    )
    build.add_argument(
        "--kv-cache-scales",
        choices=KV_CACHE_SCALES,
        default="calibrated",
        help="of f8 keys and values; unit: 1, to see what it costs",
    )
    build.add_argument(
        "--group-size", type=int, choices=(32, 64, 128), help="int4: weights per scale; default: the largest that fits"
    )
    build.add_argument("--max-model-len", type=int, help="prompt and output tokens of one sequence; default: the model's, ≤ 8192")
    build.add_argument("--max-num-seqs", type=int, default=32, help="sequences that may run at once; default: 32")
    build.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens per step: the prefill chunk; default: 512")
    build.add_argument(
        "--eval-tokens", type=int, default=2048, help="held-out tokens for the accuracy report; 0: none; default: 2048"
    )
    build.add_argument("--max-ppl-increase", type=float, default=5.0, help="per cent of perplexity that may be lost; default: 5")
    build.add_argument(
        "--max-kl",
        type=float,
        help="mean KL divergence, in nats, that may be reached; default: 2·ln(1 + max-ppl-increase/100), 0.098 at 5",
    )
    build.add_argument("--fallback", action="store_true", help="raise the noisiest layers' precision until the limits hold")
    build.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        help="LM head and embedding in int8; default: with int8 and int4 precisions on the CPU",
    )
    build.add_argument(
        "--activation-scales", choices=ACTIVATION_SCALES, default="auto", help="auto: static for fp8, else dynamic"
    )
    build.add_argument(
        "--calibration-data", type=Path, help=".txt, or .jsonl of texts, prompts or chats; default: a built-in text"
    )
    build.add_argument(
        "--calibration-samples", type=int, default=32, help="windows of 512 tokens; 0: none, int4 rounds to nearest"
    )
    build.add_argument("--calibration-method", choices=METHODS, default="max", help="how a static range is chosen; default: max")
    build.add_argument(
        "--target-arch", type=_names, default=(), help="GPU architectures, a plan for each; tensorrt-rtx: default sm89,sm120"
    )
    build.add_argument("--workspace", type=_size, help="GPU memory a layer may use while it runs, e.g. 512M; default: no limit")
    build.add_argument("--timing-cache", type=Path, help="file of the GPU builder's timings, read when it exists and written")
    build.add_argument("--optimization-level", type=int, default=3, help="the GPU builder's effort, 0 to 5; default: 3")
    build.add_argument("--detailed-profiling", action="store_true", help="keep layer names in the plan, for profilers")
    build.add_argument("--no-cache", action="store_true", help="neither read nor write the build cache")
    build.add_argument("--json", action="store_true", help="print the report as JSON, errors too")

    plan_command.add_parser(commands, _size)

    inspect = commands.add_parser("inspect", help="check an engine and show what is in it")
    inspect.add_argument("engine", type=Path, help="the directory that `builder build` wrote")
    inspect.add_argument("--json", action="store_true", help="print the manifest and the report as JSON, errors too")

    deploy = commands.add_parser("deploy", help="write an engine into a Triton model repository")
    deploy.add_argument("engine", type=Path, help="the directory that `builder build` wrote")
    deploy.add_argument("--repository", type=Path, required=True, help="Triton's model repository; made when it is not there")
    deploy.add_argument("--name", required=True, help="the model's name in Triton")
    deploy.add_argument("--copy", action="store_true", help="copy the engine into the repository instead of pointing at it")
    deploy.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter of the model, e.g. max_num_seqs=16 or decoupled_mode=false; repeat for several",
    )  # fmt: skip
    return main


def _kv_dtype(text: str) -> str:
    names = [canonical(each) for each in text.split(":")]
    for each in names:
        if each not in KV_CACHE_DTYPES:
            raise argparse.ArgumentTypeError(f"{each!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
    return ":".join(names)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


def _size(text: str) -> int:
    """Bytes: 24GiB and 24G are powers of 1024, 24GB of 1000."""
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?)([KMGT]?)(I?B)?", text, re.IGNORECASE | re.ASCII)
    power = "KMGT".index(found[2].upper()) + 1 if found and found[2] else 0
    base = 1000 if found and (found[3] or "").upper() == "B" else 1024
    size = int(Fraction(found[1]) * base**power) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M, 1.5GiB or 24GB")
    if size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is beyond 8 EiB")
    return size


def build(arguments: argparse.Namespace) -> dict[str, Any]:
    config = BuildConfig(
        source=arguments.model,
        output=arguments.output,
        target=arguments.target,
        precision=arguments.precision or PRECISIONS[arguments.target][0],
        kv_cache_dtype=arguments.kv_cache_dtype,
        kv_cache_scales=arguments.kv_cache_scales,
        compute_dtype=arguments.compute_dtype,
        cpu_kernels=arguments.cpu_kernels,
        group_size=arguments.group_size,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        eval_tokens=arguments.eval_tokens,
        max_ppl_increase=arguments.max_ppl_increase,
        max_kl=arguments.max_kl,
        fallback=arguments.fallback,
        quantize_lm_head=arguments.quantize_lm_head,
        activation_scales=arguments.activation_scales,
        calibration_data=arguments.calibration_data,
        calibration_samples=arguments.calibration_samples,
        calibration_method=arguments.calibration_method,
        use_cache=not arguments.no_cache,
        target_arch=arguments.target_arch,
        workspace=arguments.workspace,
        timing_cache=arguments.timing_cache,
        optimization_level=arguments.optimization_level,
        detailed_profiling=arguments.detailed_profiling,
    )
    from builder.build import build as run
    from builder.report import summary

    result = run(config, quiet=arguments.json)
    if not arguments.json:
        print(summary(result.report))
        found = f"copied from {result.copied_from}: nothing to build" if result.copied_from else "unchanged inputs: nothing to do"
        print(f"engine      {result.engine}" + (f" ({found})" if result.up_to_date else ""))
    copied = {"copied_from": str(result.copied_from)} if result.copied_from else {}
    return {"engine": str(result.engine), "up_to_date": result.up_to_date, **copied, "report": result.report}


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    from builder.report import summary

    manifest = load_manifest(arguments.engine)
    try:
        report = json.loads((arguments.engine / REPORT_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{arguments.engine}: {REPORT_JSON} cannot be read ({error}); rebuild the engine") from error
    if not arguments.json:
        print(summary(report))
        print("libraries   " + ", ".join(f"{name} {version}" for name, version in manifest.libraries.items()))
        print(f"checksums   {len(manifest.checksums)} files verified")
    return {"manifest": json.loads(manifest.to_json()), "report": report}


def deploy(arguments: argparse.Namespace) -> dict[str, Any]:
    from builder.deploy import deploy as run

    options: dict[str, str] = {}
    for pair in arguments.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--set {pair!r} must have the form NAME=VALUE")
        options[name] = value
    place = run(arguments.engine, arguments.repository, arguments.name, options=options, copy=arguments.copy)
    print(f"deployed    {place}\nserve it    runtime serve --repository {arguments.repository}")
    return {"model": str(place)}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with sigterm_raises():
            return _main(argv)
    except Terminated:
        return EXIT_STATUS


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        if words[:1] == ["build"]:
            translated = translate(words[1:])
            words[1:] = translated.argv
            for note in translated.notes:
                print(f"note: {note}", file=sys.stderr)
        arguments = parser().parse_args(words)
        result = {"build": build, "plan": plan_command.run, "inspect": inspect, "deploy": deploy}[arguments.command](arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in BUILD_MODULES:
            raise
        print(f"error: building needs {error.name}, which is not installed; pip install 'forgeline[build]'", file=sys.stderr)
        return 2
    except (ForgelineError, PermissionError) as error:
        if as_json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": sentence(error)}}, ensure_ascii=False))
        else:
            print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
