"""Runs an engine of target cpu on OpenVINO: one ragged step per `execute`, pools updated in place. One thread at a time.

    paged        pools in the layout of the attention kernels, ours or the CPU plug-in's, which write them in place
    plain        models whose attention is decomposed: each step returns new pools, which the next step reads

Loading compiles the lowered ONNX (OpenVINO cannot cache a compiled paged-attention model); weights are memory-mapped, and their
pages given back when the plug-in has copied them (mapped_weights.py).

Arithmetic is the engine's: f32, where a request's result does not depend on what shares its steps, or bf16, which is faster and
promises no such thing, so it needs neither neighbours for single rows nor prompts in parts of two tokens. Nor do engines that
run on our kernels alone (quantized layers and attention), whose rows never depend on their neighbours.

Raises   ManifestMismatch when the library, the pool layout or the CPU's arithmetic is not what the engine was built for
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov

from plugins.decoder_layers import openvino as decoder_layers
from plugins.paged_attention import openvino as paged
from plugins.paged_attention.openvino_own import OwnAttention
from plugins.quantized_matmul import openvino as quantized
from plugins.quantized_matmul.native import missing_cpu_flags
from plugins.sampling.native.choose import Choose
from runtime import contract
from runtime.batch import StepInputs
from runtime.contract import Manifest, check_library
from runtime.errors import EngineError, ManifestMismatch
from runtime.executors.base import StepOutput
from runtime.executors.mapped_weights import MappedWeights
from runtime.kv_cache import KVCache, PoolLayout
from runtime.padding import pad

_GROUP_SIZE = "dynamic_quantization_group_size"
_INDEPENDENT = "rows_independent"  # every layer with weights and the attention run on our kernels
_LAYOUTS = (paged.LAYOUT_OWN, paged.LAYOUT_PAGED, paged.LAYOUT_PLAIN)


class OpenVINOExecutor:
    def __init__(self, engine_dir: str | os.PathLike[str], manifest: Manifest, num_blocks: int, num_threads: int) -> None:
        check_library(manifest, paged.LIBRARY, paged.library_version())
        layout = manifest.kv_cache.layout
        if layout not in _LAYOUTS:
            raise ManifestMismatch(
                f"the engine's KV cache layout is {layout!r} but this runtime knows {', '.join(_LAYOUTS)}; "
                "rebuild the engine with this version of forgeline"
            )
        needed = {"plan.model": manifest.plan, f"precision.details.{_GROUP_SIZE}": manifest.precision.details}
        lacks = [name for name, values in needed.items() if name.rpartition(".")[2] not in values]
        if lacks:
            raise ManifestMismatch(f"{engine_dir}: manifest.json is damaged (no {' and no '.join(lacks)}); rebuild the engine")
        self.block_size = manifest.kv_cache.block_size
        self.num_blocks = num_blocks
        self.vocab_size = manifest.model.vocab_size
        compute_dtype = _compute_dtype(manifest)
        # OpenVINO: one new token runs the decode kernel, more run the prefill kernel, and their sums differ in the last bits.
        self._rows_independent = bool(manifest.precision.details.get(_INDEPENDENT))
        self.min_prefill_tokens = self._least_rows = 2 if compute_dtype == "f32" and not self._rows_independent else 1
        model = Path(engine_dir) / manifest.plan["model"]
        compiled = _compile(model, manifest, compute_dtype, num_threads)
        kernels = manifest.plan.get("kernels")
        self._choose = Choose.of(Path(engine_dir) / kernels, num_threads) if kernels else None
        self._weights = MappedWeights(model.parent)
        blocks = paged.pool_blocks(compiled)
        per_token = sum(block.num_bytes for block in blocks.values()) / self.block_size
        if per_token != manifest.kv_cache.bytes_per_token:
            raise ManifestMismatch(
                f"the engine was built for {manifest.kv_cache.bytes_per_token} bytes of KV cache per token but this CPU wants "
                f"{per_token:g}; rebuild the engine on this machine"
            )
        layouts = {name: PoolLayout(block.storage_shape, block.dtype) for name, block in blocks.items()}
        self._cache = KVCache(layouts, num_blocks + 1)  # the last block is the padding's
        self._request = compiled.create_infer_request()
        self._weights.release()  # wide weights were copied by the compiler
        self._inputs = [name for name in contract.STEP_INPUTS if any(name in value.names for value in compiled.inputs)]
        self._fed: dict[str, tuple[npt.NDArray, npt.NDArray]] = {}  # what came last, and the tensor it is in
        self._logits = next(index for index, value in enumerate(compiled.outputs) if contract.LOGITS in value.names)
        for name, pool in self._cache.pools.items():
            tensor = blocks[name].tensor(pool)
            self._request.set_tensor(name, tensor)
            if layout == paged.LAYOUT_PLAIN:
                self._request.set_tensor(_output_of(name), tensor)

    def execute(self, inputs: StepInputs) -> StepOutput:
        request = self._request
        if not self._rows_independent:
            inputs = pad(inputs, self.num_blocks, self.block_size, self._least_rows)
        for name in self._inputs:
            self._feed(name, getattr(inputs, name))
        request.infer()
        self._weights.release_after(len(inputs.input_ids))
        logits = request.get_output_tensor(self._logits).data
        return StepOutput(logits, logits.argmax(axis=-1), self._choose)

    def _feed(self, name: str, values: npt.NDArray) -> None:
        """Into the tensor of the step before where the shape is the same: to set another takes 12 µs."""
        last, tensor = self._fed.get(name, (None, None))
        if values is last and not values.flags.writeable:  # BatchBuilder repeats an array that has not changed
            return
        if tensor is not None and tensor.shape == values.shape and tensor.dtype == values.dtype:
            if values.size:  # not by numpy, which gives the interpreter's lock to the output thread even to copy a number
                tensor.data.cast("B")[:] = np.ascontiguousarray(values).data.cast("B")
        else:
            tensor = values.copy()
            self._request.set_tensor(name, ov.Tensor(tensor, shared_memory=True))
        self._fed[name] = values, tensor

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(copies)

    def kv_cache_bytes(self) -> int:
        return self._cache.num_bytes // (self.num_blocks + 1) * self.num_blocks

    def close(self) -> None:
        del self._request
        self._cache.pools.clear()


def _compute_dtype(manifest: Manifest) -> str:
    """From "f32", "bf16" or "f32, emulating fp8"."""
    arithmetic = str(manifest.precision.details.get("arithmetic", "f32"))
    dtype = arithmetic.partition(",")[0]
    if dtype not in paged.COMPUTE_DTYPES:
        raise ManifestMismatch(
            f"the engine's arithmetic is {arithmetic!r} but this runtime knows {', '.join(paged.COMPUTE_DTYPES)}; "
            "rebuild the engine with this version of forgeline"
        )
    return dtype


def _compile(path: Path, manifest: Manifest, compute_dtype: str, num_threads: int) -> ov.CompiledModel:
    core = ov.Core()
    if compute_dtype == "bf16" and not paged.has_bf16(core):
        raise ManifestMismatch(
            "the engine computes in bf16, which this CPU lacks; run it on a CPU with AVX512-BF16 or AMX, "
            "or rebuild it with --compute-dtype f32"
        )
    own = None
    if "kernels" in manifest.plan:
        library = path.parent.parent / manifest.plan["kernels"]
        _add_kernels(core, library)
        if manifest.kv_cache.layout == paged.LAYOUT_OWN:
            own = OwnAttention(library, manifest.kv_cache.key_dtype, manifest.kv_cache.value_dtype)
            decoder_layers.add_to(core, library, own)
    options = paged.compile_options(
        key_dtype=manifest.kv_cache.key_dtype,
        value_dtype=manifest.kv_cache.value_dtype,
        head_dims=[layer.head_dim for layer in manifest.model.layers],
        dynamic_quantization_group_size=manifest.precision.details[_GROUP_SIZE],
        num_threads=num_threads,
        compute_dtype=compute_dtype,
    )
    try:
        compiled = core.compile_model(paged.read_model(core, path, own), "CPU", options)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(f"OpenVINO cannot compile {path} ({reason}); rebuild the engine") from error
    assert paged.computes_in(compiled) == compute_dtype, f"OpenVINO computes in {paged.computes_in(compiled)}"
    return compiled


def _add_kernels(core: ov.Core, library: Path) -> None:
    if missing := missing_cpu_flags():
        raise ManifestMismatch(
            f"the engine's kernels need {', '.join(missing)}, which this CPU lacks; run it on a CPU with AVX512-VNNI, or "
            "rebuild it with --cpu-kernels openvino"
        )
    try:
        quantized.add_to(core, library)
    except (OSError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(f"{library} cannot be loaded ({reason}); rebuild the engine on this machine") from error


def _output_of(pool: str) -> str:
    """k_pool.3 → k_pool_out.3"""
    side, layer = pool.split(".")
    return f"{side}_out.{layer}"
