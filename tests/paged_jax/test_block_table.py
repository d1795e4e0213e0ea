"""What a BlockTable and blocks_needed promise, and the numbers of the article that started the project."""

from itertools import chain
from types import SimpleNamespace

import pytest

from paged_jax import errors
from paged_jax.audit import AuditLog

from .allocator_model import REAL


@pytest.fixture
def paging():
    return REAL


def pool_and_table(paging, num_tokens, block_size=4, num_blocks=16):
    pool = paging.BlockAllocator(num_blocks, block_size)
    table = paging.BlockTable(pool, "a")
    table.append(num_tokens)
    return pool, table


# -- append ------------------------------------------------------------------------------------------------


def test_a_new_table_is_empty(paging):
    table = paging.BlockTable(paging.BlockAllocator(4, 4), "a")
    assert (table.blocks, table.num_tokens) == ([], 0)


def test_allocation_follows_the_write(paging):
    """A request that ends after two tokens has taken one block, however long it might have become."""
    pool, table = pool_and_table(paging, 2)
    assert (table.blocks, table.num_tokens, pool.num_free_blocks) == ([1], 2, 14)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_has_as_many_blocks_as_its_tokens_fill(num_tokens, num_blocks, paging):
    _, table = pool_and_table(paging, num_tokens)
    assert len(table.blocks) == num_blocks


def test_append_reports_what_it_took_and_where_the_tokens_go(paging):
    _, table = pool_and_table(paging, 3)
    done = table.append(6)
    assert (done.new_blocks, done.copies) == ([2, 3], [])
    assert list(done.slots) == [1 * 4 + 3, 8, 9, 10, 11, 12]
    assert len(done.slots) == 6


def test_a_partly_filled_block_takes_more_tokens_in_place(paging):
    pool, table = pool_and_table(paging, 1)
    done = table.append(1)
    assert (done.new_blocks, done.copies, list(done.slots)) == ([], [], [5])
    assert pool.num_free_blocks == 14


def test_appending_nothing_changes_nothing(paging):
    pool, table = pool_and_table(paging, 5)
    twin = table.fork("b")
    done = twin.append(0)
    assert (done.new_blocks, done.copies, list(done.slots)) == ([], [], [])
    assert pool.num_free_blocks == 13


def test_a_failed_append_changes_nothing(paging):
    audit = AuditLog()
    pool = paging.BlockAllocator(4, 4, audit=audit)
    table = paging.BlockTable(pool, "a")
    table.append(5)
    twin = table.fork("b")
    records = len(audit)
    with pytest.raises(errors.NoFreeBlocks):
        twin.append(4)
    assert (twin.blocks, twin.num_tokens) == ([1, 2], 5)
    assert (pool.num_free_blocks, len(audit)) == (1, records)
    pool.check([table, twin])


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None])
def test_append_takes_a_count(bad, paging):
    _, table = pool_and_table(paging, 1)
    for call in (lambda: table.append(bad), lambda: paging.blocks_needed([table], bad)):
        with pytest.raises(errors.InvalidArgument, match=r"n=.*expected an int of at least 0"):
            call()
    assert table.num_tokens == 1


# -- fork and copy-on-write --------------------------------------------------------------------------------


def test_a_fork_shares_every_block_and_takes_none(paging):
    pool, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    assert (twin.blocks, twin.num_tokens, twin.owner) == ([1, 2], 6, "b")
    assert pool.num_free_blocks == 13
    assert [pool.ref_cnt(block) for block in (1, 2)] == [2, 2]
    pool.check([table, twin])


def test_the_first_write_into_a_shared_partial_block_copies_it(paging):
    pool, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    done = twin.append(1)
    assert (done.new_blocks, done.copies, list(done.slots)) == ([3], [(2, 3)], [3 * 4 + 2])
    assert (table.blocks, twin.blocks) == ([1, 2], [1, 3])
    assert [pool.ref_cnt(block) for block in (1, 2, 3)] == [2, 1, 1]
    pool.check([table, twin])


def test_the_parent_copies_if_it_writes_first(paging):
    pool, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    assert table.append(1).copies == [(2, 3)]
    assert twin.append(1).copies == []
    pool.check([table, twin])


def test_the_last_holder_of_a_once_shared_block_writes_in_place(paging):
    pool, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    twin.append(1)
    done = table.append(1)
    assert (done.new_blocks, done.copies, list(done.slots)) == ([], [], [2 * 4 + 2])
    assert pool.num_free_blocks == 12


