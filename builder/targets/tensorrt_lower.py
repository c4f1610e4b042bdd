"""Canonical graph → what TensorRT's ONNX parser reads: still ONNX, in fp32; tensorrt_types.py narrows it afterwards.

PagedAttention   becomes the plugin's node (plugins.paged_attention.tensorrt_op). The pools leave the graph: one int64 table of
                 their addresses is fed instead, and nothing comes out. Rotary embedding and q/k norm move into the node where
                 their form allows it, and the fused projection is handed over whole, so that no split, transpose or copy remains
                 between the matrix product and the pages
the rest         forgeline's fused ops are expanded: TensorRT fuses pointwise chains itself

Raises   UnsupportedModel for heads that the kernels were not compiled for
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from builder.fuse import inline_forgeline_ops
from builder.fuse.graph import constant, ints, is_op, static_shape
from builder.targets.openvino_build import NodeBuilder
from plugins.paged_attention import tensorrt_op
from plugins.paged_attention.op import DOMAIN, MOE_EXPERTS, PAGED_ATTENTION, PAGED_ATTENTION_INPUTS, attach_functions
from plugins.paged_attention.tensorrt_op import AttentionSpec
from plugins.paged_attention.tuning import HEAD_DIMS
from runtime import contract
from runtime.errors import UnsupportedModel

KVScales = Mapping[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]  # layer → scales of keys and values, per head
_SAMPLE_TOKENS = 3  # of the made-up step that layouts are tried on
_HEADS_FIRST = (0, 2, 1, 3)


@dataclass(frozen=True)
class Lowered:
    attention: tuple[AttentionSpec, ...]  # by layer
    rotary_absorbed: int  # nodes that rotate q and k themselves
    norms_absorbed: int
    packed: int  # nodes that read one fused projection, without a concatenation


def lower(
    model: ir.Model,
    *,
    key_kind: str,
    value_kind: str,
    block_size: int,
    kv_scales: KVScales | None = None,
    blocks_per_sm: Mapping[tuple[str, int], int] | None = None,
    any_head_dim: bool = False,
) -> Lowered:
    """In place.

    `blocks_per_sm`   (phase, head_dim) → resident programs, from the compiled kernels; 1 where not given
    `any_head_dim`    for tests of models that are too small for the kernels
    """
    inline_forgeline_ops(model)
    graph = model.graph
    nodes = [node for node in graph if is_op(node, PAGED_ATTENTION, DOMAIN)]
    for node in nodes:
        head_dim = node.attributes.get_int("head_dim", 0)
        if head_dim not in HEAD_DIMS and not any_head_dim:
            raise UnsupportedModel(
                f"layer {node.attributes.get_int('layer', 0)} has heads of {head_dim} elements but the attention kernels exist "
                f"for {', '.join(map(str, HEAD_DIMS))}; use --target cpu"
            )
    inputs = {str(value.name): value for value in graph.inputs}
    table = ir.Value(name=tensorrt_op.KV_POINTERS, shape=ir.Shape([len(nodes), 2]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(table)
    shared = _Shared(graph, inputs, table)
    specs: list[AttentionSpec] = []
    packed = 0
    for node in nodes:
        kinds: dict[str, str | int] = {"key_kind": key_kind, "value_kind": value_kind, "block_size": block_size}
        spec, whole = _lower_attention(node, shared, kinds, kv_scales or {}, blocks_per_sm or {})
        specs.append(spec)
        packed += whole
    _drop_pools(graph)
    attach_functions(model)  # of MoEExperts, to be inlined
    passes.InlinePass(criteria=lambda function: function.domain == DOMAIN and function.name == MOE_EXPERTS)(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.RemoveUnusedNodesPass()(model)
    model.functions.clear()  # a function of the plugin's name would be inlined by the parser
    model.opset_imports[tensorrt_op.NODE_DOMAIN] = 1
    model.opset_imports.pop(DOMAIN, None)
    for index, node in enumerate(graph):
        node.name = node.name or f"{node.op_type}_{index}"
    specs.sort(key=lambda spec: spec.layer)
    return Lowered(
        attention=tuple(specs),
        rotary_absorbed=sum(spec.rotary_dim > 0 for spec in specs),
        norms_absorbed=sum(spec.has_norm for spec in specs),
        packed=packed,
    )


class _Shared:
    """What all layers read."""

    def __init__(self, graph: ir.Graph, inputs: Mapping[str, ir.Value], kv_pointers: ir.Value) -> None:
        self.graph = graph
        self.inputs = inputs
        self.kv_pointers = kv_pointers
        self._rows: ir.Value | None = None
        self._tables: dict[ir.Value, ir.Value] = {}

    def rows(self) -> ir.Value:
        """0, 1, … T-1: cos and sin are computed for this step's tokens, in their order."""
        if self._rows is None:
            build = NodeBuilder(self.graph)
            count = build.op("Squeeze", [build.op("Shape", [self.inputs[contract.INPUT_IDS]])])
            self._rows = build.op("Range", [build.constant(0), count, build.constant(1)], name="token_rows")
            self._rows.dtype, self._rows.shape = ir.DataType.INT64, self.inputs[contract.INPUT_IDS].shape
        return self._rows

    def table(self, value: ir.Value, build: NodeBuilder) -> ir.Value:
        """cos or sin [1, T, R/2] as [T, R/2]."""
        if value not in self._tables:
            assert value.shape is not None
            self._tables[value] = build.op("Reshape", [value, build.constant([-1, int(value.shape[-1])])])  # type: ignore[arg-type]
        return self._tables[value]


