"""KV pools in GPU memory: sized from the model, laid out as the attention kernels want them, refused when too large.

Pools    per layer and side [num_blocks, Hkv, block_size, D]; the plugin finds them through `pointers`, int64 [layers, 2]
Copies   whole blocks, so scales and formats do not matter
Raises   ManifestMismatch: how many tokens would fit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.contract import Manifest
from runtime.errors import ManifestMismatch
from runtime.executors.cuda import Cuda
from runtime.executors.tensorrt_step import aligned

LAYOUT = "paged-heads-first"  # as the manifest names it
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f8": 1, "i8": 1}  # scales are constants of the engine: no memory per token
RESERVE_BYTES = 256 << 20  # for what CUDA and TensorRT allocate themselves: contexts, graphs, kernel code


def block_bytes(manifest: Manifest) -> list[tuple[int, int]]:
    """(keys, values) of one block, by layer. Raises ManifestMismatch for a format or size this runtime does not know."""
    kv = manifest.kv_cache
    if kv.layout != LAYOUT:
        raise ManifestMismatch(
            f"the engine's KV cache layout is {kv.layout!r} but this runtime knows {LAYOUT} on a GPU; "
            "rebuild the engine with this version of forgeline"
        )
    for dtype in (kv.key_dtype, kv.value_dtype):
        if dtype not in ELEMENT_BYTES:
            raise ManifestMismatch(
                f"the engine's KV cache holds {dtype} but this runtime knows {', '.join(ELEMENT_BYTES)} on a GPU; "
                "rebuild the engine with this version of forgeline"
            )
    sizes = []
    for layer in manifest.model.layers:
        elements = layer.num_kv_heads * kv.block_size * layer.head_dim
        sizes.append((elements * ELEMENT_BYTES[kv.key_dtype], elements * ELEMENT_BYTES[kv.value_dtype]))
    per_token = sum(map(sum, sizes)) // kv.block_size
    if per_token != kv.bytes_per_token:
        raise ManifestMismatch(
            f"the engine was built for {kv.bytes_per_token} bytes of KV cache per token but this runtime lays out {per_token}; "
            "rebuild the engine with this version of forgeline"
        )
    return sizes


def check_fits(manifest: Manifest, num_blocks: int, free_bytes: int, total_bytes: int) -> None:
    """Whether pools of `num_blocks` fit what is left of the GPU once weights and activations are there."""
    sizes = block_bytes(manifest)
    block_size = manifest.kv_cache.block_size
    need = num_blocks * sum(map(sum, sizes))
    left = max(0, free_bytes - RESERVE_BYTES)
    if need > left:
        fit = left // sum(map(sum, sizes)) * block_size
        raise ManifestMismatch(
            f"a KV cache of {num_blocks * block_size} tokens needs {need / 2**20:.0f} MiB but beside weights and activations "
            f"{left / 2**20:.0f} of the GPU's {total_bytes / 2**20:.0f} MiB are free: {fit} tokens would fit; "
            f"set num_blocks={fit // block_size} or less, or free memory on the GPU"
        )


class DevicePools:
    def __init__(self, cuda: Cuda, manifest: Manifest, num_blocks: int, stream: Any) -> None:
        """Zeroed in stream order. The caller has made sure that they fit."""
        self._cuda = cuda
        self._blocks = block_bytes(manifest)
        self.num_blocks = num_blocks
        sizes = [(aligned(num_blocks * key), aligned(num_blocks * value)) for key, value in self._blocks]
        self.num_bytes = num_blocks * sum(map(sum, self._blocks))
        self._memory = cuda.allocate(total := sum(map(sum, sizes)))
        cuda.clear(self._memory, total, stream)
        starts = self._memory + np.concatenate([[0], np.cumsum(np.array(sizes, np.int64).reshape(-1))[:-1]])
        self._starts = starts.reshape(-1, 2)
        table = self._starts.astype(np.int64)
        self.pointers = cuda.allocate(table.nbytes)
        staging, view = cuda.allocate_host(table.nbytes)
        view[:] = table.reshape(-1).view(np.uint8)
        cuda.to_device(self.pointers, staging, table.nbytes, stream)
        cuda.synchronize(stream)
        cuda.free_host(staging)

    def copy_blocks(self, copies: Sequence[tuple[int, int]], stream: Any) -> None:
        """(source, destination), in stream order; no block may be both."""
        sources, destinations = {source for source, _ in copies}, {target for _, target in copies}
        assert len(destinations) == len(copies) and not sources & destinations, f"copies that depend on each other: {copies}"
        for starts, sizes in zip(self._starts.tolist(), self._blocks, strict=True):
            for start, size in zip(starts, sizes, strict=True):
                for source, target in copies:
                    self._cuda.on_device(start + target * size, start + source * size, size, stream)

    def close(self) -> None:
        self._cuda.free(self._memory)
        self._cuda.free(self.pointers)
