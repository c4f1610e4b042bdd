"""Paged attention on GPUs, in OpenAI Triton: plan the splits, attend, merge the splits. Three launches, no host synchronization.

One source serves decode (BLOCK_M 16) and prefill or mixed steps (BLOCK_M 64 and up): the difference is in the constants that
tuning.py chooses. Scores live in registers, one [BLOCK_M, TILE] tile at a time; nothing of size queries × keys is ever stored.

Packing      a program's BLOCK_M rows are `packed` query heads of one KV head times BLOCK_M // packed consecutive tokens, so a
             KV tile is read once for all query heads that share it (GQA, MQA)
Work item    (sequence, block of tokens, split of the keys). `plan_splits` lists them as prefix sums, from sequence lengths that
             only the device knows; programs beyond the last item leave at once, so one grid fits every step of a CUDA graph
KV pools     [num_blocks, Hkv, block_size, D] per layer, found through `kv_table` int64 [layers, 2] (keys, values)
KV formats   fp16, bf16, fp8 (E4M3, converted by hardware, SM89 and newer), fp8soft (E4M3, by shifts, any GPU), int8; keys and
             values are chosen separately, the 8-bit ones with a scale per KV head
Free pages   may hold anything, NaN included: what lies before the window or past the length is never loaded
Empty rows   a sequence of seq_len 0 gets zeros, so padding in a captured graph stays finite
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_LIMIT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def locate(prefix, target, count):
    """The last s < count with prefix[s] <= target: the owner of item `target`; owners of nothing are never the answer."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(prefix + middle) <= target:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _work_of(query_start_loc, seq_lens, row, num_seqs, block_tokens, window, min_query, max_query, TILE: tl.constexpr):
    """Of each sequence: blocks of query tokens, and KV tiles the longest of them visits."""
    alive = row < num_seqs
    begin = tl.load(query_start_loc + row, mask=alive, other=0)
    end = tl.load(query_start_loc + row + 1, mask=alive, other=0)
    count = end - begin
    length = tl.load(seq_lens + row, mask=alive, other=0)
    blocks = tl.where((count >= min_query) & (count <= max_query), tl.cdiv(count, block_tokens), 0)
    tiles = tl.cdiv(length, TILE)
    span = tl.where(window > 0, tl.cdiv(window + block_tokens, TILE) + 1, NO_LIMIT)
    return blocks, tl.maximum(tl.minimum(tiles, span), 1)


@triton.jit
def plan_splits(
    query_start_loc,  # int32 [num_seqs + 1]
    seq_lens,  # int32 [num_seqs]
    plan,  # int32 [3, num_seqs + 1]: work items before s; token blocks before s; splits of each block of s
    num_seqs,
    block_tokens,  # query tokens per block: BLOCK_M // packed heads
    window,  # tokens; 0 = full attention
    slots,  # programs that run at once, divided by the grid's second axis
    min_tiles,  # least tiles of a split
    fixed_tiles,  # > 0: tiles of every split, whatever else is in the batch (batch-invariant results)
    min_query,  # only sequences with this many new tokens: lets one step use two specialisations
    max_query,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAVES: tl.constexpr,
):
    """One program. Splits are equal in tiles across the batch, so long sequences get more of them.

    Of 1..WAVES rounds of resident programs, the one that ends first is taken: rounds × (tiles per split + 2), 2 being the cost of
    starting and merging a split. At most slots * WAVES + blocks work items result, which bounds the grid and the workspace.
    """
    lanes = tl.arange(0, BLOCK)
    total = 0
    longest = 0
    for first in range(0, num_seqs, BLOCK):
        blocks, tiles = _work_of(
            query_start_loc, seq_lens, first + lanes, num_seqs, block_tokens, window, min_query, max_query, TILE
        )
        total += tl.sum(blocks * tiles, 0)
        longest = tl.maximum(longest, tl.max(tl.where(blocks > 0, tiles, 0), 0))
    chosen = tl.maximum(longest, 1)
    if fixed_tiles > 0:
        chosen = fixed_tiles
    else:
        best = NO_LIMIT
        for wave in range(1, WAVES + 1):
            tiles_per_split = tl.maximum(tl.cdiv(total, slots * wave), min_tiles)
            items = 0
            for first in range(0, num_seqs, BLOCK):
                blocks, tiles = _work_of(
                    query_start_loc, seq_lens, first + lanes, num_seqs, block_tokens, window, min_query, max_query, TILE
                )
                items += tl.sum(blocks * tl.cdiv(tiles, tiles_per_split), 0)
            cost = tl.cdiv(items, slots) * (tl.minimum(tiles_per_split, longest) + 2)
            if cost < best:
                best = cost
                chosen = tiles_per_split
    items_before = 0
    blocks_before = 0
    for first in range(0, num_seqs, BLOCK):
        row = first + lanes
        blocks, tiles = _work_of(query_start_loc, seq_lens, row, num_seqs, block_tokens, window, min_query, max_query, TILE)
        splits = tl.cdiv(tiles, chosen)
        items = blocks * splits
        tl.store(plan + row, items_before + tl.cumsum(items, 0) - items, mask=row < num_seqs)
        tl.store(plan + (num_seqs + 1) + row, blocks_before + tl.cumsum(blocks, 0) - blocks, mask=row < num_seqs)
        tl.store(plan + 2 * (num_seqs + 1) + row, splits, mask=row < num_seqs)
        items_before += tl.sum(items, 0)
        blocks_before += tl.sum(blocks, 0)
    tl.store(plan + num_seqs, items_before)
    tl.store(plan + (num_seqs + 1) + num_seqs, blocks_before)


