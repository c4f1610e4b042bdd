"""What a value of --precision means."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import BuildError


@dataclass(frozen=True)
class Scheme:
    weights: str  # of attention and mlp: fp32, bf16, int8, int4, fp8
    activations: str = ""  # of their inputs: int8, fp8; empty: as they are
    tables: bool = False  # embedding and head in int8
    static: bool = False  # activations by calibrated scales, unless asked otherwise
    smooth: bool = False  # SmoothQuant first
    hessians: bool = False  # second moments of the inputs improve it
    wider: tuple[str, ...] = ()  # what a layer that loses too much is raised to, in turn


SCHEMES = {
    "fp32": Scheme("fp32"),
    "bf16": Scheme("bf16"),
    "int8-wo": Scheme("int8", tables=True, wider=("bf16",)),
    "int8": Scheme("int8", "int8", tables=True, wider=("bf16",)),
    "int8-sq": Scheme("int8", "int8", tables=True, smooth=True, wider=("bf16",)),
    "int4": Scheme("int4", "int8", tables=True, hessians=True, wider=("int8", "bf16")),
    "fp8": Scheme("fp8", "fp8", static=True, hessians=True, wider=("bf16",)),
}


def scheme_of(name: str) -> Scheme:
    if name not in SCHEMES:
        raise BuildError(f"unknown precision {name!r}; the precisions are {', '.join(SCHEMES)}")
    return SCHEMES[name]
