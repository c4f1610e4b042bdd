"""Runs the canonical graph itself on ONNX Runtime: the executable specification that every compiled target is compared with.

The file carries the custom ops as model-local functions (plugins.paged_attention.op.attach_functions) and returns the pools as
outputs; each step's outputs are the next step's inputs. float32 throughout. Knows shapes only from the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from runtime import contract
from runtime.batch import StepInputs
from runtime.errors import EngineError
from runtime.executors.base import StepOutput

DEFAULT_BLOCK_SIZE = 16


class ReferenceExecutor:
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_threads: int = 0,
        *,
        pool_fill: float = 0.0,
    ) -> None:
        """`num_threads` 0 leaves the choice to ONNX Runtime. `pool_fill` is what unwritten pages hold; tests use NaN."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        # 1 = fp32. The default, 4, quantizes the inputs of layers with integer weights: 2e-2 off what the graph says.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            self._session = ort.InferenceSession(os.fspath(model_path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class
            reason = str(error).strip().splitlines()[0]
            raise EngineError(f"{model_path} cannot be loaded by ONNX Runtime ({reason}); rebuild the engine") from error
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        outputs = {value.name: value.shape for value in self._session.get_outputs()}
        num_layers = sum(name.startswith(contract.k_pool(0)[:-1]) for name in shapes)
        layers = range(num_layers)
        self._pool_names = [*map(contract.k_pool, layers), *map(contract.v_pool, layers)]
        self._output_names = [
            contract.LOGITS, contract.NEXT_TOKEN, *map(contract.k_pool_out, layers), *map(contract.v_pool_out, layers),
        ]  # fmt: skip
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.min_prefill_tokens = 1
        self.vocab_size = int(outputs[contract.LOGITS][1])
        self._pools = [
            ort.OrtValue.ortvalue_from_numpy(np.full((num_blocks, block_size, *shapes[name][2:]), pool_fill, np.float32))
            for name in self._pool_names
        ]

    def execute(self, inputs: StepInputs) -> StepOutput:
        feed = {name: ort.OrtValue.ortvalue_from_numpy(getattr(inputs, name)) for name in contract.STEP_INPUTS}
        feed.update(zip(self._pool_names, self._pools, strict=True))
        logits, next_token, *self._pools = self._session.run_with_ort_values(self._output_names, feed)
        return StepOutput(logits.numpy(), next_token.numpy())

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, destinations = np.array(copies).T
        for index, pool in enumerate(self._pools):
            array = pool.numpy()
            array[destinations] = array[sources]
            self._pools[index] = ort.OrtValue.ortvalue_from_numpy(array)

    def kv_cache_bytes(self) -> int:
        return sum(int(np.prod(pool.shape())) * 4 for pool in self._pools)

    def close(self) -> None:
        self._pools.clear()
        del self._session