@triton.jit
def pool_pointer(kv_table, layer, which: tl.constexpr, KIND: tl.constexpr):
    """Base of the layer's key (0) or value (1) pool."""
    address = tl.load(kv_table + layer * 2 + which)
    if KIND == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "int8":
        pointer = address.to(tl.pointer_type(tl.int8))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)  # on the pointer: the compiler forgets what it knew of an integer


@triton.jit
def load_scale(scales, head, KIND: tl.constexpr):
    """The head's scale; the 16-bit formats have none."""
    scale = 1.0
    if (KIND != "fp16") & (KIND != "bf16"):
        scale = tl.load(scales + head)
    return scale


@triton.jit
def decode(raw, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored elements as `dtype`, before the scale; exact, for every value of either 8-bit format fits fp16 and bf16."""
    if KIND == "fp8":
        value = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    elif KIND == "fp8soft":
        # E4M3 is fp16 without the low mantissa bits and with an exponent bias lower by 8; subnormals included.
        bits = raw.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = (half * 256.0).to(dtype)
    elif KIND == "int8":
        value = raw.to(tl.float16).to(dtype)
    else:
        value = raw.to(dtype)
    return value


@triton.jit
def packed_rows(part, num_heads, num_kv_heads, BLOCK_M: tl.constexpr):
    """How program `part` of the grid's second axis uses its rows: its KV head, first query head of the group, heads packed."""
    group = num_heads // num_kv_heads
    packed = tl.minimum(group, BLOCK_M)
    parts = tl.cdiv(group, packed)
    return part // parts, (part % parts) * packed, group, packed


@triton.jit
def paged_attention(
    query,  # [T, Hq, D] fp16 or bf16, after rotary embedding and q/k norm
    kv_table,  # int64 [layers, 2]: addresses of the pools
    block_table,  # int32 [num_seqs, table_stride]
    query_start_loc,
    seq_lens,
    plan,
    k_scale,  # fp32 [Hkv], read for 8-bit formats only
    v_scale,
    sinks,  # fp32 [Hq], read when has_sinks
    out,  # [T, Hq, D], query's type
    partial,  # fp32 [work items, grid axis 1, BLOCK_M, D]
    partial_lse,  # fp32 [work items, grid axis 1, BLOCK_M], base 2
    layer,
    num_seqs,
    table_stride,
    num_heads,
    num_kv_heads,
    window,
    scale,
    softcap,
    has_sinks,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid (work items, KV heads × parts). A block with one split writes `out`, one with more writes its share to `partial`."""
    work = tl.program_id(0)
    part = tl.program_id(1)
    if work >= tl.load(plan + num_seqs):
        return
    row = locate(plan, work, num_seqs)
    splits = tl.load(plan + 2 * (num_seqs + 1) + row)
    item = work - tl.load(plan + row)
    block = item // splits
    split = item % splits

    kv_head, first_head, group, packed = packed_rows(part, num_heads, num_kv_heads, BLOCK_M)
    block_tokens = BLOCK_M // packed
    start = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - start
    length = tl.load(seq_lens + row)
    context = length - count

    lanes = tl.arange(0, BLOCK_M)
    token = block * block_tokens + lanes // packed
    head_in_group = first_head + lanes % packed
    head = kv_head * group + head_in_group
    used = (lanes < block_tokens * packed) & (token < count) & (head_in_group < group)
    dims = tl.arange(0, HEAD_PAD)
    inside = dims < HEAD_DIM
    rows = ((start + token).to(tl.int64) * num_heads + head) * HEAD_DIM
    q = tl.load(query + rows[:, None] + dims[None, :], mask=used[:, None] & inside[None, :], other=0.0)

    # Keys that some row of the block sees: [low, high), in tiles [first_tile, last_tile).
    high = tl.minimum(context + (block + 1) * block_tokens, length)
    low = 0
    span = NO_LIMIT
    if window > 0:
        low = tl.maximum(context + block * block_tokens - window + 1, 0)
        span = window
    first_tile = low // TILE
    last_tile = tl.cdiv(high, TILE)
    share = tl.cdiv(last_tile - first_tile, splits)
    first_tile += split * share
    last_tile = tl.minimum(first_tile + share, last_tile)

    keys = pool_pointer(kv_table, layer, 0, K_KIND)
    values = pool_pointer(kv_table, layer, 1, V_KIND)
    score_scale = scale * load_scale(k_scale, kv_head, K_KIND)
    position = context + token
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    for tile in range(first_tile, last_tile):
        at = tile * TILE + tl.arange(0, TILE)
        live = (at >= low) & (at < high)
        if PAGE % TILE == 0:  # one page holds the tile
            page = tl.load(block_table + row * table_stride + tile * TILE // PAGE).to(tl.int64)
            cells = (page * num_kv_heads + kv_head) * (PAGE * HEAD_DIM) + (tile * TILE % PAGE + tl.arange(0, TILE)) * HEAD_DIM
        else:
            page = tl.load(block_table + row * table_stride + at // PAGE, mask=live, other=0).to(tl.int64)
            cells = (page * num_kv_heads + kv_head) * (PAGE * HEAD_DIM) + (at % PAGE) * HEAD_DIM
        wanted = live[:, None] & inside[None, :]
        k = decode(tl.load(keys + cells[:, None] + dims[None, :], mask=wanted, other=0), K_KIND, q.dtype)
        scores = tl.dot(q, tl.trans(k)) * score_scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
        scores = scores * LOG2E
        seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - span) & live[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(peak - anchor)
        mass = mass * fade + tl.sum(weights, 1)
        v = decode(tl.load(values + cells[:, None] + dims[None, :], mask=wanted, other=0), V_KIND, q.dtype)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(q.dtype), v)
        peak = higher

    value_scale = load_scale(v_scale, kv_head, V_KIND)
    stored = used[:, None] & inside[None, :]
    if splits == 1:
        sink = tl.load(sinks + head, mask=used & (lanes < has_sinks * BLOCK_M), other=float("-inf")) * LOG2E
        anchor = tl.maximum(peak, sink)
        anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
        fade = tl.exp2(peak - anchor)
        total = mass * fade + tl.exp2(sink - anchor)
        result = mixed * (fade * value_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(out + rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        total = tl.where(mass > 0, mass, 1.0)
        cell = (work.to(tl.int64) * tl.num_programs(1) + part) * BLOCK_M + lanes
        tl.store(partial + cell[:, None] * HEAD_DIM + dims[None, :], mixed * (value_scale / total)[:, None], mask=stored)
        tl.store(partial_lse + cell, tl.where(mass > 0, peak + tl.log2(total), float("-inf")), mask=used)


@triton.jit
def merge_splits(
    query_start_loc,
    plan,
    partial,
    partial_lse,
    sinks,
    out,
    num_seqs,
    num_heads,
    num_kv_heads,
    has_sinks,
    rows_per_program,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,  # splits read at once
):
    """Grid (token blocks, KV heads × parts, ceil(BLOCK_M / rows_per_program)): shares weighted by mass, in a fixed order."""
    block_id = tl.program_id(0)
    part = tl.program_id(1)
    if block_id >= tl.load(plan + (num_seqs + 1) + num_seqs):
        return
    row = locate(plan + (num_seqs + 1), block_id, num_seqs)
    splits = tl.load(plan + 2 * (num_seqs + 1) + row)
    if splits == 1:
        return
    block = block_id - tl.load(plan + (num_seqs + 1) + row)
    first_work = tl.load(plan + row) + block * splits

    kv_head, first_head, group, packed = packed_rows(part, num_heads, num_kv_heads, BLOCK_M)
    block_tokens = BLOCK_M // packed
    start = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - start
    dims = tl.arange(0, HEAD_PAD)
    inside = dims < HEAD_DIM
    first_lane = tl.program_id(2) * rows_per_program
    last_lane = tl.minimum(first_lane + rows_per_program, block_tokens * packed)
    for lane in range(first_lane, last_lane):
        token = block * block_tokens + lane // packed
        head_in_group = first_head + lane % packed
        if (token < count) & (head_in_group < group):
            head = kv_head * group + head_in_group
            peak = float("-inf")
            if has_sinks != 0:
                peak = tl.load(sinks + head) * LOG2E
            mass = tl.where(has_sinks != 0, 1.0, 0.0)
            mixed = tl.zeros([HEAD_PAD], tl.float32)
            for first in range(0, splits, SPLITS):
                split = first + tl.arange(0, SPLITS)
                cell = ((first_work + split).to(tl.int64) * tl.num_programs(1) + part) * BLOCK_M + lane
                lse = tl.load(partial_lse + cell, mask=split < splits, other=float("-inf"))
                higher = tl.maximum(peak, tl.max(lse, 0))
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp2(lse - anchor)
                shares = tl.load(
                    partial + cell[:, None] * HEAD_DIM + dims[None, :],
                    mask=(split < splits)[:, None] & inside[None, :],
                    other=0.0,
                )
                fade = tl.exp2(peak - anchor)
                mass = mass * fade + tl.sum(weights, 0)
                mixed = mixed * fade + tl.sum(shares * weights[:, None], 0)
                peak = higher
            result = mixed / tl.where(mass > 0, mass, 1.0)
            cells = ((start + token).to(tl.int64) * num_heads + head) * HEAD_DIM + dims
            tl.store(out + cells, result.to(out.dtype.element_ty), mask=inside)
