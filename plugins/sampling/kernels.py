"""Sampling on GPUs, in OpenAI Triton: one program per row, from logits to token id. Capturable, no host synchronization.

Means what runtime/sampler.py means, step for step, and draws the same uniform number for the same (seed, n-th output token):

    repetition, frequency, presence penalties → mask → temperature 0: argmax → temperature → min_p → top_k → top_p → draw

A row's result depends on that row alone, so it is the same in any batch. Nothing is sorted: one pass finds the maximum and the
mass; a second writes the few candidates that a bound cannot exclude; thresholds are then searched among those, and one of the
kept tokens is drawn by inverse CDF in order of id.

Distance     a = (max − logit) / temperature ≥ 0, a token's weight is exp(−a). Non-negative floats order like their bits, so
             searches run on integers, four bits a pass
State        indexed by slot, so the host writes a request's parameters once. `counts` (output count, plus IN_PROMPT when the
             prompt has the token) and `steps` (tokens produced) advance here, which keeps the host out of the loop
Ties         lower id first, in argmax, top_k and top_p
Errors       -1 where a logit is NaN or +infinity, or nothing is left to choose; rows of slot -1 are padding and give 0
"""

import triton
import triton.language as tl

IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # bits of +infinity: a masked token's distance


@triton.jit
def _uniform(seed, step):
    """[0, 1), a hash of (seed, step) only: SplitMix64 twice, as runtime/logits.py. uint64 in, fp64 out."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return (_mix(_mix(seed + golden) + (step + 1).to(tl.uint64) * golden) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _edited(raw, at, counts, masks, vocab_size, counted, masked, repetition, presence, frequency):
    """Logits at `at` after penalties and mask; `counted` and `masked` are the vocabulary size or 0."""
    count = tl.load(counts + at, mask=at < counted, other=0)
    produced = (count & (IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(count != 0, tl.where(raw > 0, raw / repetition, raw * repetition), raw)
    x = x - frequency * produced - tl.where(produced > 0, presence, 0.0)
    word = tl.load(masks + at // 32, mask=at < masked, other=-1)
    return tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))


@triton.jit
def _distances(x, peak, inverse):
    return ((peak - x) * inverse).to(tl.int32, bitcast=True)


@triton.jit
def _weights(distance):
    return tl.exp(-distance.to(tl.float32, bitcast=True))


@triton.jit
def _search(values, count, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """The least distance A whose set {a <= A} has at least `target` members, or, WEIGHTED, that much mass."""
    low = tl.full([], -1, tl.int64)
    step = tl.full([], 1 << 32, tl.int64)
    for _ in range(8):
        step = step // 16
        pivots = tl.minimum(low + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step, 0x7FFFFFFF).to(tl.int32)
        sums = tl.zeros([PIVOTS], tl.float32 if WEIGHTED else tl.int32)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            a = tl.load(values + at, mask=at < count, other=0x7FFFFFFF)
            within = (a[:, None] <= pivots[None, :]) & (at < count)[:, None]
            if WEIGHTED:
                sums += tl.sum(tl.where(within, _weights(a)[:, None], 0.0), 0)
            else:
                sums += tl.sum(within.to(tl.int32), 0)
        below = tl.minimum(tl.sum((sums < target).to(tl.int32), 0), PIVOTS - 1)
        low += below.to(tl.int64) * step
    return (low + 1).to(tl.int32)


@triton.jit
def _tally(values, count, limit, BLOCK: tl.constexpr):
    """Of a list of distances: members and mass nearer than `limit`, and members at it."""
    nearer = 0
    mass = 0.0
    equal = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        a = tl.load(values + at, mask=at < count, other=0x7FFFFFFF)
        inside = (a < limit) & (at < count)
        nearer += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, _weights(a), 0.0), 0)
        equal += tl.sum(((a == limit) & (at < count)).to(tl.int32), 0)
    return nearer, mass, equal


@triton.jit
def sample(
    logits,  # fp32 [rows, vocab_size]
    scratch,  # int32 [rows, 2, vocab_size]: candidates' distances and ids
    slots,  # int32 [rows]; the state below is indexed by it; -1 = padding
    temperature,  # fp32, 0 = greedy
    top_k,  # int32, < 1 = off
    top_p,  # fp32, 1 = off
    min_p,  # fp32, 0 = off
    repetition,  # fp32, 1 = off
    presence,  # fp32, 0 = off
    frequency,  # fp32, 0 = off
    seeds,  # int64: the bits of an unsigned seed
    steps,  # int32: tokens produced; advanced here
    counts,  # int32 [slots, vocab_size]; touched only for rows with a penalty
    masks,  # int32 [slots, mask_words], bit v % 32 of word v // 32 set = token v allowed
    next_token,  # int64 [rows]
    logprob,  # fp32 [rows]: of the token in the model's own distribution
    vocab_size,
    mask_words,  # 0 = no masks
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(next_token + row, 0)
        tl.store(logprob + row, 0.0)
        return
    heat = tl.load(temperature + slot)
    repeat = tl.load(repetition + slot)
    present = tl.load(presence + slot)
    frequent = tl.load(frequency + slot)
    step = tl.load(steps + slot)
    penalized = (repeat != 1.0) | (present != 0.0) | (frequent != 0.0)
    counted = tl.where(penalized, vocab_size, 0)
    masked = tl.where(mask_words > 0, vocab_size, 0)
    inverse = 1.0 / tl.minimum(tl.maximum(heat, 1e-5), 1e30)
    logits += row * vocab_size
    counts += slot * vocab_size
    masks += slot * mask_words
    lanes = tl.arange(0, BLOCK)

    # 1. Maximum, its id, both masses; per lane, merged after the pass.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    hot_mass = tl.zeros([BLOCK], tl.float32)
    raw_best = tl.full([BLOCK], float("-inf"), tl.float32)
    raw_mass = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        raw = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        broken |= ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        x = _edited(raw, at, counts, masks, vocab_size, counted, masked, repeat, present, frequent)
        higher = tl.maximum(raw_best, raw)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        raw_mass = raw_mass * tl.exp(raw_best - anchor) + tl.exp(raw - anchor)
        raw_best = higher
        higher = tl.maximum(best, x)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        hot_mass = hot_mass * tl.exp((best - anchor) * inverse) + tl.exp((x - anchor) * inverse)
        best_at = tl.where(x > best, at, best_at)
        best = higher
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, best_at, 0x7FFFFFFF), 0)
    raw_peak = tl.max(raw_best, 0)
    normalizer = raw_peak + tl.log(tl.sum(raw_mass * tl.exp(raw_best - raw_peak), 0))
    failed = (tl.max(broken, 0) != 0) | (peak == float("-inf"))
    if failed:
        tl.store(next_token + row, -1)
        tl.store(logprob + row, float("nan"))
        return

    if heat > 0:
        mass = tl.sum(hot_mass * tl.exp((best - peak) * inverse), 0)
        chance = _uniform(tl.load(seeds + slot).to(tl.uint64, bitcast=True), step)
        keep = tl.load(top_k + slot)
        keep = tl.where((keep >= 1) & (keep < vocab_size), keep, vocab_size)
        nucleus = tl.load(top_p + slot)
        floor = tl.load(min_p + slot)

        # 2. Bounds that no kept token exceeds. min_p is exact; of top_k, the k-th nearest of the lanes' best; of top_p, weights
        # so small that all of them together stay below 1 - p.
        bound = tl.full([], 0x7F7FFFFF, tl.int32)
        if floor > 0:
            bound = tl.minimum(bound, (-tl.log(floor)).to(tl.int32, bitcast=True))
        if keep < BLOCK:
            nearest = _distances(best, peak, inverse)
            low = tl.full([], -1, tl.int32)
            half = tl.full([], 1 << 30, tl.int32)
            for _ in range(31):
                pivot = low + half
                half = half // 2
                low = tl.where(tl.sum((nearest <= pivot).to(tl.int32), 0) < keep, pivot, low)
            bound = tl.minimum(bound, low + 1)
        if (nucleus < 1) & (keep == vocab_size):
            least = tl.maximum((1.0 - nucleus) * mass / vocab_size, 1e-38)
            bound = tl.minimum(bound, tl.maximum(1e-3 - tl.log(least), 0.0).to(tl.int32, bitcast=True))

        # 3. Candidates, in order of id.
        values = scratch + row * 2 * vocab_size
        ids = values + vocab_size
        found = 0
        for first in range(0, vocab_size, BLOCK):
            at = first + lanes
            raw = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
            x = _edited(raw, at, counts, masks, vocab_size, counted, masked, repeat, present, frequent)
            a = _distances(x, peak, inverse)
            candidate = ((a <= bound) & (at < vocab_size)).to(tl.int32)
            place = found + tl.cumsum(candidate, 0) - 1
            tl.store(values + place, a, mask=candidate != 0)
            tl.store(ids + place, at, mask=candidate != 0)
            found += tl.sum(candidate, 0)
        tl.debug_barrier()

        # 4. The limit: all that is nearer is kept, and the first `quota` of those at it.
        limit = bound
        quota = vocab_size
        if keep < found:
            limit = _search(values, found, keep, False, BLOCK, PIVOTS)
            nearer, nearer_mass, equal = _tally(values, found, limit, BLOCK)
            quota = keep - nearer
        if nucleus < 1:
            nearer, nearer_mass, equal = _tally(values, found, limit, BLOCK)
            total = nearer_mass + tl.minimum(quota, equal) * _weights(limit)
            if (keep == vocab_size) & (floor <= 0):
                total = mass  # the bound left out a little of it
            goal = nucleus * total
            tighter = tl.minimum(_search(values, found, goal, True, BLOCK, PIVOTS), limit)
            nearer, nearer_mass, equal = _tally(values, found, tighter, BLOCK)
            reach = tl.ceil((goal - nearer_mass) / tl.maximum(_weights(tighter), 1e-38))
            reach = tl.minimum(tl.maximum(reach, 1.0), 1e9).to(tl.int32)
            quota = tl.where(tighter == limit, tl.minimum(quota, reach), reach)
            limit = tighter

        # 5. Draw: the first pass finds the mass kept, the second where it passes chance × mass.
        kept_mass = tl.full([], 0.0, tl.float64)
        ties = 0
        for first in range(0, found, BLOCK):
            at = first + lanes
            a = tl.load(values + at, mask=at < found, other=0x7FFFFFFF)
            tied = ((a == limit) & (at < found)).to(tl.int32)
            kept = (a < limit) | ((tied != 0) & (ties + tl.cumsum(tied, 0) <= quota))
            kept_mass += tl.sum(tl.where(kept & (at < found), _weights(a), 0.0), 0).to(tl.float64)
            ties += tl.sum(tied, 0)
        goal64 = chance * kept_mass
        before = tl.full([], 0.0, tl.float64)
        ties = 0
        place = -1
        last = 0
        for first in range(0, found, BLOCK):
            at = first + lanes
            a = tl.load(values + at, mask=at < found, other=0x7FFFFFFF)
            tied = ((a == limit) & (at < found)).to(tl.int32)
            kept = ((a < limit) | ((tied != 0) & (ties + tl.cumsum(tied, 0) <= quota))) & (at < found)
            weight = tl.where(kept, _weights(a), 0.0)
            after = before + tl.cumsum(weight, 0).to(tl.float64)
            passed = tl.min(tl.where(kept & (weight > 0) & (after > goal64), at, 0x7FFFFFFF), 0)
            place = tl.where((place < 0) & (passed < 0x7FFFFFFF), passed, place)
            last = tl.maximum(last, tl.max(tl.where(kept & (weight > 0), at, 0), 0))
            before += tl.sum(weight, 0).to(tl.float64)
            ties += tl.sum(tied, 0)
        place = tl.where(place < 0, last, place)  # rounding left the goal past the last token
        token = tl.load(ids + place)

    tl.store(next_token + row, token.to(tl.int64))
    tl.store(logprob + row, tl.load(logits + token) - normalizer)
    tl.store(steps + slot, step + 1)
    if penalized:
        tl.store(counts + token, tl.load(counts + token) + 1)


@triton.jit
def load_history(
    counts,  # int32 [slots, vocab_size]
    slot,
    tokens,  # int64 [num_tokens]: prompt, then output so far
    num_prompt,
    num_tokens,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program: what a request with penalties has seen, when it enters a slot."""
    lanes = tl.arange(0, BLOCK)
    counts += tl.cast(slot, tl.int64) * vocab_size
    for first in range(0, vocab_size, BLOCK):
        tl.store(counts + first + lanes, tl.zeros([BLOCK], tl.int32), mask=first + lanes < vocab_size)
    tl.debug_barrier()
    for first in range(0, num_tokens, BLOCK):
        at = first + lanes
        token = tl.load(tokens + at, mask=at < num_tokens, other=0)
        tl.atomic_or(counts + token, tl.full([BLOCK], 1 << 30, tl.int32), mask=at < num_prompt)
        tl.atomic_add(counts + token, tl.full([BLOCK], 1, tl.int32), mask=(at >= num_prompt) & (at < num_tokens))
