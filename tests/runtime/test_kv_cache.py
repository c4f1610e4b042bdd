from __future__ import annotations

import numpy as np
import pytest

from runtime.kv_cache import KVCache, PoolLayout, zeros_aligned

U8 = PoolLayout(block_shape=(2, 4, 12), dtype=np.dtype(np.uint8))
F32 = PoolLayout(block_shape=(2, 4, 8), dtype=np.dtype(np.float32))


def filled(num_blocks: int = 5) -> KVCache:
    cache = KVCache({"k_pool.0": U8, "v_pool.0": F32}, num_blocks)
    for number, pool in enumerate(cache.pools.values()):
        pool[...] = np.random.default_rng(number).integers(0, 200, pool.shape)
    return cache


def test_memory_is_blocks_times_block_bytes_of_all_pools() -> None:
    cache = KVCache({"k_pool.0": U8, "v_pool.0": F32}, num_blocks=5)
    assert (U8.block_bytes, F32.block_bytes) == (96, 256)
    assert cache.num_bytes == 5 * (96 + 256)
    assert cache.pools["k_pool.0"].shape == (5, 2, 4, 12)
    assert not any(pool.any() for pool in cache.pools.values())


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_pools_start_on_a_cache_line(dtype: type) -> None:
    pools = [zeros_aligned((3, 5, 7), np.dtype(dtype)) for _ in range(8)]
    assert [pool.ctypes.data % 64 for pool in pools] == [0] * 8
    assert all(pool.flags.c_contiguous and pool.flags.writeable for pool in pools)


def test_copied_blocks_are_identical_in_every_pool_and_no_other_block_changes() -> None:
    cache = filled()
    before = {name: pool.copy() for name, pool in cache.pools.items()}
    cache.copy_blocks([(0, 3), (4, 1)])
    for name, pool in cache.pools.items():
        expected = before[name][[0, 4, 2, 0, 4]]
        np.testing.assert_array_equal(pool, expected)


def test_sources_are_read_before_destinations_are_written() -> None:
    cache = filled()
    before = {name: pool.copy() for name, pool in cache.pools.items()}
    cache.copy_blocks([(0, 1), (1, 2)])
    for name, pool in cache.pools.items():
        np.testing.assert_array_equal(pool[2], before[name][1])


def test_no_copies_is_no_work() -> None:
    cache = filled()
    before = cache.pools["v_pool.0"].copy()
    cache.copy_blocks([])
    np.testing.assert_array_equal(cache.pools["v_pool.0"], before)