def test_a_full_block_is_never_copied(paging):
    pool, table = pool_and_table(paging, 8)
    twin = table.fork("b")
    done = twin.append(1)
    assert (done.new_blocks, done.copies) == ([3], [])
    assert [pool.ref_cnt(block) for block in (1, 2, 3)] == [2, 2, 1]


def test_a_copy_and_new_blocks_come_in_one_append(paging):
    _, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    done = twin.append(7)
    assert (done.new_blocks, done.copies) == ([3, 4, 5], [(2, 3)])
    assert twin.blocks == [1, 3, 4, 5]


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("forks", range(3))
def test_append_one_is_append_of_one(length, forks, paging):
    (pool, table), (other_pool, other) = (pool_and_table(paging, length) for _ in range(2))
    for name in range(forks):
        table.fork(name), other.fork(name)
    copies = other.append(1).copies
    assert table.append_one() == (copies[0] if copies else None)
    assert (table.blocks, table.num_tokens) == (other.blocks, other.num_tokens)
    assert pool.num_free_blocks == other_pool.num_free_blocks
    assert [pool.ref_cnt(block) for block in table.blocks] == [other_pool.ref_cnt(b) for b in table.blocks]


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("n", range(1, 10))
def test_a_forks_append_costs_what_its_new_tokens_and_its_copy_fill(length, n, paging):
    pool, table = pool_and_table(paging, length)
    free = pool.num_free_blocks
    table.fork("b").append(n)
    assert free - pool.num_free_blocks == -(-(length + n) // 4) - length // 4


def test_a_pending_swap_out_is_a_holder_too(paging):
    """While the fetch of a block is pending, a write goes into a copy."""
    pool, table = pool_and_table(paging, 6)
    fetch = SimpleNamespace(blocks=list(table.blocks))
    pool.incref(fetch.blocks, owner="fetch")
    assert table.append(1).copies == [(2, 3)]
    pool.check([table, fetch])


def test_a_fork_of_an_empty_table_is_empty(paging):
    pool, table = pool_and_table(paging, 0)
    twin = table.fork("b")
    assert (twin.append(1).copies, table.blocks) == ([], [])
    pool.check([table, twin])


# -- adopt -------------------------------------------------------------------------------------------------


def test_adopt_takes_over_the_counts_of_a_prefix_hit(paging):
    pool, table = pool_and_table(paging, 8)
    pool.register(table.blocks[0], "prefix")
    table.release()
    hit = pool.lookup("prefix")
    pool.incref([hit], owner="b")
    other = paging.BlockTable(pool, "b")
    other.adopt([hit], 4)
    assert (other.blocks, other.num_tokens, pool.ref_cnt(hit)) == ([1], 4, 1)
    pool.check([other])
    assert other.append(1).copies == []
    other.release()
    pool.check([])


def test_adopt_restores_a_swapped_out_table(paging):
    pool = paging.BlockAllocator(8, 4)
    table = paging.BlockTable(pool, "a")
    table.adopt(pool.allocate(2, owner="a"), 6)
    assert list(table.append(1).slots) == [2 * 4 + 2]
    pool.check([table])


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(0, 1), (1, 0), (1, 5), (2, 4), (2, 9)])
def test_adopted_blocks_fit_the_tokens(num_blocks, num_tokens, paging):
    pool = paging.BlockAllocator(8, 4)
    blocks = pool.allocate(num_blocks, owner="a")
    table = paging.BlockTable(pool, "a")
    with pytest.raises(
        errors.InvalidArgument, match=f"{num_blocks} blocks for {num_tokens} tokens: expected"
    ):
        table.adopt(blocks, num_tokens)
    assert (table.blocks, table.num_tokens) == ([], 0)


@pytest.mark.parametrize("bad", [-1, True, 4.0, None])
def test_adopt_takes_a_number_of_tokens(bad, paging):
    table = paging.BlockTable(paging.BlockAllocator(8, 4), "a")
    with pytest.raises(errors.InvalidArgument, match="num_tokens="):
        table.adopt([], bad)


def test_only_an_empty_table_adopts(paging):
    pool, table = pool_and_table(paging, 2)
    with pytest.raises(errors.InvalidArgument, match="not empty"):
        table.adopt(pool.allocate(owner="a"), 4)
    assert (table.blocks, table.num_tokens) == ([1], 2)


@pytest.mark.parametrize("bad", [2, 0, 99])
def test_only_held_blocks_are_adopted(bad, paging):
    pool = paging.BlockAllocator(8, 4)
    pool.allocate(owner="a")
    table = paging.BlockTable(pool, "a")
    with pytest.raises(errors.InvalidBlock, match=f"block {bad}"):
        table.adopt([1, bad], 8)
    assert table.blocks == []


