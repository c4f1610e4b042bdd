"""What of a request need not be computed again: full blocks from the prefix cache, or a parent's prompt for its forks.

A request starts from the blocks that `find` names and computes the rest; `publish` offers what it computed to others. It waits
while another computes most of what it lacks (`is_in_flight`), so prompts that arrive together compute what they share once.
A fork waits until its parent's prompt is computed, and runs by itself when the parent has ended or it was preempted.

Knows block ids and prefix hashes only. Owned by the scheduler, not thread-safe.

Units    tokens, unless the name says blocks
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.block_pool import BlockPool
from runtime.request import Request


class PrefixReuse:
    def __init__(self, pool: BlockPool, min_prefill_tokens: int) -> None:
        self._pool = pool
        self._min_prefill_tokens = min_prefill_tokens  # left to compute, whatever was found

    def find(self, request: Request) -> tuple[list[int], int]:
        """Blocks to start from and the number of tokens computed in them.

        Either a run of full blocks from the prefix cache, or the blocks of a computed parent up to its last prompt tokens,
        since the fork needs the logits of the last one again. The block these are written to is shared too if it has earlier
        tokens.
        """
        pool, size = self._pool, self._pool.block_size
        blocks: list[int] = []
        if pool.enable_prefix_caching:
            num_full = max(0, request.num_tokens - self._min_prefill_tokens) // size
            pool.extend_keys(request.block_keys, request.token_ids, num_full, request.cache_salt)
            blocks = pool.lookup(request.block_keys, num_full)
        parent = request.fork_of
        num_forked = max(0, request.num_prompt_tokens - self._min_prefill_tokens)
        if parent is not None and num_forked > len(blocks) * size and _is_forkable(parent):
            return parent.block_table[: -(-num_forked // size)], num_forked
        return blocks, len(blocks) * size

    def is_in_flight(self, request: Request, num_found: int, scheduled: Iterable[Request]) -> bool:
        """Whether at least half of what the request lacks beyond the `num_found` tokens of `find` is being computed.

        `scheduled` have a part in the step being made, so each brings nearer the blocks it is asked for, and nobody waits for
        one that pauses, was preempted or has ended.
        """
        size = self._pool.block_size
        half = -(-(request.num_tokens - num_found) // (2 * size))  # blocks
        last = num_found // size + half - 1  # a key stands for all tokens up to its block's end, so one comparison is enough
        if last >= len(request.block_keys):
            return False
        key = request.block_keys[last]
        return any(
            other.num_computed_tokens < num_found + size and last < len(other.block_keys) and other.block_keys[last] == key
            for other in scheduled
        )

    def publish(self, request: Request, num_computed_before: int) -> None:
        """Offer the blocks that were filled since `num_computed_before` to later requests."""
        pool, size = self._pool, self._pool.block_size
        begin, end = num_computed_before // size, request.num_computed_tokens // size
        if begin < end and pool.enable_prefix_caching:
            pool.extend_keys(request.block_keys, request.token_ids, end, request.cache_salt)
            for index in range(begin, end):
                pool.publish(request.block_table[index], request.block_keys[index])


def waits_for_parent(request: Request) -> bool:
    parent = request.fork_of
    return parent is not None and not (parent.is_finished or request.num_preemptions or _is_forkable(parent))


def _is_forkable(parent: Request) -> bool:
    return bool(parent.block_table) and parent.num_computed_tokens >= parent.num_prompt_tokens
