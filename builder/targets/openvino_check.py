"""Reads a compiled model back: did OpenVINO do what the lowered graph meant?

OpenVINO says nothing when a pattern does not fire or a quantized weight has a shape its kernels cannot take: it widens the weight
to f32 and computes the same result at four times the memory. Here that fails the build.

Raises   FusionMismatch when norms or rotary embeddings run as loose operations, PrecisionLost naming the layers that lost theirs,
         or the types found where arithmetic is not of the type asked for
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
import openvino as ov

from plugins.decoder_layers.openvino import LAYERS_OP
from plugins.paged_attention.op import DOMAIN
from plugins.paged_attention.openvino import LOWERED_OP as ATTENTION_OP
from plugins.paged_attention.openvino import computes_in
from plugins.quantized_matmul.openvino import LOWERED_OP as OWN_OP
from runtime.errors import FusionMismatch, PrecisionLost

_STORED = {ir.DataType.INT8: "i8", ir.DataType.INT4: "i4", ir.DataType.UINT4: "u4"}
_FLOATS = ("f32", "bf16", "f16")
_ARITHMETIC = ("FullyConnected", "MatMul", "PagedAttention", "RMS", "MVN")  # the rest is copies, and angles that stay in f32
_EXTENSION = "Reference"  # what OpenVINO calls an operation that it runs through `evaluate`
_NAMES_SHOWN = 4
_STORED_SUFFIX = re.compile(r"\.q(?=\[|$)")  # builder.quantize's, and the number of an expert follows it


@dataclass(frozen=True)
class QuantizedLayer:
    weight: str  # name in the checkpoint
    nodes: tuple[str, ...]  # a kernel that runs it is called after its MatMul, or after the Add of its bias
    dtype: str  # i8, i4
    width: int  # inputs
    group_size: int  # weights per scale along the input axis; 0 = one scale per output


@dataclass(frozen=True)
class Expected:
    """Facts of the lowered graph that the compiled model must show."""

    norms: int = 0  # RMSNormalization nodes, each one RMS kernel
    rotary: int = 0  # rotary embeddings, each one RoPE kernel
    quantized: tuple[QuantizedLayer, ...] = ()  # on OpenVINO's kernels
    own: int = 0  # nodes on forgeline's kernels


@dataclass(frozen=True)
class Layer:
    kind: str  # OpenVINO's layer type
    precision: str  # it runs in
    names: tuple[str, ...]  # nodes of the lowered graph it came from
    weight_type: str  # of its second input, as stored


def expected(graph: ir.Graph, rotary: int, own_attention: bool = False) -> Expected:
    """`rotary`: how many rotary embeddings the graph had before they were lowered."""
    norms = sum(node.op_type == "RMSNormalization" for node in graph)
    quantized = []
    for node in graph:
        dequantize = _dequantize_of(node)
        if dequantize is None:
            continue
        weight = dequantize.inputs[0]
        assert weight is not None and weight.const_value is not None and weight.name
        if weight.const_value.dtype not in _STORED:  # fp8, which OpenVINO widens: its arithmetic is emulated anyway
            continue
        quantized.append(
            QuantizedLayer(
                weight=_STORED_SUFFIX.sub("", weight.name),
                nodes=tuple(_names(node)),
                dtype=_STORED[weight.const_value.dtype],
                width=int(weight.const_value.shape[-1]),  # type: ignore[arg-type]
                group_size=dequantize.attributes.get_int("block_size", 0),
            )
        )
    own_ops = (OWN_OP, LAYERS_OP, ATTENTION_OP) if own_attention else (OWN_OP,)
    own = sum(node.domain == DOMAIN and node.op_type in own_ops for node in graph)
    return Expected(norms, rotary, tuple(quantized), own)


def _names(matmul: ir.Node) -> Iterator[str]:
    assert matmul.name is not None
    yield matmul.name
    for use in matmul.outputs[0].uses():
        if use.node.op_type == "Add" and any(value is not None and value.is_initializer() for value in use.node.inputs):
            assert use.node.name is not None
            yield use.node.name


def _dequantize_of(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear behind the weight of a MatMul, through a Transpose or not."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    producer = node.inputs[1].producer()
    if producer is not None and producer.op_type == "Transpose" and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def layers(compiled: ov.CompiledModel) -> list[Layer]:
    found = []
    for op in compiled.get_runtime_model().get_ops():
        info = {name: str(getattr(value, "value", value)) for name, value in op.get_rt_info().items()}
        weight = op.input(1).get_source_output().get_element_type().get_type_name() if op.get_input_size() > 1 else ""
        names = tuple(info.get("originalLayersNames", "").split(","))
        found.append(Layer(info.get("layerType", ""), info.get("runtimePrecision", ""), names, weight))
    return found


def check(compiled: ov.CompiledModel, want: Expected, compute_dtype: str = "f32") -> dict[str, int]:
    """Histogram "layer type:precision" → count of the compiled model, once it is what was wanted."""
    found = layers(compiled)
    kinds = Counter(layer.kind for layer in found)
    for kind, count, what in (("RMS", want.norms, "RMSNorm"), ("RoPE", want.rotary, "rotary embedding")):
        if kinds[kind] < count:  # more is welcome: OpenVINO finds an RMSNorm inside a LayerNorm without bias too
            raise FusionMismatch(
                f"OpenVINO runs {kinds[kind]} {kind} kernels for the {count} {what} nodes of the graph, so the others "
                "would run as loose operations; build with the pinned openvino version or report the model"
            )
    if kinds[_EXTENSION] < want.own:
        raise FusionMismatch(
            f"OpenVINO runs {kinds[_EXTENSION]} of the {want.own} layers that are lowered to forgeline's kernels; build with the "
            "pinned openvino version or with --cpu-kernels openvino"
        )
    _check_weights(found, want)
    _check_arithmetic(found, computes_in(compiled), compute_dtype)
    return dict(sorted(Counter(f"{layer.kind}:{layer.precision}" for layer in found if layer.kind != "Const").items()))


def _check_arithmetic(found: list[Layer], computes_in: str, compute_dtype: str) -> None:
    others = Counter(
        f"{layer.kind}:{layer.precision}"
        for layer in found
        if layer.kind in _ARITHMETIC and layer.precision in _FLOATS and layer.precision != compute_dtype
    )
    if others or computes_in != compute_dtype:
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items())) or "no layer by name"
        raise PrecisionLost(
            f"OpenVINO computes in {computes_in} instead of {compute_dtype} ({shown}); choose another --compute-dtype "
            "or build with the pinned openvino version"
        )


def _check_weights(found: list[Layer], want: Expected) -> None:
    by_name = {name: layer for layer in found if layer.kind == "FullyConnected" for name in layer.names}
    lost = []
    for quantized in want.quantized:
        layer = next((by_name[name] for name in quantized.nodes if name in by_name), None)
        if layer is None or (layer.precision, layer.weight_type) != (quantized.dtype, quantized.dtype):
            group = f" in groups of {quantized.group_size}" if quantized.group_size else ""
            runs = "outside any matrix kernel" if layer is None else f"as {layer.weight_type}"
            lost.append(f"{quantized.weight} ({quantized.dtype}{group}, runs {runs})")
    if lost:
        shown = "; ".join(lost[:_NAMES_SHOWN]) + ("; …" if len(lost) > _NAMES_SHOWN else "")
        raise PrecisionLost(
            f"OpenVINO silently widened {len(lost)} of {len(want.quantized)} quantized weights: {shown}; "
            "choose a --group-size that divides the layers' input widths, or a wider --precision"
        )