def test_a_table_does_not_change_with_the_list_it_adopted(paging):
    pool = paging.BlockAllocator(8, 4)
    mine = pool.allocate(2, owner="a")
    table = paging.BlockTable(pool, "a")
    table.adopt(mine, 8)
    mine.append(7)
    assert table.blocks == [1, 2]


# -- release -----------------------------------------------------------------------------------------------


def test_release_gives_every_block_back(paging):
    pool, table = pool_and_table(paging, 9)
    table.release()
    assert (pool.num_free_blocks, table.blocks, table.num_tokens) == (15, [], 0)
    pool.check([])


def test_releasing_twice_changes_nothing(paging):
    pool, table = pool_and_table(paging, 9)
    twin = table.fork("b")
    table.release()
    table.release()
    pool.check([twin])


def test_a_released_table_can_be_filled_again(paging):
    pool, table = pool_and_table(paging, 9)
    table.release()
    assert len(table.append(5).new_blocks) == 2
    pool.check([table])


def test_a_forks_blocks_live_until_the_last_table_is_released(paging):
    pool, table = pool_and_table(paging, 6)
    twin = table.fork("b")
    table.release()
    assert pool.num_free_blocks == 13
    assert twin.append(1).copies == []
    twin.release()
    assert pool.num_free_blocks == 15


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head(paging):
    pool, table = pool_and_table(paging, 12, num_blocks=4)
    for block in table.blocks:
        pool.register(block, str(block))
    table.release()
    assert [pool.allocate(owner="b") for _ in range(3)] == [[3], [2], [1]]


# -- blocks_needed -----------------------------------------------------------------------------------------


def siblings(paging, num_tokens, width):
    pool, table = pool_and_table(paging, num_tokens, num_blocks=64)
    return pool, [table, *(table.fork(f"fork {i}") for i in range(width - 1))]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_tokens", [0, 3, 4, 6])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_blocks_needed_is_what_the_appends_take(width, num_tokens, n, paging):
    pool, tables = siblings(paging, num_tokens, width)
    needed, free = paging.blocks_needed(tables, n), pool.num_free_blocks
    for table in tables:
        table.append(n)
    assert needed == free - pool.num_free_blocks


def test_siblings_need_one_copy_less_than_they_are(paging):
    _, tables = siblings(paging, 6, width=4)
    assert paging.blocks_needed(tables, 1) == 3


def test_all_siblings_copy_while_somebody_else_holds_their_block(paging):
    _, tables = siblings(paging, 6, width=4)
    assert paging.blocks_needed(tables[:3], 1) == 3


def test_two_groups_are_counted_apart(paging):
    pool, tables = siblings(paging, 6, width=2)
    other = paging.BlockTable(pool, "other")
    other.append(1)
    assert paging.blocks_needed([*tables, other, other.fork("twin")], 1) == 2


def test_no_tables_need_no_blocks(paging):
    assert paging.blocks_needed([], 5) == 0


# -- the article's numbers ---------------------------------------------------------------------------------


def test_nine_tokens_in_blocks_7_1_9(paging):
    """Block size 4, table [7, 1, 9]: token 8 is slot 0 of block 9."""
    pool = paging.BlockAllocator(10, 4)
    pool.allocate(9, owner="others")
    pool.free([9, 1, 7], owner="others")
    table = paging.BlockTable(pool, "a")
    slots = list(table.append(9).slots)
    assert table.blocks == [7, 1, 9]
    assert divmod(slots[8], 4) == (9, 0)
    assert slots == [28, 29, 30, 31, 4, 5, 6, 7, 36]


def test_four_beams_on_4000_tokens_take_two_gigabytes_and_not_eight(paging):
    """At 512 KB a token, with 50 tokens of its own for each beam."""
    bytes_per_token, block_size = 512 * 1024, 16

    def gigabytes(tables):
        return len(set(chain.from_iterable(t.blocks for t in tables))) * block_size * bytes_per_token / 2**30

    pool = paging.BlockAllocator(1200, block_size)
    apart = [paging.BlockTable(pool, i) for i in range(4)]
    for table in apart:
        table.append(4000)
    assert gigabytes(apart) == pytest.approx(8, rel=0.03)
    for table in apart:
        table.release()

    parent = paging.BlockTable(pool, "parent")
    parent.append(4000)
    beams = [parent, *(parent.fork(i) for i in range(3))]
    assert gigabytes(beams) == pytest.approx(2, rel=0.03)
    for table in beams:
        table.append(50)
    assert gigabytes(beams) == pytest.approx(2, rel=0.06)
    pool.check(beams)
