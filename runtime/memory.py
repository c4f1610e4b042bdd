"""What a process that serves an engine on the CPU has resident: the arithmetic of `builder plan` and of the check at load.

    base          interpreter, libraries, their code that compiling and running touches
    tokenizer     tables of `tokenizers`, by vocabulary
    graph         compiled nodes, by layer
    kernels       OpenVINO's generated code of layers that quantize their inputs, for every number of tokens a step may have
                  (padding.py); our own kernels generate none
    weights       as the plug-in lays them out; the pages of the file go back (mapped_weights.py)
    activations   of the largest step; twice the width of all outputs of a layer
    logits        of the largest batch, and the sampler's copy
    pool          every block of the KV cache, once it has been used

Constants are differences of VmRSS between the stages that `bench/memory.py --stages` prints, of tiny Llama (4 layers, vocabulary
2,048) and SmolLM2 (30 layers, 49,152) in int8 and int4, with openvino 2026.4.1 and CPython 3.11 on x86-64. No other model went
into them. Clean pages of libraries count in full although other processes share them.

Units    bytes; bare sizes are tokens
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.contract import Manifest
from runtime.padding import num_lengths, padded_length

MIB = 1 << 20
BASE = 125 * MIB
OWN_BASE = 106 * MIB  # graphs on our kernels touch less of OpenVINO's code
TOKENIZER_PER_ENTRY = 580
GRAPH_PER_LAYER = int(1.2 * MIB)
OWN_GRAPH_PER_LAYER = int(0.4 * MIB)  # quantized layers and attention on our kernels: fewer nodes
KERNELS_PER_LENGTH = int(0.6 * MIB)
_FLOAT = 4


@dataclass(frozen=True)
class BesidePool:
    """Everything but the KV cache."""

    base: int
    tokenizer: int
    graph: int
    kernels: int
    weights: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.base + self.still_to_come

    @property
    def still_to_come(self) -> int:
        """What an interpreter that has imported the runtime does not have yet."""
        return self.tokenizer + self.graph + self.kernels + self.weights + self.activations + self.logits


def loaded_weight_bytes(
    weight_bytes: float, parameters: int, tables: int, precision: str, *, emulated: bool, arithmetic: str = "f32"
) -> float:
    """What `weight_bytes` of a plan become; `tables` of the parameters are embedding and head."""
    if emulated:  # the decoded f32 weights of the layers, and the layout of the kernels
        return _FLOAT * (2 * parameters - tables)
    if precision == "bf16":  # widened; for bf16 arithmetic narrowed again, small and large steps having layouts of their own
        return _FLOAT * parameters * (2 if arithmetic == "bf16" else 1)
    if precision == "int8-wo" and arithmetic == "f32":  # f32 inputs: small and large steps have layouts of their own
        return weight_bytes + parameters - tables
    return weight_bytes


def beside_pool(
    *,
    loaded_weights: float,
    parameters: int,
    tables: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    generated_kernels: bool,
    own_kernels: bool = False,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> BesidePool:
    largest = padded_length(max_num_batched_tokens)
    layer_width = (parameters - tables) / (num_layers * hidden_size)
    return BesidePool(
        base=OWN_BASE if own_kernels else BASE,
        tokenizer=TOKENIZER_PER_ENTRY * vocab_size,
        graph=(OWN_GRAPH_PER_LAYER if own_kernels else GRAPH_PER_LAYER) * num_layers,
        kernels=KERNELS_PER_LENGTH * num_lengths(max_num_batched_tokens) if generated_kernels else 0,
        weights=int(loaded_weights),
        activations=int(2 * _FLOAT * largest * layer_width),
        logits=2 * _FLOAT * max_num_seqs * vocab_size,
    )


def of_engine(manifest: Manifest, max_num_seqs: int, max_num_batched_tokens: int) -> BesidePool:
    """Of an engine of the CPU target. Manifests do not say whether the head is tied, so one table is taken for both."""
    model, precision = manifest.model, manifest.precision
    tables = min(model.vocab_size * model.hidden_size, model.num_parameters)
    return beside_pool(
        loaded_weights=loaded_weight_bytes(
            manifest.weight_bytes,
            model.num_parameters,
            tables,
            precision.name,
            emulated=precision.emulated,
            arithmetic=str(precision.details.get("arithmetic", "f32")),
        ),
        parameters=model.num_parameters,
        tables=tables,
        num_layers=len(model.layers),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        generated_kernels=bool(precision.details.get("dynamic_quantization_group_size"))
        and precision.details.get("kernels") != "forgeline",
        own_kernels=precision.details.get("kernels") == "forgeline",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
