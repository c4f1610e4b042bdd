"""Which padded shape a step runs in. Knows shapes and profiles only.

decode     one token per sequence: the bucket sizes of the manifest (1, 2, 4, 8, 16, …)
mixed      prefill chunks beside decodes: token counts that double, each for at most half as many sequences
eager      more tokens than the largest bucket: exactly as many tokens as there are, no graph; such a step keeps the GPU busy for
           longer than the host takes to launch it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime import contract
from runtime.batch import StepInputs
from runtime.errors import ManifestMismatch, UnsupportedFeature
from runtime.executors.tensorrt_step import StepShape

SMALLEST_MIXED = 64  # tokens; below it a step takes as long as one of 64
LARGEST_MIXED = 1024  # above it steps run eagerly


@dataclass(frozen=True)
class Profile:
    """An optimization profile, as the engine itself reports it."""

    index: int
    least: StepShape
    most: StepShape
    table_width: int

    def allows(self, shape: StepShape) -> bool:
        return all(
            low <= size <= high
            for low, size, high in (
                (self.least.num_tokens, shape.num_tokens, self.most.num_tokens),
                (self.least.num_seqs, shape.num_seqs, self.most.num_seqs),
                (self.least.num_logits, shape.num_logits, self.most.num_logits),
            )
        )


@dataclass(frozen=True)
class Bucket:
    shape: StepShape
    profile: int


def read_profiles(engine: Any) -> list[Profile]:
    """`engine` is an ICudaEngine."""

    def bounds(name: str, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        least, _, most = engine.get_tensor_profile_shape(name, index)
        return tuple(least), tuple(most)

    profiles = []
    for index in range(engine.num_optimization_profiles):
        tokens, seqs, logits, table = (
            bounds(name, index) for name in (contract.INPUT_IDS, contract.SEQ_LENS, contract.LOGITS_INDICES, contract.BLOCK_TABLE)
        )
        least, most = (StepShape(tokens[side][0], seqs[side][0], logits[side][0]) for side in (0, 1))
        profiles.append(Profile(index, least, most, table[1][1]))
    return profiles


def pick_profile(profiles: Iterable[Profile], shape: StepShape) -> Profile | None:
    """The narrowest that allows the shape."""
    fitting = [profile for profile in profiles if profile.allows(shape)]
    return min(fitting, key=lambda profile: (profile.most.num_tokens, profile.most.num_seqs), default=None)


def mixed_sizes(largest: int) -> list[int]:
    """SMALLEST_MIXED, doubled until `largest`, which is always the last."""
    sizes = []
    size = SMALLEST_MIXED
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


class Buckets:
    """Every bucket of an engine, the widest shape a step may have, and the choice between them."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        decode_sizes: Sequence[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        largest_mixed: int = LARGEST_MIXED,
    ) -> None:
        self._profiles = profiles
        wide = max(profiles, key=lambda profile: (profile.most.num_seqs, profile.most.num_tokens))
        self.largest = max((profile.most for profile in profiles), key=lambda most: most.num_tokens)
        if wide.most.num_seqs < max_num_seqs or self.largest.num_tokens < max_num_batched_tokens:
            raise ManifestMismatch(
                f"the plan takes steps of {wide.most.num_seqs} sequences and {self.largest.num_tokens} tokens but the manifest "
                f"says {max_num_seqs} and {max_num_batched_tokens}; rebuild the engine"
            )
        self.decode = [self._bucket(StepShape(size, size, size)) for size in sorted(decode_sizes)]
        self.mixed = [self._bucket(self._mixed(size)) for size in mixed_sizes(min(max_num_batched_tokens, largest_mixed))]

    def _bucket(self, shape: StepShape) -> Bucket:
        profile = pick_profile(self._profiles, shape)
        if profile is None:
            raise ManifestMismatch(f"no optimization profile of the plan allows a step of {shape}; rebuild the engine")
        return Bucket(shape, profile.index)

    def _mixed(self, num_tokens: int) -> StepShape:
        """More tokens than sequences, or the attention plugin takes it for decoding; more sequences fall to the next bucket."""
        half = max(1, num_tokens // 2)
        return StepShape(num_tokens, min(self.largest.num_seqs, half), min(self.largest.num_logits, half))

    def all(self) -> list[Bucket]:
        return [*self.decode, *self.mixed]

    def choose(self, inputs: StepInputs) -> Bucket | None:
        """The smallest that holds the step; None = run it eagerly."""
        one_each = len(inputs.input_ids) == len(inputs.seq_lens)
        for bucket in [*(self.decode if one_each else ()), *self.mixed]:
            if bucket.shape.holds(inputs):
                return bucket
        return None

    def eager(self, inputs: StepInputs) -> Bucket:
        """As many tokens as there are. Raises UnsupportedFeature when no profile takes that many."""
        num_tokens = len(inputs.input_ids)
        shape = StepShape(num_tokens, self.largest.num_seqs, self.largest.num_logits)
        profile = pick_profile(self._profiles, shape)
        if profile is None:
            raise UnsupportedFeature(
                f"a step of {num_tokens} tokens exceeds the {self.largest.num_tokens} the engine was built for; enable chunked "
                f"prefill, or rebuild with --max-num-batched-tokens {num_tokens}"
            )
        return Bucket(shape, profile.index)
