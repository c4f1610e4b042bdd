"""Shapes an engine is prepared for: buckets of sequences and tokens that CUDA graphs are captured at, and optimization profiles.

    decode   T = B = R            buckets 1, 2, 4, then multiples of 8 up to max_num_seqs, which is always one and never exceeded
    mixed    T tokens, any B, R   buckets 64, 128, 256 … up to max_num_batched_tokens

A profile is a range of shapes and serves every bucket in it.

    fine     ranges end at powers of two: TensorRT chooses kernels per profile, when it builds
    coarse   one range of small batches, one of all larger ones, one of all mixed steps: TensorRT-RTX compiles kernels for the
             shapes it meets when it runs, and every profile costs a plan its code again (SmolLM2 fp8: 19 MB each)

No range holds a single token count: TensorRT would choose a matrix-vector kernel for 1 that reads weights in another order, and
store every layer a second time (SmolLM2 fp16: 486 MB instead of 271 MB).

T tokens, B sequences, R rows of logits (at least 1: a step that wants none asks for row 0), M blocks per sequence
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from runtime import contract

SMALLEST_MIXED = 64

Range = tuple[int, int, int]  # min, opt, max


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    sizes = {size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size <= max_num_seqs}
    return tuple(sorted(sizes | {max_num_seqs}))


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    sizes = {max_num_batched_tokens}
    size = SMALLEST_MIXED
    while size < max_num_batched_tokens:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


@dataclass(frozen=True)
class Profile:
    index: int
    kind: str  # decode, mixed
    num_tokens: Range
    num_seqs: Range
    num_logits: Range
    buckets: tuple[int, ...]  # sequences for decode, tokens for mixed

    def shapes(self, blocks_per_seq: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Input name → its shapes at min, opt and max."""
        low, opt, high = (self._shapes(point, blocks_per_seq) for point in range(3))
        return {name: (low[name], opt[name], high[name]) for name in contract.STEP_INPUTS}

    def _shapes(self, point: int, blocks_per_seq: int) -> dict[str, tuple[int, ...]]:
        tokens, seqs, logits = self.num_tokens[point], self.num_seqs[point], self.num_logits[point]
        return {
            **dict.fromkeys((contract.INPUT_IDS, contract.POSITIONS, contract.SLOT_MAPPING), (tokens,)),
            contract.BLOCK_TABLE: (seqs, blocks_per_seq),
            contract.QUERY_START_LOC: (seqs + 1,),
            contract.SEQ_LENS: (seqs,),
            contract.LOGITS_INDICES: (logits,),
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profiles(max_num_seqs: int, max_num_batched_tokens: int, *, coarse: bool = False) -> tuple[Profile, ...]:
    """In the order they are added to the engine."""
    found: list[Profile] = []
    buckets = decode_buckets(max_num_seqs)
    low = 1
    while low <= max_num_seqs:
        high = max_num_seqs if coarse and low > 1 else min(max_num_seqs, max(2, 1 << (low - 1).bit_length()))
        inside = tuple(bucket for bucket in buckets if low <= bucket <= high)
        span = (low, inside[0] if low == 1 else high, max(high, 2))
        found.append(Profile(len(found), "decode", span, span, span, inside))
        low = high + 1
    low = 1
    every_seq = (1, max_num_seqs, max(max_num_seqs, 2))
    sizes = token_buckets(max_num_batched_tokens)
    for tokens in sizes[-1:] if coarse else sizes:
        span = (low, tokens, max(tokens, 2))
        found.append(Profile(len(found), "mixed", span, every_seq, every_seq, sizes if coarse else (tokens,)))
        low = tokens + 1
    return tuple(found)
