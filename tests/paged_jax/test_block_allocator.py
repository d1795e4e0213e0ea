"""What a BlockAllocator promises. The checks take the classes, so that test_broken_variants runs them too."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from paged_jax import errors
from paged_jax.block_table import BlockTable

from .allocator_model import REAL


@pytest.fixture
def paging():
    return REAL


def holder(*blocks):
    return SimpleNamespace(blocks=list(blocks))


def full_pool(paging, num_usable):
    """A pool all of whose blocks, 1..num_usable, are held once."""
    pool = paging.BlockAllocator(num_usable + 1, 4)
    pool.allocate(num_usable, owner="a")
    return pool


def cached_pool(paging, num_usable):
    """A pool whose blocks are all free and cached, block i under the key 'i', block 1 least recently used."""
    pool = full_pool(paging, num_usable)
    for block in range(1, num_usable + 1):
        pool.register(block, str(block))
        pool.free([block], owner="a")
    return pool


# -- allocation --------------------------------------------------------------------------------------------


def test_a_fresh_pool_hands_out_ascending_ids_in_one_call(paging):
    assert paging.BlockAllocator(8, 4).allocate(5, owner="a") == [1, 2, 3, 4, 5]


def test_a_fresh_pool_hands_out_ascending_ids_in_many_calls(paging):
    pool = paging.BlockAllocator(8, 4)
    assert [pool.allocate(owner="a") for _ in range(5)] == [[1], [2], [3], [4], [5]]


def test_every_block_but_the_null_block_can_be_allocated(paging):
    pool = paging.BlockAllocator(8, 4)
    assert pool.num_free_blocks == 7
    assert sorted(pool.allocate(7, owner="a")) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free_blocks == 0


def test_an_allocated_block_has_one_count(paging):
    pool = paging.BlockAllocator(8, 4)
    assert pool.ref_cnt(1) == 0
    pool.allocate(owner="a")
    assert pool.ref_cnt(1) == 1


def test_allocating_nothing_gives_nothing(paging):
    pool = full_pool(paging, 3)
    assert pool.allocate(0, owner="a") == []


def test_allocation_is_all_or_nothing(paging):
    pool = paging.BlockAllocator(6, 4)
    pool.allocate(2, owner="a")
    with pytest.raises(errors.NoFreeBlocks):
        pool.allocate(4, owner="b")
    assert pool.num_free_blocks == 3
    pool.check([holder(1, 2)])
    assert pool.allocate(3, owner="b") == [3, 4, 5]


def test_a_failed_allocation_evicts_nothing(paging):
    pool = cached_pool(paging, 3)
    with pytest.raises(errors.NoFreeBlocks):
        pool.allocate(4, owner="b")
    assert [pool.lookup(key) for key in "123"] == [1, 2, 3]


def test_no_free_blocks_says_who_wants_how_many_of_how_many():
    pool = REAL.BlockAllocator(6, 4)
    pool.allocate(2, owner="a")
    with pytest.raises(errors.NoFreeBlocks, match=r"'request 9' asks for blocks: 4 wanted, 3 of 5 free"):
        pool.allocate(4, owner="request 9")


# -- freeing -----------------------------------------------------------------------------------------------


def test_a_freed_block_can_be_allocated_again(paging):
    pool = full_pool(paging, 3)
    pool.free([2], owner="a")
    assert (pool.ref_cnt(2), pool.num_free_blocks) == (0, 1)
    assert pool.allocate(owner="b") == [2]


def test_a_shared_block_is_free_only_when_the_last_count_is_given_back(paging):
    pool = full_pool(paging, 1)
    pool.incref([1], owner="b")
    pool.free([1], owner="a")
    assert (pool.ref_cnt(1), pool.num_free_blocks) == (1, 0)
    pool.free([1], owner="b")
    assert (pool.ref_cnt(1), pool.num_free_blocks) == (0, 1)


def test_a_block_named_twice_loses_two_counts(paging):
    pool = full_pool(paging, 1)
    pool.incref([1, 1], owner="b")
    assert pool.ref_cnt(1) == 3
    pool.free([1, 1], owner="b")
    assert pool.ref_cnt(1) == 1


def test_a_block_is_shared_while_it_is_held_more_than_once(paging):
    pool = full_pool(paging, 3)
    counts = []
    for change in (pool.incref, pool.incref, pool.free, pool.free, pool.free):
        change([1], owner="b")
        counts.append(pool.num_shared_blocks)
    assert counts == [1, 1, 1, 0, 0]
    pool.incref([2, 2, 3], owner="b")
    assert pool.num_shared_blocks == 2


def test_a_refused_free_leaves_the_shared_blocks_shared(paging):
    pool = full_pool(paging, 2)
    pool.incref([1, 1], owner="b")
    with pytest.raises(errors.InvalidBlock):
        pool.free([1, 1, 0], owner="b")
    assert pool.num_shared_blocks == 1
    pool.check([holder(1, 1, 1, 2)])


def test_a_second_free_is_refused_and_names_block_and_owner(paging):
    pool = full_pool(paging, 3)
    pool.free([2], owner="a")
    with pytest.raises(errors.DoubleFree, match=r"block 2: 'request 9'"):
        pool.free([2], owner="request 9")
    assert pool.ref_cnt(2) == 0
    pool.check([holder(1, 3)])


def test_giving_back_two_counts_needs_two(paging):
    pool = full_pool(paging, 1)
    with pytest.raises(errors.DoubleFree, match="2 given back, 1 held"):
        pool.free([1, 1], owner="a")
    pool.check([holder(1)])


@pytest.mark.parametrize("bad", [[2, 3, 3], [2, 0], [2, 99], [2, -1], [2, True], [2, 1.0], [2, None]])
def test_free_is_all_or_nothing(bad, paging):
    pool = full_pool(paging, 3)
    with pytest.raises(errors.InvalidBlock):
        pool.free(bad, owner="a")
    pool.check([holder(1, 2, 3)])


# -- sharing -----------------------------------------------------------------------------------------------


def test_incref_adds_a_count_and_takes_no_block(paging):
    pool = paging.BlockAllocator(4, 4)
    pool.allocate(2, owner="a")
    pool.incref([1, 2], owner="b")
    assert [pool.ref_cnt(block) for block in (1, 2)] == [2, 2]
    assert pool.num_free_blocks == 1


def test_a_free_block_cannot_be_shared(paging):
    pool = full_pool(paging, 2)
    pool.free([2], owner="a")
    with pytest.raises(errors.InvalidBlock, match="block 2"):
        pool.incref([1, 2], owner="b")
    pool.check([holder(1)])


@pytest.mark.parametrize("bad", [0, 4, -1, True, 1.0, "1", None])
def test_only_blocks_of_the_pool_are_blocks(bad, paging):
    pool = full_pool(paging, 3)
    for call in (
        lambda: pool.incref([1, bad], owner="a"),
        lambda: pool.free([1, bad], owner="a"),
        lambda: pool.register(bad, "key"),
        lambda: pool.ref_cnt(bad),
    ):
        with pytest.raises(errors.InvalidBlock, match="block "):
            call()
    pool.check([holder(1, 2, 3)])


# -- the order in which free blocks are handed out ---------------------------------------------------------


def test_the_block_freed_last_is_the_warmest(paging):
    pool = full_pool(paging, 4)
    for block in (3, 1, 4):
        pool.free([block], owner="a")
    assert pool.allocate(3, owner="b") == [4, 1, 3]


def test_freed_blocks_come_before_fresh_ones(paging):
    pool = paging.BlockAllocator(6, 4)
    pool.allocate(3, owner="a")
    pool.free([2], owner="a")
    assert pool.allocate(2, owner="b") == [2, 4]


def test_blocks_freed_by_a_sole_owner_come_before_once_shared_ones(paging):
    pool = full_pool(paging, 3)
    pool.incref([2], owner="b")
    pool.free([2, 1, 3, 2], owner="a")
    assert pool.allocate(3, owner="c") == [3, 1, 2]


def test_fresh_blocks_come_before_once_shared_ones(paging):
    pool = paging.BlockAllocator(4, 4)
    pool.allocate(2, owner="a")
    pool.incref([1], owner="b")
    pool.free([1, 1], owner="a")
    assert pool.allocate(2, owner="c") == [3, 1]


def test_once_shared_blocks_rest_the_longest_possible(paging):
    pool = full_pool(paging, 3)
    pool.incref([1, 2, 3], owner="b")
    pool.free([2, 2, 3, 3, 1, 1], owner="a")
    assert pool.allocate(3, owner="c") == [2, 3, 1]


def test_sharing_is_forgotten_with_the_next_allocation(paging):
    pool = full_pool(paging, 2)
    pool.incref([1], owner="b")
    pool.free([1, 1], owner="a")
    assert pool.allocate(owner="c") == [1]
    pool.free([2, 1], owner="c")
    assert pool.allocate(2, owner="d") == [1, 2]


def test_cached_blocks_come_last(paging):
    pool = full_pool(paging, 3)
    pool.register(1, "key")
    pool.incref([2], owner="b")
    pool.free([1, 2, 2, 3], owner="a")
    assert pool.allocate(3, owner="c") == [3, 2, 1]


def test_the_least_recently_used_prefix_is_evicted_first(paging):
    pool = cached_pool(paging, 3)
    pool.incref([1], owner="b")
    pool.free([1], owner="b")
    assert pool.allocate(3, owner="c") == [2, 3, 1]


def test_cached_blocks_keep_the_order_of_one_free_call(paging):
    pool = full_pool(paging, 3)
    for block in (1, 2, 3):
        pool.register(block, str(block))
    pool.free([3, 1, 2], owner="a")
    assert pool.allocate(3, owner="b") == [3, 1, 2]


def test_a_lookup_alone_is_no_use(paging):
    pool = cached_pool(paging, 2)
    assert pool.lookup("1") == 1
    assert pool.allocate(owner="b") == [1]


# -- prefix cache ------------------------------------------------------------------------------------------


def test_a_registered_block_is_found_while_it_is_held(paging):
    pool = full_pool(paging, 2)
    pool.register(2, "key")
    assert (pool.lookup("key"), pool.lookup("other")) == (2, None)


def test_a_cached_block_is_free_and_still_found(paging):
    pool = cached_pool(paging, 2)
    assert (pool.lookup("2"), pool.ref_cnt(2), pool.num_free_blocks) == (2, 0, 2)
    pool.check([])


def test_incref_revives_a_cached_block(paging):
    pool = cached_pool(paging, 2)
    pool.incref([1], owner="b")
    assert (pool.ref_cnt(1), pool.num_free_blocks, pool.lookup("1")) == (1, 1, 1)
    pool.check([holder(1)])
    assert pool.allocate(owner="c") == [2]


def test_a_revived_block_can_be_taken_twice_in_one_call(paging):
    pool = cached_pool(paging, 1)
    pool.incref([1, 1], owner="b")
    pool.check([holder(1, 1)])


def test_eviction_forgets_the_key(paging):
    pool = cached_pool(paging, 2)
    assert pool.allocate(owner="b") == [1]
    assert (pool.lookup("1"), pool.lookup("2")) == (None, 2)
    pool.register(1, "new")
    assert pool.lookup("new") == 1
    pool.check([holder(1)])


def test_a_held_block_is_never_evicted(paging):
    pool = full_pool(paging, 2)
    pool.register(1, "key")
    pool.free([2], owner="a")
    assert pool.allocate(owner="b") == [2]
    with pytest.raises(errors.NoFreeBlocks):
        pool.allocate(owner="b")
    assert (pool.lookup("key"), pool.ref_cnt(1)) == (1, 1)


def test_the_first_registration_of_a_key_wins(paging):
    pool = full_pool(paging, 2)
    pool.register(1, "key")
    pool.register(2, "key")
    assert pool.lookup("key") == 1
    pool.free([1, 2], owner="a")
    assert pool.allocate(owner="b") == [2]
    pool.check([holder(2)])


def test_the_first_key_of_a_block_wins(paging):
    pool = full_pool(paging, 1)
    pool.register(1, "first")
    pool.register(1, "second")
    assert (pool.lookup("first"), pool.lookup("second")) == (1, None)
    pool.check([holder(1)])


def test_cached_blocks_are_those_that_nobody_holds_but_a_key_leads_to(paging):
    pool = cached_pool(paging, 3)
    assert pool.num_cached_blocks == 3
    pool.incref([2], owner="b")
    assert pool.num_cached_blocks == 2
    pool.allocate(2, owner="c")
    assert pool.num_cached_blocks == 0


def test_after_forgetting_no_key_leads_anywhere_and_every_count_is_as_it_was(paging):
    pool = cached_pool(paging, 4)
    pool.incref([2, 2], owner="b")
    pool.forget_cached()
    assert [pool.lookup(str(block)) for block in (1, 2, 3, 4)] == [None] * 4
    assert (pool.num_cached_blocks, pool.num_free_blocks, pool.ref_cnt(2)) == (0, 3, 2)
    pool.check([holder(2, 2)])
    pool.register(2, "new")
    assert pool.lookup("new") == 2


def test_forgotten_blocks_are_free_as_if_they_had_never_been_cached(paging):
    pool = cached_pool(paging, 4)
    pool.incref([1, 1], owner="b")
    pool.free([1, 1], owner="b")
    pool.forget_cached()
    assert pool.allocate(4, owner="c") == [4, 3, 2, 1]  # the newest first, and the once shared one last


def test_a_free_block_cannot_be_registered(paging):
    pool = full_pool(paging, 1)
    pool.free([1], owner="a")
    with pytest.raises(errors.InvalidBlock, match="block 1"):
        pool.register(1, "key")
    assert pool.lookup("key") is None


# -- check -------------------------------------------------------------------------------------------------


def test_check_accepts_every_kind_of_holder(paging):
    pool = paging.BlockAllocator(6, 4)
    table = BlockTable(pool, "a")
    table.append(5)
    pool.incref([1], owner="swap")
    pool.check([table, holder(1)])


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ([[1]], "block 2: ref_cnt is 1, but it occurs 0 times"),
        ([[1, 2], [2]], "block 2: ref_cnt is 1, but it occurs 2 times"),
        ([[1, 2, 3]], "block 3: ref_cnt is 0, but it occurs 1 times"),
        ([[1, 2, 0]], "block 0: a holder has it"),
        ([[1, 2, 9]], "block 9: a holder has it"),
    ],
)
def test_check_names_the_block_that_holders_and_counts_disagree_on(holders, message, paging):
    pool = paging.BlockAllocator(5, 4)
    pool.allocate(2, owner="a")
    with pytest.raises(errors.AllocatorCorruption, match=message):
        pool.check([holder(*blocks) for blocks in holders])


def damage_leak(pool):
    pool._free_exclusive.remove(3)


def damage_listed_twice(pool):
    pool._free_exclusive.append(3)


def damage_free_though_held(pool):
    pool._free_shared.append(1)


def damage_null_block_listed(pool):
    pool._free_exclusive.append(0)


def damage_null_block_counted(pool):
    pool._ref_cnt[0] = 1


def damage_key_lost(pool):
    del pool._block_of_key["key"]


def damage_key_astray(pool):
    pool._block_of_key["stray"] = 1


def damage_cached_without_key(pool):
    del pool._key_of_block[2]
    del pool._block_of_key["key"]


def damage_free_with_key(pool):
    pool._key_of_block[3] = pool._block_of_key["new"] = "new"
    pool._block_of_key["new"] = 3


def damage_sharing_forgotten(pool):
    pool._ever_shared[4] = False


def test_check_finds_a_wrong_number_of_shared_blocks():
    pool = full_pool(REAL, 4)
    pool.incref([4], owner="b")
    pool.num_shared_blocks = 2
    with pytest.raises(errors.AllocatorCorruption, match="1 blocks are shared; 2 are counted"):
        pool.check([holder(1, 2, 3, 4, 4)])


@pytest.mark.parametrize(
    ("damage", "block"),
    [
        (damage_leak, 3),
        (damage_listed_twice, 3),
        (damage_free_though_held, 1),
        (damage_null_block_listed, 0),
        (damage_null_block_counted, 0),
        (damage_key_lost, 2),
        (damage_key_astray, 1),
        (damage_cached_without_key, 2),
        (damage_free_with_key, 3),
        (damage_sharing_forgotten, 4),
    ],
)
def test_check_finds_lists_that_disagree(damage, block):
    pool = full_pool(REAL, 4)
    pool.register(2, "key")
    pool.free([2, 3], owner="a")
    pool.incref([4], owner="b")
    pool.check([holder(1, 4, 4)])
    damage(pool)
    with pytest.raises(errors.AllocatorCorruption, match=f"block {block}: "):
        pool.check([holder(1, 4, 4)])


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [1, 0, -5, True, 8.0, "8", None])
def test_a_pool_needs_two_blocks(bad):
    with pytest.raises(
        errors.InvalidArgument, match=r"num_blocks=.*expected an int of at least 2.*null block"
    ):
        REAL.BlockAllocator(bad, 16)


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None])
def test_a_block_holds_at_least_one_token(bad):
    with pytest.raises(errors.InvalidArgument, match=r"block_size=.*expected an int of at least 1"):
        REAL.BlockAllocator(8, bad)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None])
def test_allocate_takes_a_count(bad, paging):
    pool = paging.BlockAllocator(8, 4)
    with pytest.raises(errors.InvalidArgument, match=r"n=.*expected an int of at least 0"):
        pool.allocate(bad, owner="a")
    assert pool.num_free_blocks == 7


# -- cost --------------------------------------------------------------------------------------------------


def test_a_pool_of_a_million_blocks_is_cheap_to_make():
    """No list of ids is made: 9 bytes a block, and milliseconds (the limit allows for a slow machine)."""
    start = time.perf_counter()
    pool = REAL.BlockAllocator(10**6, 16)
    assert time.perf_counter() - start < 0.1
    assert sum(sys.getsizeof(getattr(pool, name)) for name in pool.__slots__) < 10 * 10**6


def test_the_size_of_the_pool_does_not_slow_it_down():
    """A factor of ten is left for caches and other programs; a search through the pool costs a hundred."""

    def seconds(num_blocks):
        pool = REAL.BlockAllocator(num_blocks, 16)
        blocks = pool.allocate(num_blocks - 1, owner="a")
        for block in blocks[::2]:
            pool.register(block, block)
        pool.incref(blocks[::3], owner="b")
        pool.free(blocks + blocks[::3], owner="a")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for i in range(100):
                pool.incref([pool.lookup(blocks[2 * i])], owner="c")
                pool.free([blocks[2 * i]], owner="c")
                pool.free(pool.allocate(2, owner="c"), owner="c")
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(100_000) < 10 * seconds(1000)


def test_the_host_side_imports_no_jax():
    code = (
        "import sys, paged_jax.block_table; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("audit", [True, print, "log"])
def test_an_audit_that_cannot_record_is_refused_before_anything_is_taken(audit):
    with pytest.raises(errors.InvalidArgument, match="audit="):
        REAL.BlockAllocator(4, 2, audit=audit)
