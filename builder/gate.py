"""Accept or refuse an engine by the accuracy it lost, and raise the precision of its worst layers until it is accepted.

`check`      compares a report with the limits and says by how much each is exceeded
`raised`     the next step of a fallback: the noisiest layers, twice as many each time, one step wider each
`refusal`    the error: figures, worst layers and the three remedies most likely to work
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.quantize import LayerReport
from builder.quantize.scheme import scheme_of
from runtime.errors import AccuracyGate

DEFAULT_MAX_PPL_INCREASE = 5.0
_SHOWN = 5


@dataclass(frozen=True)
class Limits:
    """`of` fills in a KL limit that was not given: twice what the perplexity limit is worth.

    On text that the model predicts as well as it believes, log perplexity rises by the mean KL divergence: 5 % is 0.049 nats. On
    text it knows little of, perplexity may even fall while the predictions change, and only KL sees it.
    """

    max_ppl_increase: float  # per cent above the unquantized model
    max_kl: float  # nats, mean over tokens

    @classmethod
    def of(cls, max_ppl_increase: float = DEFAULT_MAX_PPL_INCREASE, max_kl: float | None = None) -> Limits:
        return cls(max_ppl_increase, 2 * math.log1p(max_ppl_increase / 100) if max_kl is None else max_kl)


@dataclass(frozen=True)
class Verdict:
    ppl_increase: float  # per cent
    mean_kl: float
    failures: tuple[str, ...]  # a phrase for each limit exceeded
    exceeded: tuple[str, ...] = ()  # the options that set these limits

    @property
    def passed(self) -> bool:
        return not self.failures


def check(accuracy: Mapping[str, Any], limits: Limits) -> Verdict:
    """`accuracy` as in the manifest: fields of AccuracyReport."""
    increase = 100 * (accuracy["perplexity_ratio"] - 1)
    kl = accuracy["mean_kl"]
    failures, exceeded = [], []
    if not increase <= limits.max_ppl_increase:  # a NaN fails
        failures.append(f"perplexity rose by {increase:.2f} % (limit {limits.max_ppl_increase:g} %)")
        exceeded.append("--max-ppl-increase")
    if not kl <= limits.max_kl:
        failures.append(f"mean KL divergence is {kl:.4g} (limit {limits.max_kl:.4g})")
        exceeded.append("--max-kl")
    return Verdict(increase, kl, tuple(failures), tuple(exceeded))


def worst(layers: Mapping[str, LayerReport], count: int = _SHOWN) -> list[tuple[str, LayerReport]]:
    return sorted(layers.items(), key=lambda item: (item[1].sqnr_db, item[0]))[:count]


def raised(
    precision: str,
    layers: Mapping[str, LayerReport],
    overrides: Mapping[str, str],
    count: int,
    wider: tuple[str, ...] | None = None,
) -> dict[str, str]:
    """`overrides` and `count` more layers one step wider; equal to `overrides` when nothing is left to raise.

    `wider`   what a layer is raised to, in turn; None: as the scheme has it
    """
    steps = scheme_of(precision).wider if wider is None else wider
    result = dict(overrides)
    for name, layer in worst(layers, len(layers)):
        if count == 0:
            break
        at = steps.index(result[name]) + 1 if name in result else _first(steps, layer.dtype)
        if at < len(steps):
            result[name] = steps[at]
            count -= 1
    return result


def _first(steps: Sequence[str], dtype: str) -> int:
    return steps.index(dtype) + 1 if dtype in steps else 0


def refusal(
    precision: str,
    key_dtype: str,
    value_dtype: str,
    verdict: Verdict,
    layers: Mapping[str, LayerReport],
    parts: Mapping[str, Mapping[str, float]],
    *,
    static: bool,
    fallback: bool,
    available: Sequence[str] | None = None,
    cache: Mapping[str, float] | None = None,
    unit_scales: bool = False,
) -> AccuracyGate:
    """`cache`: keys and values of layers → dB, as builder.kv_noise has them; named when the cache is what loses most."""
    named = ", ".join(f"{name} ({layer.sqnr_db:.1f} dB)" for name, layer in worst(layers))
    shares = ", ".join(f"{name.replace('_', ' ')} {part['mean_kl']:.4f}" for name, part in parts.items())
    text = f"--precision {precision} with KV cache {key_dtype}:{value_dtype} loses too much: " + " and ".join(verdict.failures)
    if shares:
        text += f"; mean KL with, in turn, {shares}"
    if cache and _blamed(parts) == "kv_cache":
        noisiest = sorted(cache.items(), key=lambda item: (item[1], item[0]))[:_SHOWN]
        text += "; noisiest of the KV cache: " + ", ".join(f"{name} ({db:.1f} dB)" for name, db in noisiest)
    if named:
        text += f"; noisiest layers: {named}"
    chosen = remedies(
        precision,
        key_dtype,
        value_dtype,
        parts,
        static=static,
        fallback=fallback or not layers,  # none to raise
        available=available,
        unit_scales=unit_scales,
        exceeded=verdict.exceeded,
    )
    return AccuracyGate(f"{text}; try {chosen[0]}, {chosen[1]}, or {chosen[2]}")


def remedies(
    precision: str,
    key_dtype: str,
    value_dtype: str,
    parts: Mapping[str, Mapping[str, float]],
    *,
    static: bool,
    fallback: bool,
    available: Sequence[str] | None = None,
    unit_scales: bool = False,
    exceeded: Sequence[str] = ("--max-ppl-increase",),
) -> list[str]:
    """Three, the likeliest first: what the largest share of the loss points at. `available`: of this target; None: all."""
    found: list[str] = []
    blamed = _blamed(parts)
    if blamed == "kv_cache":
        if unit_scales:
            found.append("--kv-cache-scales calibrated")
        on_gpu = available is not None and "fp32" not in available
        wider = "bf16" if precision == "bf16" or (not on_gpu and "f8" in (key_dtype, value_dtype)) else "f16"
        if key_dtype in ("f8", "i8"):
            found.append(f"--kv-cache-dtype {wider}:{value_dtype} or {wider}, which keep keys wider")
        if "u4" in (key_dtype, value_dtype):
            found.append("--kv-cache-dtype u8")
        if "u8" in (key_dtype, value_dtype):
            found.append("--kv-cache-dtype f16")
        if not on_gpu:  # which compute attention in 16 bit
            found.append("--kv-cache-dtype f32")
    if blamed == "activations" and static:
        found.append("--activation-scales dynamic")
    if blamed == "activations" and precision == "int8":
        found.append("--precision int8-sq, which moves outliers of activations into the weights")
    if not fallback:
        found.append("--fallback, which raises the precision of the noisiest layers")
    wider_precision = {
        "int4": ("int8",),
        "int8": ("int8-wo", "bf16"),
        "int8-sq": ("int8-wo", "int8"),
        "fp8": ("bf16",),
        "int8-wo": ("bf16",),
        "bf16": ("fp32",),
    }
    wider = next((each for each in wider_precision.get(precision, ()) if available is None or each in available), "")
    if precision == "int4":
        found.append("--group-size 32")
    if wider:
        found.append(f"--precision {wider}")
    found.append(f"a higher {' and '.join(exceeded)}, if the loss is acceptable")
    found.append("--calibration-data with text like the model's use")
    return found[:3]


def _blamed(parts: Mapping[str, Mapping[str, float]]) -> str:
    """The part that adds most to the loss."""
    before, shares = 0.0, {}
    for name, part in parts.items():  # each is measured with those before it
        shares[name], before = part["mean_kl"] - before, part["mean_kl"]
    return max(shares, key=lambda name: shares[name]) if shares else "weights"
