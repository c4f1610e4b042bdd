"""What one step of the attention node launches: kernels, grids, arguments and workspace, from shapes alone.

    write_kv                  norm, rotary embedding, new keys and values into their pages, queries into the workspace
    plan, attention, merge    once for a step of one token per sequence; twice for a mixed one, decodes and prefills apart

Workspace    rotated queries [T, Hq, D] | plan | partial results | their log-sum-exp; passes reuse it, in stream order
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.paged_attention import matrix, tuning
from plugins.paged_attention.tensorrt_op import AttentionSpec
from plugins.paged_attention.tuning import AttentionVariant

# Most SMs of any GPU of an architecture: what the workspace, fixed when a plan is built, must suffice for.
MAX_SMS = {75: 72, 80: 128, 86: 84, 89: 144, 90: 144, 100: 160, 120: 192}
UNLIMITED = 2**30
_ALIGNMENT = 256


@dataclass(frozen=True)
class Pointer:
    """An address known at enqueue only."""

    base: str  # an input's name, "out" or "workspace"
    offset: int = 0  # bytes


Arguments = dict[str, "int | float | Pointer"]


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    arguments: Arguments


@dataclass(frozen=True)
class StepShape:
    num_tokens: int
    num_seqs: int
    table_width: int  # blocks per row of the block table


def variants(spec: AttentionSpec, query_dtype: str) -> dict[str, AttentionVariant]:
    """Phase → the attention kernel a node uses."""
    return {
        phase: AttentionVariant(
            phase, spec.head_dim, query_dtype, spec.key_kind, spec.value_kind, spec.block_size, spec.softcap > 0
        )
        for phase in tuning.PHASES
    }


def kernel_names(spec: AttentionSpec, query_dtype: str, arch: int) -> list[str]:
    """Every kernel the node may launch on `arch`."""
    sampling = {kernel.name for kernel in matrix.sampling()}
    specs = matrix.for_variants(list(variants(spec, query_dtype).values()), arch)
    return [kernel.name for kernel in specs if kernel.name not in sampling]


@dataclass(frozen=True)
class _Pass:
    """One plan, attention and merge: the sequences with so many new tokens, by the kernel of that phase."""

    phase: str
    query_lens: tuple[int, int]
    num_tokens: int
    max_query_len: int | None


def _passes(shape: StepShape) -> list[_Pass]:
    """A step of as many tokens as sequences is decoding; if it is not, the decode kernel is still right, only slower."""
    if shape.num_tokens <= shape.num_seqs:
        return [_Pass("decode", (1, UNLIMITED), shape.num_tokens, None)]
    return [
        _Pass("decode", (1, 1), min(shape.num_tokens, shape.num_seqs), 1),
        _Pass("prefill", (2, UNLIMITED), shape.num_tokens, None),
    ]


def _grid(spec: AttentionSpec, query_dtype: str, arch: int, num_sms: int, shape: StepShape, each: _Pass) -> tuning.AttentionGrid:
    per_sm = spec.decode_blocks_per_sm if each.phase == "decode" else spec.prefill_blocks_per_sm
    return tuning.attention_grid(
        num_tokens=each.num_tokens,
        num_seqs=shape.num_seqs,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_m=variants(spec, query_dtype)[each.phase].tiles(arch).block_m,
        resident_programs=num_sms * per_sm,
        max_query_len=each.max_query_len,
    )


def _query_bytes(spec: AttentionSpec, num_tokens: int) -> int:
    size = num_tokens * spec.q_width * 2
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def workspace_bytes(spec: AttentionSpec, query_dtype: str, arch: int, shape: StepShape) -> int:
    """Enough for every step of at most this shape on every GPU of the architecture."""
    one_each = StepShape(min(shape.num_tokens, shape.num_seqs), shape.num_seqs, shape.table_width)
    grids = [
        _grid(spec, query_dtype, arch, MAX_SMS[arch], each_shape, each)
        for each_shape in {shape, one_each}
        for each in _passes(each_shape)
    ]
    return _query_bytes(spec, shape.num_tokens) + max(grid.workspace_bytes for grid in grids)


def step_launches(spec: AttentionSpec, query_dtype: str, arch: int, num_sms: int, shape: StepShape) -> list[Launch]:
    """In stream order."""
    queries = Pointer("workspace")
    scratch = _query_bytes(spec, shape.num_tokens)
    row = spec.q_width + 2 * spec.kv_width
    unused = Pointer("out")  # a valid address for parameters that are not read
    scales: Arguments = {name: Pointer(name) if spec.has_scales else unused for name in ("k_scale", "v_scale")}
    sinks = Pointer("sinks") if spec.has_sinks else unused
    heads = tuning.WRITE_HEADS
    programs = -(-spec.num_heads // heads) + -(-spec.num_kv_heads // heads)
    launches = [
        Launch(
            matrix.write(spec.head_dim, query_dtype, spec.key_kind, spec.value_kind).name,
            (shape.num_tokens, programs, 1),
            {
                "query": Pointer("qkv"),
                "key": Pointer("qkv", 2 * spec.q_width),
                "value": Pointer("qkv", 2 * (spec.q_width + spec.kv_width)),
                "positions": Pointer("rows"),
                "slot_mapping": Pointer("slot_mapping"),
                "cos": Pointer("cos") if spec.rotary_dim else unused,
                "sin": Pointer("sin") if spec.rotary_dim else unused,
                "q_norm": Pointer("q_norm") if spec.has_norm else unused,
                "k_norm": Pointer("k_norm") if spec.has_norm else unused,
                **scales,
                "kv_table": Pointer("kv_pointers"),
                "query_out": queries,
                "layer": spec.layer,
                "q_stride": row,
                "k_stride": row,
                "v_stride": row,
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "block_size": spec.block_size,
                "rotary_dim": spec.rotary_dim,
                "interleaved": spec.interleaved,
                "has_norm": spec.has_norm,
                "eps": spec.eps,
            },
        )
    ]
    for each in _passes(shape):
        variant = variants(spec, query_dtype)[each.phase]
        tiles = variant.tiles(arch)
        grid = _grid(spec, query_dtype, arch, num_sms, shape, each)
        plan = Pointer("workspace", scratch)
        partial = Pointer("workspace", scratch + grid.plan_bytes)
        partial_lse = Pointer("workspace", scratch + grid.plan_bytes + grid.partial_bytes)
        rows: Arguments = {"query_start_loc": Pointer("query_start_loc"), "plan": plan, "num_seqs": shape.num_seqs}
        heads_and_sinks: Arguments = {
            "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "sinks": sinks, "has_sinks": spec.has_sinks,
        }  # fmt: skip
        launches += [
            Launch(
                matrix.plan(tiles.tile).name,
                (1, 1, 1),
                {
                    **rows,
                    "seq_lens": Pointer("seq_lens"),
                    "block_tokens": grid.block_tokens,
                    "window": spec.sliding_window,
                    "slots": grid.slots,
                    "min_tiles": tuning.MIN_TILES,
                    "fixed_tiles": 0,
                    "min_query": each.query_lens[0],
                    "max_query": each.query_lens[1],
                },
            ),
            Launch(
                variant.name,
                (grid.work_items, grid.parts, 1),
                {
                    **rows,
                    **heads_and_sinks,
                    **scales,
                    "query": queries,
                    "kv_table": Pointer("kv_pointers"),
                    "block_table": Pointer("block_table"),
                    "seq_lens": Pointer("seq_lens"),
                    "out": Pointer("out"),
                    "partial": partial,
                    "partial_lse": partial_lse,
                    "layer": spec.layer,
                    "table_stride": shape.table_width,
                    "window": spec.sliding_window,
                    "scale": spec.scale,
                    "softcap": spec.softcap,
                },
            ),
            Launch(
                matrix.merge(spec.head_dim, query_dtype, tiles.block_m).name,
                (grid.blocks, grid.parts, grid.merge_rows),
                {
                    **rows,
                    **heads_and_sinks,
                    "partial": partial,
                    "partial_lse": partial_lse,
                    "out": Pointer("out"),
                    "rows_per_program": grid.rows_per_program,
                },
            ),
        ]
    return launches
