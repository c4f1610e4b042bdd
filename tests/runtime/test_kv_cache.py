from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

import runtime.kv_cache
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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are Linux's")
@pytest.mark.parametrize(("num_blocks", "huge"), [(1 << 10, False), (5 << 10, True)])  # 2.5 and 12.5 MB
def test_large_pools_ask_for_huge_pages_and_take_none_before_they_are_used(
    num_blocks: int, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []  # an ordinary one may lie in memory that the allocator, or numpy, has asked huge pages for
    reserve = runtime.kv_cache._huge_pages
    monkeypatch.setattr(runtime.kv_cache, "_huge_pages", lambda size: asked.append(size) or reserve(size))
    before = resident_bytes()
    pool = zeros_aligned((num_blocks, 2, 256, 5), np.dtype(np.uint8))
    assert resident_bytes() - before < 1 << 20
    assert pool.flags.writeable and not pool[-1].any()
    assert asked == ([pool.nbytes] if huge else [])
    if huge:
        assert "hg" in memory_flags(pool.ctypes.data)
        assert "hg" not in memory_flags(pool[-1:].ctypes.data)  # the padding's block
    assert pool.ctypes.data % (2 << 20 if huge else 64) == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")


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
