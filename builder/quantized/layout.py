"""What the formats of quantized checkpoints share: what a layer's tensors are called, how integers are packed, how to refuse.

    Header   a stored tensor, from the file's header
    Layer    a quantized weight, read: dense [out, in] in fp32, and its grid where it has one
    Format   one per file beside this one; made from the checkpoint's configuration, which it validates

Raises   UnsupportedModel for what is not read, CorruptCheckpoint for a layer whose tensors do not fit together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from builder.quantized.grid import Grid
from runtime.errors import CorruptCheckpoint, UnsupportedModel

REMEDY = "copy the checkpoint again, or quantize the model again"
FLOATS = ("F64", "F32", "F16", "BF16")
Headers = Mapping[str, "Header"]
Tensors = Mapping[str, npt.NDArray]  # E4M3 and 16-bit floats as float32


@dataclass(frozen=True)
class Header:
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layer:
    dense: npt.NDArray[np.float32]  # [out, in]
    grid: Grid | None = None
    reason: str = ""  # why there is no grid


class Format(Protocol):
    name: str
    given: str  # the checkpoint, as the user wrote it
    bits: int  # of the widest integers that it packs
    parts: tuple[str, ...]  # last parts of the names of a quantized layer's tensors

    def is_quantized(self, headers: Headers) -> bool:
        """Do these, by last part of their names, belong to a quantized layer?"""

    def check(self, layer: str, headers: Headers) -> None: ...

    def read(self, layer: str, tensors: Tensors) -> Layer: ...

    def excludes(self, layer: str) -> bool:
        """Does the configuration name it as one that is not quantized?"""

    @property
    def kv_dtype(self) -> str:
        """Of the scales for a KV cache: fp8, int8; empty when there are none."""


def unsupported(fmt: Format, what: str) -> NoReturn:
    raise UnsupportedModel(
        f"{fmt.given}: {what} in the {fmt.name} checkpoint is not read; build from the unquantized checkpoint or a GGUF file"
    )


def damaged(fmt: Format, tensor: str, problem: str) -> NoReturn:
    raise CorruptCheckpoint(f"{fmt.given}: {tensor} of the {fmt.name} checkpoint {problem}; {REMEDY}")


def whole_number(fmt: Format, config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of `names` that is there."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int:
                raise CorruptCheckpoint(
                    f"{fmt.given}: {name} of the {fmt.name} quantization is {value!r} but must be an integer; correct config.json"
                )
            return value
    if default is None:
        raise CorruptCheckpoint(f"{fmt.given}: the {fmt.name} quantization has no {names[0]}; correct config.json")
    return default


def text_list(fmt: Format, config: Mapping[str, Any], *names: str) -> list[str]:
    """The first of `names` that is there; none: empty."""
    for name in names:
        if value := config.get(name):
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise CorruptCheckpoint(
                    f"{fmt.given}: {name} of the {fmt.name} quantization is {value!r} but must be a list of names; correct it"
                )
            return value
    return []


def need(fmt: Format, layer: str, headers: Headers, *names: str) -> None:
    """Every one of `names` must be there."""
    for name in names:
        if name not in headers:
            raise CorruptCheckpoint(f"{fmt.given} lacks {layer}.{name} of a layer quantized by {fmt.name}; {REMEDY}")


def need_shape(fmt: Format, layer: str, name: str, headers: Headers | Tensors, *shapes: tuple[int, ...]) -> None:
    found = tuple(headers[name].shape)
    if found not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        damaged(fmt, f"{layer}.{name}", f"has the shape {list(found)} but must have {wanted}")


def need_dtype(fmt: Format, layer: str, name: str, headers: Headers, *dtypes: str) -> None:
    if headers[name].dtype not in dtypes:
        damaged(fmt, f"{layer}.{name}", f"is {headers[name].dtype} but must be {' or '.join(dtypes)}")


def need_matrix(fmt: Format, layer: str, name: str, headers: Headers, *dtypes: str) -> tuple[int, int]:
    need_dtype(fmt, layer, name, headers, *dtypes)
    if len(headers[name].shape) != 2:
        damaged(fmt, f"{layer}.{name}", f"has {len(headers[name].shape)} dimensions but must have 2")
    rows, columns = headers[name].shape
    return rows, columns


def unpack(words: npt.NDArray, bits: int, axis: int) -> npt.NDArray[np.int16]:
    """32-bit words along `axis` → the unsigned integers in them, lowest bits first."""
    words = np.moveaxis(words, axis, -1).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.moveaxis(values.reshape(*words.shape[:-1], -1).astype(np.int16), -1, axis)


def grouped(q: npt.NDArray, scale: npt.NDArray, zero: npt.NDArray | None, bits: int, input_scale: float | None = None) -> Layer:
    """A layer of signed q [out, in] with scale and zero [out, groups]; one group becomes a scale per output."""
    scale = scale.astype(np.float32)
    groups = scale.shape[1]
    group_size = q.shape[1] // groups
    assert group_size * groups == q.shape[1], (q.shape, scale.shape)
    zero = None if zero is None or not zero.any() else zero.astype(np.int16)
    values = q.astype(np.float32)
    if zero is not None:
        values -= zero.repeat(group_size, axis=1)
    dense = values * scale.repeat(group_size, axis=1)
    if groups == 1:
        scale, zero, group_size = scale[:, 0], None if zero is None else zero[:, 0], 0
    return Layer(dense, Grid(f"int{bits}", scale, group_size, zero, input_scale))
