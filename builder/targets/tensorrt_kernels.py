"""The attention and sampling kernels of one engine: compiled ahead of time, cached by their source, copied into the bundle.

An engine carries its kernels, so that the machine that runs it needs neither compiler nor cache. What the compiler says of their
registers decides how many programs fit an SM, which the plugin's nodes are told: grids and workspace follow from it.

Raises   BuildError when the compiler is missing or rejects a kernel
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from plugins.paged_attention import cubins, matrix, tuning
from plugins.paged_attention.tuning import AttentionVariant
from runtime.contract import ModelSpec, cache_root
from runtime.errors import BuildError

Occupancy = dict[tuple[str, int], int]  # (phase, head_dim) → resident programs per SM


def variants(
    spec: ModelSpec, query_dtype: str, key_kind: str, value_kind: str, block_size: int, softcap: Iterable[bool] = (False,)
) -> list[AttentionVariant]:
    head_dims = [layer.head_dim for layer in spec.layers]
    return [
        variant
        for capped in sorted(set(softcap))
        for variant in matrix.for_layers(head_dims, query_dtype, key_kind, value_kind, block_size, softcap=capped)
    ]


def compile_kernels(wanted: list[AttentionVariant], arch: str, destination: Path) -> Occupancy:
    """`arch` as in sm89. Writes <destination>/sm89/<name>.cubin and .json."""
    try:
        from plugins.paged_attention import aot

        cache = cache_root() / "kernels" / aot.source_sha256()[:16]
        number = int(arch.removeprefix("sm"))
        for kernel in matrix.for_variants(wanted, number):
            aot.build_one(kernel, number, cache)
            cubins.save(cubins.load(cache, number, kernel.name), destination)
    except ImportError as error:
        raise BuildError(
            f"the attention kernels cannot be compiled ({error}); pip install 'forgeline[gpu]' on Python 3.11 or newer"
        ) from error
    except aot.KernelRejected as error:
        raise BuildError(f"a kernel for {arch} was rejected: {error}") from error
    return occupancy(wanted, number, destination)


def occupancy(wanted: list[AttentionVariant], arch: int, directory: Path) -> Occupancy:
    """The least of the variants of each phase and head size."""
    found: Occupancy = {}
    for variant in wanted:
        if not variant.supported(arch):
            continue
        binary = cubins.load(directory, arch, variant.name)
        programs = tuning.blocks_per_sm(
            arch, registers=binary.registers, shared_bytes=binary.shared_bytes, num_warps=binary.num_warps
        )
        key = (variant.phase, variant.head_dim)
        found[key] = min(found.get(key, programs), programs)
    return found


def attributes(occupied: Mapping[tuple[str, int], int], head_dim: int) -> dict[str, int]:
    """Of a plugin node."""
    return {f"{phase}_blocks_per_sm": occupied[phase, head_dim] for phase in tuning.PHASES}
