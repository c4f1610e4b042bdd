"""Reads a serialized plan back: is every weight in it as it was stored, and how often?

A plan says nothing of its precision to a machine without a GPU, but it holds constants as they were given: TensorRT splits and
shares them, and where a kernel wants another order writes them a second time. So the beginning of a row and of a column of each
weight is looked for in the plan's bytes. A quantized weight that is not there was widened, which fails the build; one that is
there twice costs its bytes twice, and the report says so.

One pass over the plan: its words, at steps of 4 bytes, are compared with those that the weights begin with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from runtime.errors import PrecisionLost

_SMALLEST = 4096  # elements; smaller constants may be folded into code
_WINDOW = 32  # bytes compared
_DISTINCT = 8  # of them different, or the window may be anywhere
_ROWS_TRIED = 64
_NAMES_SHOWN = 4
_QUANTIZED = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN)
_SUFFIX = re.compile(r"(\.q)?(\.f16|\.bf16|\.f32)?$")  # of tensorrt_quantize and tensorrt_types


@dataclass(frozen=True)
class Stored:
    name: str  # of the weight in the canonical graph
    role: str  # attention, mlp, embedding, lm_head; other for tables that are no weights
    dtype: ir.DataType
    num_weights: int
    num_bytes: int  # of one copy
    scale_bytes: int
    copies: int  # found in the plan


def check_plan(plan: Path, lowered: ir.Model, roles: Mapping[str, str]) -> list[Stored]:
    """Every weight of the lowered graph, with how many copies the plan holds. Raises PrecisionLost naming those it lost."""
    found = read_plan(plan, lowered, roles)
    quantized = [each for each in found if each.dtype in _QUANTIZED]
    lost = [each.name for each in quantized if not each.copies]
    if lost:
        shown = ", ".join(lost[:_NAMES_SHOWN]) + (", …" if len(lost) > _NAMES_SHOWN else "")
        raise PrecisionLost(
            f"{plan.name} does not hold {len(lost)} of {len(quantized)} quantized weights as they were stored ({shown}), so "
            "TensorRT widened them; use a wider --precision or another TensorRT version"
        )
    return found


def read_plan(plan: Path, lowered: ir.Model, roles: Mapping[str, str]) -> list[Stored]:
    """`roles`: name in the canonical graph → class of tensors."""
    initializers = lowered.graph.initializers
    weights = {name: value.const_value for name, value in initializers.items() if _is_weight(value)}
    starts = {name: _starts(tensor) for name, tensor in weights.items() if tensor is not None}
    blob = np.memmap(plan, np.uint8, "r")
    places = _places(blob, {window[:8] for windows in starts.values() for window in windows})
    scales = {name.rsplit(".scale", 1)[0]: value.const_value for name, value in initializers.items() if ".scale" in name}
    result = []
    for name, tensor in weights.items():
        assert tensor is not None
        copies = sum(
            blob[place : place + _WINDOW].tobytes() == window for window in starts[name] for place in places.get(window[:8], ())
        )
        base = _SUFFIX.sub("", name)
        scale = scales.get(base)
        scale_bytes = int(scale.nbytes) if scale is not None else 0
        role = roles.get(base, "other")
        result.append(Stored(base, role, tensor.dtype, tensor.size, int(tensor.nbytes), scale_bytes, copies))
    return result


def bytes_per_weight(found: Iterable[Stored]) -> float:
    """Of the plan's copies and their scales, over the weights they stand for."""
    found = list(found)
    return sum(each.copies * each.num_bytes + each.scale_bytes for each in found) / sum(each.num_weights for each in found)


def _places(blob: npt.NDArray[np.uint8], beginnings: set[bytes]) -> dict[bytes, list[int]]:
    """Where in the plan, at steps of 4 bytes, each of these 8 bytes is."""
    keys = np.unique(np.frombuffer(b"".join(beginnings), np.uint64))
    places: dict[bytes, list[int]] = {}
    for shift in (0, 4):
        words = blob[shift : shift + (len(blob) - shift) // 8 * 8].view(np.uint64)
        for begin in range(0, len(words) if len(keys) else 0, 1 << 20):
            part = words[begin : begin + (1 << 20)]
            nearest = keys[np.searchsorted(keys, part).clip(max=len(keys) - 1)]
            for index in np.flatnonzero(nearest == part):
                places.setdefault(part[index].tobytes(), []).append(shift + 8 * (begin + int(index)))
    return places


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    name = str(value.name)
    return tensor is not None and len(tensor.shape) >= 2 and tensor.size >= _SMALLEST and ".scale" not in name


def _starts(weight: ir.TensorProtocol) -> list[bytes]:
    """The first bytes of a row and, for types of whole bytes, of a column: whichever order a kernel wants, one is there."""
    row_bytes = weight.nbytes // int(weight.shape[0])  # type: ignore[arg-type]
    rows = (_read(weight, row * row_bytes) for row in range(min(int(weight.shape[0]), _ROWS_TRIED)))  # type: ignore[arg-type]
    found = [next(filter(_is_telling, rows), None)]
    if weight.dtype.bitwidth >= 8 and len(weight.shape) == 2:
        array = weight.numpy()
        columns = (array[:_WINDOW, column].tobytes()[:_WINDOW] for column in range(min(array.shape[1], _ROWS_TRIED)))
        found.append(next(filter(_is_telling, columns), None))
    return list(dict.fromkeys(window for window in found if window is not None))


def _is_telling(window: bytes) -> bool:
    return len(window) == _WINDOW and len(set(window)) >= _DISTINCT


def _read(weight: ir.TensorProtocol, offset: int) -> bytes:
    if isinstance(weight, ir.ExternalTensor):
        with open(Path(weight.base_dir) / weight.location, "rb") as file:
            file.seek((weight.offset or 0) + offset)
            return file.read(_WINDOW)
    return weight.tobytes()[offset : offset + _WINDOW]
