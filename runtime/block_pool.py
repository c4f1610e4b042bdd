"""Physical KV blocks: free list, reference counts, copy-on-write, prefix keys.

Knows block ids only; the memory belongs to the executors. Owned by the loop, not thread-safe.

A block is in exactly one state, which `check` verifies:
    free         holds nothing worth keeping
    referenced   in one or more block tables
    cached       in no block table, but full and findable by its key; the one released longest ago is reused first

Key      sha256(key of the block before ‖ token ids), the first chained to sha256(salt): equal keys mean equal salts and
         equal tokens from position 0 on, so a hit needs no further comparison and no tenant meets another's blocks
Units    tokens, unless the name says blocks
Raises   OutOfBlocks; the scheduler answers by preempting
Source   PagedAttention, arXiv:2309.06180, section 4
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from runtime.errors import OutOfBlocks


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: memory used last is reused first
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, n: int) -> list[int]:
        if n > self.num_available:
            raise OutOfBlocks(
                f"need {n} blocks, {self.num_available} of {self.num_blocks} free; "
                "lower max_num_seqs or raise kv_cache_memory_fraction"
            )
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        self._references[block] = 1
        return block

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """One more reference to each block, for a second block table. Cached blocks become referenced."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a table. The tail is evicted before the prefix it depends on."""
        for block in reversed(blocks):
            self._references[block] -= 1
            count = self._references[block]
            assert count >= 0, f"block {block} released more often than referenced"
            if count == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def make_writable(self, block: int) -> int:
        """The block itself if only the caller refers to it, else a fresh one to copy it into (copy-on-write).

        Either way the result has no prefix key: what is found by its key is never written again.
        """
        assert self._references[block] > 0
        if self._references[block] == 1:
            self._unpublish(block)
            return block
        (fresh,) = self.allocate(1)
        self._references[block] -= 1
        return fresh

    # ------------------------------------------------------------------------------------------------ prefix cache

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: str) -> None:
        """Append the keys of further full blocks of `token_ids` until `keys` has `num_blocks`."""
        size = self.block_size
        assert num_blocks * size <= len(token_ids), "only full blocks have a key"
        for index in range(len(keys), num_blocks):
            parent = keys[-1] if keys else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
            content = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            keys.append(hashlib.sha256(parent + content).digest())

    def lookup(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the longest known run of the first `limit` keys. Takes no reference: `fork` them."""
        blocks: list[int] = []
        for index in range(min(limit, len(keys))):
            block = self._block_of.get(keys[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Make a full, computed block findable. The first block with a key keeps it; a duplicate stays private."""
        assert self._references[block] > 0
        if self.enable_prefix_caching and self._keys[block] is None and key not in self._block_of:
            self._keys[block] = key
            self._block_of[key] = block

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._block_of[key]
            self._keys[block] = None

    # --------------------------------------------------------------------------------------------------- invariant

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that every block is free, referenced or cached exactly once, and, given all tables, counted right."""
        referenced = [block for block, count in enumerate(self._references) if count]
        states = sorted([*self._free, *self._cached, *referenced])
        assert states == list(range(self.num_blocks)), f"blocks in no state or in several: {states}"
        assert min(self._references) >= 0
        assert self.num_used == len(referenced)
        assert self._block_of == {key: block for block, key in enumerate(self._keys) if key is not None}
        assert all(self._keys[block] is None for block in self._free), "a free block has a prefix key"
        assert all(self._keys[block] is not None for block in self._cached), "a cached block cannot be found"
        if block_tables is not None:
            counted = Counter(block for table in block_tables for block in table)
            expected = {block: self._references[block] for block in referenced}
            assert counted == expected, f"block tables hold {dict(counted)} but the counts are {expected}"
