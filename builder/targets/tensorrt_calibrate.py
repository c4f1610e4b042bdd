"""What the TensorRT targets need to know of activations, keys and values, from the text and by the method of the build.

    fp8, int8-sq          ranges of the layers' inputs; fp8 their second moments too
    int4                  second moments, unless there are no samples: then it rounds to nearest
    8-bit keys, values    the largest magnitude per head; nothing with scales of 1
    accuracy report       a short sample, so that it can name the noisiest layers

Raises   BuildError when there is nothing to calibrate with, and as builder.calibration_data does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from builder import calibration, calibration_data
from builder.config import BuildConfig
from builder.fuse.graph import is_op
from builder.observe import Progress, TensorStats
from builder.quantized.grid import Origin
from builder.targets import tensorrt_quantize
from builder.targets.tensorrt_lower import KVScales
from plugins.paged_attention.op import DOMAIN, PAGED_ATTENTION
from runtime.contract import TOKENIZER_DIR
from runtime.errors import BuildError
from runtime.tokenizer import Tokenizer

LARGEST = {"fp8": 448.0, "int8": 127.0}  # kinds of keys and values that have a scale
_REPORT_SAMPLES, _REPORT_CONTEXT = 1, 256


@dataclass(frozen=True)
class Calibration:
    stats: dict[str, TensorStats] = field(default_factory=dict)  # layer input → statistics
    kv_scales: KVScales = field(default_factory=dict)
    sha256: str = ""  # of the tokens; empty when the engine depends on none


def calibrate(
    config: BuildConfig,
    canonical: Path,
    model: ir.Model,
    kinds: Sequence[str],
    *,
    origin: Origin | None = None,
    num_threads: int,
    progress: Progress | None = None,
) -> Calibration:
    """Runs nothing when nothing is needed.

    `model`    the graph in `canonical`, unquantized
    `origin`   its scales of a KV cache of these `kinds` of keys and values come before measured ones
    """
    scheme = tensorrt_quantize.SCHEMES[config.precision]
    eight_bit = any(kind in LARGEST for kind in kinds)
    has_scales = eight_bit and config.kv_cache_scales == "calibrated"
    if (scheme.activations or has_scales) and not config.calibration_samples:
        what = f"--precision {config.precision}" if scheme.activations else f"--kv-cache-dtype {config.kv_cache_dtype}"
        raise BuildError(f"{what} needs calibration, but --calibration-samples is 0; leave it out")
    shapes_weights = bool(scheme.activations) or (scheme.hessians and config.calibration_samples > 0)
    needed = shapes_weights or has_scales
    reported = scheme.tables and (config.eval_tokens > 0 or config.fallback)
    nodes = [node for node in model.graph if is_op(node, PAGED_ATTENTION, DOMAIN)]
    unit = _unit(nodes) if eight_bit and not has_scales else {}
    if not needed and not reported:
        return Calibration(kv_scales=unit)
    tokenizer = Tokenizer.load(canonical / TOKENIZER_DIR)
    size = {} if needed else {"context": _REPORT_CONTEXT}
    samples = config.calibration_samples if needed else _REPORT_SAMPLES
    data = calibration_data.load(config.calibration_data, tokenizer, samples=samples, **size)
    found = calibration.collect(
        canonical / "model.onnx",
        data,
        tensorrt_quantize.activation_names(model) if shapes_weights or reported else [],
        {str(value.name): 1 for node in nodes for value in node.inputs[1:3] if value is not None} if has_scales else {},
        model_key=canonical.name if config.use_cache else "",
        hessians=shapes_weights and scheme.hessians,
        num_threads=num_threads,
        progress=progress,
    )
    scales = dict(unit)
    for node in nodes if has_scales else ():
        key, value = (
            _scale(found.kv_amax[str(value.name)], kind)
            for value, kind in zip(node.inputs[1:3], kinds, strict=True)
            if value is not None
        )
        layer = node.attributes.get_int("layer", 0)
        stored = (origin or Origin()).cache_scales(layer, kinds, len(key))
        scales[layer] = (key if stored[0] is None else stored[0], value if stored[1] is None else stored[1])
    return Calibration(found.stats, scales, found.sha256 if needed else "")


def _unit(nodes: Sequence[ir.Node]) -> KVScales:
    """1 for every head, whatever the checkpoint has."""
    heads = {node.attributes.get_int("layer", 0): node.attributes.get_int("num_kv_heads", 0) for node in nodes}
    return {layer: (np.ones(count, np.float32), np.ones(count, np.float32)) for layer, count in heads.items()}


def _scale(largest: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """Per head; 1 for a head that was always zero, and for 16 bits, which need none."""
    return np.where(largest > 0, largest / LARGEST[kind], 1.0).astype(np.float32) if kind in LARGEST else np.ones_like(largest)