# ------------------------------------------------------------------------------------------------------------- attention


def _lower_attention(
    node: ir.Node,
    shared: _Shared,
    kinds: Mapping[str, str | int],
    kv_scales: KVScales,
    blocks_per_sm: Mapping[tuple[str, int], int],
) -> tuple[AttentionSpec, bool]:
    attributes = node.attributes
    heads, kv_heads, dim, layer = (attributes.get_int(name, 0) for name in ("num_heads", "num_kv_heads", "head_dim", "layer"))
    q, k, v = (_Traced.of(value, dim) for value in node.inputs[:3])
    if not q.agrees(k) or v.rotary is not None or v.norm is not None:
        q, k = (_Traced(value) for value in node.inputs[:2] if value is not None)
    if v.rotary is not None or v.norm is not None:
        assert node.inputs[2] is not None
        v = _Traced(node.inputs[2])
    build = NodeBuilder(shared.graph, anchor=node)
    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    fused = _fused_projection([q.source, k.source, v.source], widths)
    if fused is not None:
        qkv = build.op("Reshape", [fused, build.constant([-1, sum(widths)])])
    else:
        flat = [build.op("Reshape", [x.source, build.constant([-1, w])]) for x, w in zip((q, k, v), widths, strict=True)]
        qkv = build.op("Concat", flat, {"axis": -1})

    scales = kv_scales.get(layer)
    has_sinks = len(node.inputs) == len(PAGED_ATTENTION_INPUTS)
    spec = AttentionSpec(
        layer=layer,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=attributes.get_float("scale", 1.0),
        sliding_window=attributes.get_int("sliding_window", 0),
        softcap=attributes.get_float("softcap", 0.0),
        rotary_dim=q.rotary_dim,
        interleaved=q.interleaved,
        has_norm=int(q.norm is not None),
        eps=q.norm.attributes.get_float("epsilon", 1e-5) if q.norm is not None else 0.0,
        has_sinks=int(has_sinks),
        decode_blocks_per_sm=blocks_per_sm.get(("decode", dim), 1),
        prefill_blocks_per_sm=blocks_per_sm.get(("prefill", dim), 1),
        **kinds,  # type: ignore[arg-type]
    )
    values: dict[str, ir.Value | None] = {
        "qkv": qkv,
        "rows": shared.rows() if spec.rotary_dim else shared.inputs[contract.POSITIONS],
        "kv_pointers": shared.kv_pointers,
    }
    values |= {name: shared.inputs[name] for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")}
    if q.rotary is not None:
        values |= {name: shared.table(_input(q.rotary, index), build) for name, index in (("cos", 1), ("sin", 2))}
    if q.norm is not None and k.norm is not None:
        values |= {"q_norm": q.norm.inputs[1], "k_norm": k.norm.inputs[1]}
    if spec.has_scales:
        assert scales is not None, f"no KV scales for layer {layer}"
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            assert scale.shape == (kv_heads,), (scale.shape, kv_heads)
            values[name] = build.initializer(f"layers.{layer}.{name}", ir.tensor(scale.astype(np.float32)))
    if has_sinks:
        values["sinks"] = node.inputs[-1]
    plugin = {"plugin_namespace": tensorrt_op.NAMESPACE, "plugin_version": tensorrt_op.VERSION}
    attention = build.op(
        tensorrt_op.NAME, [values[name] for name in spec.inputs], {**spec.to_dict(), **plugin}, domain=tensorrt_op.NODE_DOMAIN
    )
    out = node.outputs[0]
    attention.type, attention.shape = out.type, ir.Shape([out.shape[0] if out.shape else None, heads * dim])
    node_of = attention.producer()
    assert node_of is not None
    node_of.name = f"layers.{layer}.attention"
    heads_apart = build.op("Reshape", [attention, build.constant([-1, heads, dim])])
    heads_apart.type, heads_apart.shape = out.type, out.shape
    ir.convenience.replace_all_uses_with(out, heads_apart)
    return spec, fused is not None


def _drop_pools(graph: ir.Graph) -> None:
    old = [node for node in graph if is_op(node, PAGED_ATTENTION, DOMAIN)]
    kept = [value for value in graph.outputs if value.name in (contract.LOGITS, contract.NEXT_TOKEN)]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    graph.remove(old, safe=True)
    names = (*contract.STEP_INPUTS, tensorrt_op.KV_POINTERS)
    kept = [value for value in graph.inputs if value.name in names]
    graph.inputs.clear()
    graph.inputs.extend(kept)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


# --------------------------------------------------------------------------------------------------------------- tracing


@dataclass(frozen=True)
class _Traced:
    """q, k or v [T, H, D] of an attention node, followed back to a value that holds the same numbers in the same order."""

    source: ir.Value
    rotary: ir.Node | None = None
    norm: ir.Node | None = None
    head_dim: int = 0

    @property
    def rotary_dim(self) -> int:
        return 0 if self.rotary is None else self.rotary.attributes.get_int("rotary_embedding_dim", 0) or self.head_dim

    @property
    def interleaved(self) -> int:
        return 0 if self.rotary is None else self.rotary.attributes.get_int("interleaved", 0)

    def agrees(self, other: _Traced) -> bool:
        """One node rotates and normalizes q and k alike, with the same tables."""
        if (self.rotary is None) != (other.rotary is None) or (self.norm is None) != (other.norm is None):
            return False
        if self.rotary is not None and other.rotary is not None:
            same_tables = self.rotary.inputs[1:] == other.rotary.inputs[1:]
            if not same_tables or (self.rotary_dim, self.interleaved) != (other.rotary_dim, other.interleaved):
                return False
        if self.norm is not None and other.norm is not None:
            return self.norm.attributes.get_float("epsilon", 1e-5) == other.norm.attributes.get_float("epsilon", 1e-5)
        return True

    @classmethod
    def of(cls, value: ir.Value | None, head_dim: int) -> _Traced:
        """As far back as norm, rotary embedding and changes of layout go; `value` itself when tokens do not stay in order."""
        assert value is not None
        path: list[ir.Node] = []
        best = cls(value, head_dim=head_dim)
        rotary: ir.Node | None = None
        norm: ir.Node | None = None
        at = value
        while (node := at.producer()) is not None and node.inputs and node.inputs[0] is not None:
            if is_op(node, "RotaryEmbedding") and rotary is None and norm is None and len(node.inputs) == 3:
                rotary = node
            elif is_op(node, "RMSNormalization") and norm is None and static_shape(node.inputs[1]) == (head_dim,):
                norm = node
            elif not _moves_only(node):
                break
            path.append(node)
            at = node.inputs[0]
            if _token_by_token(at, path[::-1], head_dim):
                best = cls(at, rotary, norm, head_dim)
        return best


def _moves_only(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


def _token_by_token(source: ir.Value, path: list[ir.Node], head_dim: int) -> bool:
    """Does `path`, tried on consecutive numbers, end in them as [T, H, D], with whole heads where it norms and rotates?"""
    if source.shape is None:
        return False
    shape = [dim if isinstance(dim, int) else _SAMPLE_TOKENS for dim in source.shape]
    x = np.arange(int(np.prod(shape))).reshape(shape)
    if x.size % (_SAMPLE_TOKENS * head_dim):
        return False
    heads = x.reshape(_SAMPLE_TOKENS, -1, head_dim)
    for node in path:
        if node.op_type == "RotaryEmbedding":
            if x.ndim != 4 or not np.array_equal(x, heads[None].transpose(_HEADS_FIRST)):
                return False
        elif node.op_type == "RMSNormalization":
            starts = x.reshape(-1, x.shape[-1])
            if x.shape[-1] != head_dim or not np.array_equal(starts, starts[:, :1] + np.arange(head_dim)):
                return False
        else:
            moved = _move(x, node)
            if moved is None:
                return False
            x = moved
    return np.array_equal(x, heads)


def _move(x: npt.NDArray[np.int64], node: ir.Node) -> npt.NDArray[np.int64] | None:
    if node.op_type == "Identity":
        return x
    if node.op_type == "Transpose":
        return x.transpose(node.attributes.get_ints("perm", tuple(reversed(range(x.ndim)))))
    wanted = ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if wanted is None:
        return None
    if node.op_type == "Squeeze":
        return x.squeeze(wanted)
    if node.op_type == "Unsqueeze":
        return np.expand_dims(x, wanted)
    shape = [x.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    known = int(np.prod([size for size in shape if size != -1]))
    return x.reshape(shape) if x.size % known == 0 and (-1 in shape or known == x.size) else None


def _fused_projection(sources: list[ir.Value], widths: tuple[int, ...]) -> ir.Value | None:
    """The value whose last axis is q, k and v side by side, when the three are its parts: of a Split, or one Slice each."""
    producers = [source.producer() for source in sources]
    first = producers[0]
    if first is None or any(node is None for node in producers):
        return None
    whole = first.inputs[0]
    if whole is None or whole.shape is None or whole.shape[-1] != sum(widths):
        return None
    if is_op(first, "Split"):
        rank = len(whole.shape)
        in_order = list(sources) == list(first.outputs) and first.attributes.get_int("axis", 0) in (-1, rank - 1)
        return whole if in_order and tuple(source.shape[-1] for source in sources if source.shape) == widths else None
    begin = 0
    for node, width in zip(producers, widths, strict=True):
        if (
            node is None
            or not is_op(node, "Slice")
            or node.inputs[0] is not whole
            or not _slices(node, begin, begin + width, len(whole.shape))
        ):
            return None
        begin += width
    return whole


def _slices(node: ir.Node, begin: int, end: int, rank: int) -> bool:
    """Is `node` a Slice [begin, end) of its last axis?"""
    starts, ends, axes = (ints(value) for value in node.inputs[1:4])
    steps = constant(node.inputs[4]) if len(node.inputs) > 4 else None
    if starts is None or ends is None or axes not in ((-1,), (rank - 1,)) or (steps is not None and set(steps) != {1}):
        return False
    whole = node.inputs[0]
    assert whole is not None and whole.shape is not None
    return starts == (begin,) and min(ends[0], int(whole.shape[-1])) == end  # type: ignore[arg-type]
