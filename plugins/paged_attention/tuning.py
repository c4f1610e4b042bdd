"""Tile sizes of the kernels per GPU architecture, and the grids and workspaces of a launch. Standard library only.

Used by aot.py (what to compile), launch.py (compile on the GPU or interpret) and the TensorRT plugin (launch cubins), so that the
three agree. Tile sizes were chosen from what compiles without spills and fits shared memory; docs/kernels.md has the table.

Units    tokens and elements, unless the name says bytes
"""

from __future__ import annotations

from dataclasses import dataclass

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)  # compute capability, major * 10 + minor
HEAD_DIMS = (64, 80, 96, 128, 256)
QUERY_DTYPES = ("fp16", "bf16")
KV_KINDS = ("fp16", "bf16", "fp8", "int8")
KV_BYTES = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
PHASES = ("decode", "prefill")

PLAN_BLOCK = 256  # sequences per pass of plan_splits
PLAN_WAVES = 4  # rounds of resident programs it considers
MIN_TILES = 2  # least tiles of a split
MERGE_SPLITS = 16  # splits merge_splits reads at once
WRITE_HEADS = 4  # heads per program of write_kv
SAMPLE_BLOCK = 1024  # vocabulary entries per pass of the sampling kernel
SAMPLE_PIVOTS = 16  # thresholds tried per pass of its searches

# Per SM: threads, blocks, registers, shared memory in bytes (of which each block also takes 1 KiB from SM80 on).
_SM_LIMITS = {
    75: (1024, 16, 65536, 64 << 10),
    80: (2048, 32, 65536, 164 << 10),
    86: (1536, 16, 65536, 100 << 10),
    89: (1536, 24, 65536, 100 << 10),
    90: (2048, 32, 65536, 228 << 10),
    100: (2048, 32, 65536, 228 << 10),
    120: (1536, 32, 65536, 100 << 10),
}


def max_shared_bytes(arch: int) -> int:
    """Dynamic shared memory one block may ask for."""
    total = _SM_LIMITS[arch][3]
    return total if arch < 80 else total - 1024


def blocks_per_sm(arch: int, *, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Resident blocks per SM (occupancy), from a kernel's resources; registers are allocated per warp in units of 256."""
    threads, blocks, register_file, shared_total = _SM_LIMITS[arch]
    per_warp = -(-registers * 32 // 256) * 256
    reserved = 1024 if arch >= 80 else 0
    return max(
        1,
        min(
            threads // (32 * num_warps),
            blocks,
            register_file // (per_warp * num_warps),
            shared_total // (shared_bytes + reserved) if shared_bytes + reserved else blocks,
        ),
    )


@dataclass(frozen=True)
class Tiles:
    block_m: int  # rows: packed query heads × tokens
    tile: int  # keys per step
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionVariant:
    """One compiled attention kernel; everything not named here is a run-time argument."""

    phase: str
    head_dim: int
    query_dtype: str
    key_kind: str
    value_kind: str
    block_size: int
    softcap: bool = False

    @property
    def name(self) -> str:
        kinds = f"{self.query_dtype}_k{self.key_kind}_v{self.value_kind}"
        cap = "_softcap" if self.softcap else ""
        return f"attention_{self.phase}_d{self.head_dim}_{kinds}_b{self.block_size}{cap}"

    def tiles(self, arch: int) -> Tiles:
        return attention_tiles(self, arch)

    def supported(self, arch: int) -> bool:
        """SM75 has no bf16 arithmetic."""
        return arch >= 80 or "bf16" not in (self.query_dtype, self.key_kind, self.value_kind)


def head_pad(head_dim: int) -> int:
    """The power of two that a head's registers are padded to."""
    return 1 << (head_dim - 1).bit_length()


def attention_tiles(variant: AttentionVariant, arch: int) -> Tiles:
    wide = head_pad(variant.head_dim) > 128
    if arch < 80:  # no tensor-core path in the compiler: small tiles keep the operands in registers
        return Tiles(block_m=16 if variant.phase == "decode" else 32, tile=16, num_warps=8, num_stages=1)
    if variant.phase == "decode":
        return Tiles(block_m=16, tile=32 if wide else 64, num_warps=4, num_stages=3)
    if arch in (90, 100):
        return Tiles(block_m=64 if wide else 128, tile=32 if wide else 64, num_warps=8, num_stages=3)
    if wide:
        return Tiles(block_m=64, tile=16, num_warps=8, num_stages=3)
    # On SM120 the third stage spills with heads of 64.
    return Tiles(block_m=64, tile=64, num_warps=8, num_stages=2 if arch == 120 and variant.head_dim <= 64 else 3)


def packed_heads(num_heads: int, num_kv_heads: int, block_m: int) -> int:
    """Query heads of one KV head that share a program."""
    return min(num_heads // num_kv_heads, block_m)


def grid_parts(num_heads: int, num_kv_heads: int, block_m: int) -> int:
    """The grid's second axis: KV heads × programs per group."""
    group = num_heads // num_kv_heads
    return num_kv_heads * -(-group // packed_heads(num_heads, num_kv_heads, block_m))


@dataclass(frozen=True)
class AttentionGrid:
    """Bounds of one launch for at most `num_tokens` tokens of `num_seqs` sequences; fits every step within them."""

    block_tokens: int  # query tokens per block
    parts: int  # grid axis 1
    slots: int  # resident programs / parts
    blocks: int  # token blocks
    work_items: int  # grid axis 0 of paged_attention
    rows_per_program: int
    merge_rows: int  # grid axis 2 of merge_splits
    plan_bytes: int
    partial_bytes: int
    lse_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.plan_bytes + self.partial_bytes + self.lse_bytes


def attention_grid(
    *,
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_m: int,
    resident_programs: int,
    max_query_len: int | None = None,
    fixed_splits: int = 0,
) -> AttentionGrid:
    """`resident_programs` = SMs × blocks_per_sm. `fixed_splits` is for batch-invariant results: the
    splits of the longest sequence, ceil(max_model_len / (TILE * fixed_tiles))."""
    packed = packed_heads(num_heads, num_kv_heads, block_m)
    block_tokens = block_m // packed
    parts = grid_parts(num_heads, num_kv_heads, block_m)
    slots = max(1, resident_programs // parts)
    blocks = min(num_tokens, num_tokens // block_tokens + num_seqs)
    work_items = blocks * fixed_splits if fixed_splits else slots * PLAN_WAVES + blocks
    rows = min(block_m, packed * (max_query_len or num_tokens))
    rows_per_program = 1 if rows <= 32 else 16
    align = 256
    cells = work_items * parts * block_m
    return AttentionGrid(
        block_tokens=block_tokens,
        parts=parts,
        slots=slots,
        blocks=blocks,
        work_items=work_items,
        rows_per_program=rows_per_program,
        merge_rows=-(-rows // rows_per_program),
        plan_bytes=-(-3 * (num_seqs + 1) * 4 // align) * align,
        partial_bytes=-(-cells * head_dim * 4 // align) * align,
        lse_bytes=-(-cells * 4 // align) * align,
    )
