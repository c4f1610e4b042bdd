"""How often each fusion must fire, from what a family's decoder layer is made of and the number of layers.

A count that differs means that the exporter's graph changed or a pattern missed: the engine would be slower than it says, or a
quantizer would miss a shared input, so the build stops (FusionMismatch). Some families come in shapes that ModelSpec does not
tell apart (GPT-NeoX with sequential residuals, StableLM with a parallel block); these list several, and the graph must agree with
one of them in every count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from builder.fuse.graph import is_op
from runtime.contract import ATTENTION_OP, DOMAIN, POSITIONS, ModelSpec
from runtime.errors import FusionMismatch, UnsupportedModel


@dataclass(frozen=True)
class Shape:
    """One decoder layer, as far as fusions see it."""

    norm: str = "rms_norm"  # the pass that makes the norms: rms_norm or layer_norm
    norms: int = 2  # per layer, head norms not counted
    head_norms: int = 0  # norms of q and k, per layer
    head_norm: str | None = None  # the pass that makes these, when it is not that of `norm`
    norm_per_head: bool = False  # instead, every head of q and k has a norm of its own
    residual_norms: int = 2  # sums of the residual stream that a norm reads, per layer
    position_sum: bool = False  # embedding + learned positions is such a sum too
    final_norm: bool = True
    rotary: str = "all"  # layers that rotate q and k: all, some (counted in the graph) or none
    qkv_merge: bool = True  # q, k and v are separate in the checkpoint
    gate: str | None = "swiglu"  # the pass that makes the gated unit
    gate_up_merge: bool = True  # gate and up are separate in the checkpoint


_LLAMA = Shape()
_HEAD_NORMS = Shape(head_norms=2)
_GEMMA3 = Shape(norms=4, head_norms=2, gate="geglu")
# ONNX has no LayerNormalization with a weight per head, so Cohere's stay centred RMS norms.
_COHERE = Shape(norm="layer_norm", norms=1, residual_norms=1)
_NEOX = Shape(norm="layer_norm", residual_norms=1, qkv_merge=False, gate=None)
_STABLELM = Shape(norm="layer_norm")
_OPT = Shape(norm="layer_norm", position_sum=True, rotary="none", gate=None)

# model_type → the shapes it comes in
FAMILIES: Mapping[str, tuple[Shape, ...]] = {
    "cohere": (_COHERE, replace(_COHERE, head_norms=2, head_norm="rms_norm")),  # parallel block; use_qk_norm
    "gemma2": (Shape(norms=4, gate="geglu"),),
    "gemma3": (_GEMMA3,),
    "gemma3_text": (_GEMMA3,),
    "gpt2": (Shape(norm="layer_norm", position_sum=True, rotary="none", qkv_merge=False, gate=None),),
    "gpt_neox": (_NEOX, replace(_NEOX, residual_norms=2)),  # use_parallel_residual or not
    "gptj": (Shape(norm="layer_norm", norms=1, residual_norms=1, gate=None),),  # parallel block
    "granite": (_LLAMA,),
    "llama": (_LLAMA,),
    "mistral": (_LLAMA,),
    "mixtral": (_LLAMA,),
    "olmo2": (Shape(head_norms=2, residual_norms=0),),  # norms after attention and MLP, none before
    "opt": (_OPT, replace(_OPT, position_sum=False, final_norm=False)),  # do_layer_norm_before or not
    "phi3": (Shape(qkv_merge=False, gate_up_merge=False),),
    "qwen2": (_LLAMA,),
    "qwen3": (_HEAD_NORMS,),
    "qwen3_moe": (_HEAD_NORMS,),
    "smollm3": (Shape(rotary="some"),),
    "stablelm": (  # use_parallel_residual or not, qk_layernorm or not
        _STABLELM,
        replace(_STABLELM, norms=1, residual_norms=1),
        replace(_STABLELM, norm_per_head=True),
        replace(_STABLELM, norms=1, residual_norms=1, norm_per_head=True),
    ),
}


@dataclass(frozen=True)
class Facts:
    """What the unfused graph says that ModelSpec does not."""

    rotated: int  # q and k inputs of attention that depend on the positions
    expert_layers: int  # layers whose MLP is a mixture of experts
    other_activations: int  # MLP activations that are no GELU (OPT's ReLU)


def facts(model: ir.Model) -> Facts:
    attentions = [node for node in model.graph if is_op(node, ATTENTION_OP, DOMAIN)]
    return Facts(
        rotated=sum(_is_rotated(value) for attention in attentions for value in attention.inputs[:2]),
        expert_layers=sum(is_op(node, "MoEExperts", DOMAIN) for node in model.graph),
        other_activations=sum(is_op(node, "Relu") for node in model.graph),
    )


def _is_rotated(value: ir.Value | None) -> bool:
    """Does q or k read the positions after its projection? Asked of the graph, not of any pattern."""
    queue, seen = deque([value]), set()
    while queue:
        value = queue.popleft()
        if value is None or value in seen:
            continue
        seen.add(value)
        if value.is_graph_input() and value.name == POSITIONS:
            return True
        node = value.producer()
        if node is not None and node.op_type not in ("MatMul", "Gemm"):
            queue.extend(node.inputs)
    return False


def expected(shape: Shape, spec: ModelSpec, facts: Facts) -> dict[str, int]:
    """Pass name → count. A pass that is not named here is not checked."""
    num_layers = len(spec.layers)
    norms = dict.fromkeys(("rms_norm", "layer_norm"), 0)
    norms[shape.norm] += num_layers * shape.norms + shape.final_norm
    norms[shape.head_norm or shape.norm] += num_layers * shape.head_norms
    if shape.norm_per_head:
        norms[shape.norm] += sum(layer.num_heads + layer.num_kv_heads for layer in spec.layers)
    # Layer 0 reads the embedding, which is no sum; the final norm reads the last layer's.
    sums = num_layers * shape.residual_norms + shape.position_sum if shape.residual_norms else int(shape.final_norm)
    dense = num_layers - facts.expert_layers
    counts = {
        **norms,
        "rotary": {"all": 2 * num_layers, "some": facts.rotated, "none": 0}[shape.rotary],
        "swiglu": dense if shape.gate == "swiglu" else 0,
        "geglu": dense if shape.gate == "geglu" else 0,
        "qkv_merge": num_layers if shape.qkv_merge else 0,
        "gate_up_merge": dense if shape.gate and shape.gate_up_merge else 0,
        "add_rms_norm": sums if shape.norm == "rms_norm" else 0,
        "add_layer_norm": sums if shape.norm == "layer_norm" else 0,
    }
    if shape.gate is None:
        counts["gelu"] = dense - facts.other_activations
    return counts


def check_counts(counts: Mapping[str, int], spec: ModelSpec, known: Facts, declined: Mapping[str, list[str]]) -> dict[str, int]:
    """The expected counts, when the found ones equal them for one of the family's shapes.

    Raises  FusionMismatch naming the pass, both counts and why matches were declined; UnsupportedModel for an unknown family
    """
    shapes = FAMILIES.get(spec.model_type)
    if shapes is None:
        raise UnsupportedModel(
            f"{spec.name}: no fusion counts are known for model_type {spec.model_type!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    candidates = [expected(shape, spec, known) for shape in shapes]
    closest = min(candidates, key=lambda each: sum(counts[name] != count for name, count in each.items()))
    wrong = [(name, counts[name], count) for name, count in closest.items() if counts[name] != count]
    if wrong:
        reasons = "".join(f"; {name} declined: {reason}" for name, _, _ in wrong for reason in declined.get(name, [])[:1])
        raise FusionMismatch(
            ", ".join(f"{name} fired {found} times instead of {count}" for name, found, count in wrong)
            + f" for {len(spec.layers)} layers of {spec.name} ({spec.model_type}){reasons}; "
            "use the versions of torch and transformers that forgeline is tested with, or report this model"
        )
    return closest
