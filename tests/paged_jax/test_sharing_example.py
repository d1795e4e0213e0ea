"""The sums that sharing is told by: four beams after 4,000 tokens of a model with 32 layers and 32 heads."""

import pytest

from paged_jax import BlockAllocator, BlockTable
from paged_jax.block_table import blocks_needed

BYTES_PER_TOKEN = 2 * 32 * 32 * 128 * 2
BEAMS, PARENT = 4, 4000
SIZES = pytest.mark.parametrize("block_size", [16, 32])


def make_pool(block_size):
    return BlockAllocator(40 * 2**30 // (block_size * BYTES_PER_TOKEN) + 1, block_size)


def gigabytes(pool):
    return (pool.num_blocks - 1 - pool.num_free_blocks) * pool.block_size * BYTES_PER_TOKEN / 1e9


def parent_of(pool):
    table = BlockTable(pool, "parent")
    table.append(PARENT)
    return table


def family_of(pool):
    parent = parent_of(pool)
    return [parent, *(parent.fork(f"beam {index}") for index in range(1, BEAMS))]


def test_a_token_takes_512_kib_and_40_gib_hold_2560_blocks_of_32():
    assert BYTES_PER_TOKEN == 512 * 1024
    assert make_pool(32).num_free_blocks == 2560


@SIZES
def test_beams_of_their_own_take_8_gb(block_size):
    pool = make_pool(block_size)
    for _ in range(BEAMS):
        parent_of(pool)
    assert gigabytes(pool) == pytest.approx(8.4, abs=0.1)


@SIZES
def test_beams_that_share_take_2_gb(block_size):
    """Forking copies nothing and takes no block."""
    pool = make_pool(block_size)
    tables = family_of(pool)
    assert gigabytes(pool) == pytest.approx(2.1, abs=0.1)
    assert pool.num_shared_blocks == PARENT // block_size
    for table in tables:
        table.release()
    pool.check([])


@SIZES
@pytest.mark.parametrize("shorter_by", [0, 5])
def test_what_beams_append_is_all_that_they_add(block_size, shorter_by):
    """32 tokens each; a block in which the prompt ends is copied by each beam but the last."""
    pool = make_pool(block_size)
    parent = BlockTable(pool, "parent")
    parent.append(PARENT - shorter_by)
    tables = [parent, *(parent.fork(index) for index in range(1, BEAMS))]
    before, needed = pool.num_free_blocks, blocks_needed(tables, 32)
    copies = [copy for table in tables for copy in table.append(32).copies]
    assert before - pool.num_free_blocks == needed
    full = (PARENT - shorter_by) // block_size
    own = -(-(PARENT - shorter_by + 32) // block_size) - full
    assert pool.num_blocks - 1 - pool.num_free_blocks == full + BEAMS * own
    assert len(copies) == (BEAMS - 1 if shorter_by else 0)
    assert gigabytes(pool) == pytest.approx(2.2, abs=0.05)
    logical = sum(len(table.blocks) for table in tables)
    assert 1 - (full + BEAMS * own) / logical > 0.73
    pool.check(tables)


@SIZES
def test_a_beam_that_takes_the_place_of_another_frees_what_only_that_one_had(block_size):
    pool = make_pool(block_size)
    tables = family_of(pool)
    for table in tables:
        table.append(32)
    before = pool.num_free_blocks
    tables[3].release()
    assert pool.num_free_blocks - before == 32 // block_size
    tables[3] = tables[0].fork("a child")
    assert pool.num_free_blocks - before == 32 // block_size
    pool.check(tables)
