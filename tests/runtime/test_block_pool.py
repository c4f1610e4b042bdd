"""Blocks are counted right, shared only by equal keys, and evicted oldest first."""

import pytest

from runtime.block_pool import BlockPool
from runtime.errors import OutOfBlocks


def keys_of(pool: BlockPool, tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    pool.extend_keys(keys, tokens, len(tokens) // pool.block_size, salt)
    return keys


def cache(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks that were computed for these tokens, published and released."""
    keys = keys_of(pool, tokens, salt)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return blocks


def test_blocks_are_given_in_order_and_the_last_freed_is_reused_first():
    pool = BlockPool(4, 2)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 1, 0)
    assert pool.allocate(3) == [0, 1, 3]
    pool.check([[2], [0, 1, 3]])


def test_out_of_blocks_names_numbers_and_remedy_and_takes_nothing():
    pool = BlockPool(4, 2)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks) as error:
        pool.allocate(2)
    assert str(error.value) == "need 2 blocks, 1 of 4 free; lower max_num_seqs or raise kv_cache_memory_fraction"
    assert pool.num_free == 1
    pool.check()


def test_forked_blocks_live_until_both_tables_let_go():
    pool = BlockPool(3, 2)
    table = pool.allocate(2)
    fork = pool.fork(table)
    assert fork == [0, 1] and fork is not table
    pool.release(table)
    assert (pool.num_used, pool.num_free) == (2, 1)
    pool.check([fork])
    pool.release(fork)
    assert (pool.num_used, pool.num_free) == (0, 3)


def test_a_shared_block_is_copied_for_its_writer_and_a_private_one_is_not():
    pool = BlockPool(3, 2)
    (block,) = pool.allocate(1)
    assert pool.make_writable(block) == 0
    pool.fork([block])
    assert pool.make_writable(block) == 1
    pool.check([[0], [1]])
    assert pool.make_writable(block) == 0


def test_what_can_be_found_is_never_writable():
    pool = BlockPool(3, 2)
    (block,) = pool.allocate(1)
    keys = keys_of(pool, [5, 6])
    pool.publish(block, keys[0])
    assert pool.lookup(keys, 1) == [0]
    assert pool.make_writable(block) == 0
    assert pool.lookup(keys, 1) == []
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (3, 0)


def test_a_key_covers_every_token_from_the_start_and_the_salt():
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4]
    first, second = keys_of(pool, tokens)
    assert keys_of(pool, [1, 2, 3, 4, 9]) == [first, second]  # the tail is not full
    assert keys_of(pool, [3, 4]) != [second]  # same block, other prefix
    others = [keys_of(pool, [1, 2, 4, 3]), keys_of(pool, [1, 9, 3, 4]), keys_of(pool, tokens, "tenant")]
    assert [keys[1] == second for keys in others] == [False, False, False]
    assert [keys[0] == first for keys in others] == [True, False, False]


def test_keys_extended_in_two_goes_equal_keys_made_in_one():
    pool = BlockPool(8, 2)
    keys: list[bytes] = []
    pool.extend_keys(keys, [1, 2, 3], 1, "s")
    pool.extend_keys(keys, [1, 2, 3, 4, 5, 6], 3, "s")
    assert keys == keys_of(pool, [1, 2, 3, 4, 5, 6], "s")


def test_released_prefix_is_found_again_up_to_the_first_difference_and_not_by_another_tenant():
    pool = BlockPool(6, 2)
    assert cache(pool, [1, 2, 3, 4, 5, 6], "a") == [0, 1, 2]
    assert (pool.num_free, pool.num_used, pool.num_cached, pool.num_available) == (3, 0, 3, 6)
    same = keys_of(pool, [1, 2, 3, 4, 5, 6], "a")
    assert pool.lookup(same, 3) == [0, 1, 2]
    assert pool.lookup(same, 2) == [0, 1]
    assert pool.lookup(keys_of(pool, [1, 2, 3, 4, 9, 9], "a"), 3) == [0, 1]
    assert pool.lookup(keys_of(pool, [9, 9, 3, 4, 5, 6], "a"), 3) == []
    assert pool.lookup(keys_of(pool, [1, 2, 3, 4, 5, 6], "b"), 3) == []
    pool.check([])


def test_a_hit_takes_the_block_out_of_eviction():
    pool = BlockPool(2, 2)
    cache(pool, [1, 2])
    table = pool.fork(pool.lookup(keys_of(pool, [1, 2]), 1))
    assert (table, pool.num_cached, pool.num_used) == ([0], 0, 1)
    assert pool.allocate(1) == [1]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release(table)
    assert pool.allocate(1) == [0]
    assert pool.lookup(keys_of(pool, [1, 2]), 1) == []


def test_eviction_takes_free_blocks_first_then_the_least_recently_released_tail_first():
    pool = BlockPool(5, 1)
    assert cache(pool, [1, 2]) == [0, 1]
    assert cache(pool, [7, 8]) == [2, 3]
    pool.release(pool.fork([0, 1]))  # 1, 2 were used again
    assert pool.allocate(5) == [4, 3, 2, 1, 0]
    pool.check([[0, 1, 2, 3, 4]])


def test_of_two_equal_blocks_one_is_cached_and_the_other_freed():
    pool = BlockPool(4, 2)
    (key,) = keys_of(pool, [1, 2])
    first, second = pool.allocate(2)
    pool.publish(first, key)
    pool.publish(second, key)
    pool.release([first])
    pool.release([second])
    assert (pool.num_cached, pool.num_free) == (1, 3)
    assert pool.lookup([key], 1) == [first]
    pool.check([])


def test_nothing_is_cached_when_prefix_caching_is_off():
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    cache(pool, [1, 2])
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_check_sees_leaks_double_use_and_wrong_counts():
    leaked = BlockPool(2, 2)
    leaked._free.pop()
    twice = BlockPool(2, 2)
    twice._free.append(1)
    stale = BlockPool(2, 2)
    stale._keys[0] = b"key"
    for pool in (leaked, twice, stale):
        with pytest.raises(AssertionError):
            pool.check()
    counted = BlockPool(2, 2)
    counted.check([counted.allocate(1)])
    with pytest.raises(AssertionError):
        counted.check([])
    with pytest.raises(AssertionError):
        counted.check([[0], [0]])


def test_releasing_a_free_block_is_a_broken_invariant():
    pool = BlockPool(2, 2)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])
