"""One deliberate bug for each rule: a check that a broken allocator passes would prove nothing.

Each variant must fail the named check of the behaviour tests, and the random programs of the model as well.
"""

import random
from collections import Counter

import pytest

from paged_jax import errors
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable, blocks_needed

from . import test_block_allocator as pool_checks
from . import test_block_table as table_checks
from .allocator_model import REAL, run_program

PROGRAMS = [random.Random(seed).randbytes(1600) for seed in range(25)]


class LyingPool:
    """A pool that reports another ref_cnt than it has."""

    def __init__(self, pool, count):
        self.pool, self.count = pool, count

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def ref_cnt(self, block):
        return self.count


# -- allocation --------------------------------------------------------------------------------------------


class HandsOutTheNullBlock(BlockAllocator):
    def __init__(self, num_blocks, block_size, *, audit=None):
        super().__init__(num_blocks, block_size, audit=audit)
        self._next_fresh = 0


class LosesTheLastBlock(BlockAllocator):
    def __init__(self, num_blocks, block_size, *, audit=None):
        super().__init__(num_blocks - 1, block_size, audit=audit)


class AllocatesWhatThereIs(BlockAllocator):
    def allocate(self, n=1, *, owner, reason=""):
        return [super(AllocatesWhatThereIs, self).allocate(1, owner=owner)[0] for _ in range(n)]


class HandsOutDescendingIds(BlockAllocator):
    def allocate(self, n=1, *, owner, reason=""):
        return super().allocate(n, owner=owner, reason=reason)[::-1]


class HandsOutTheColdestFirst(BlockAllocator):
    def _take(self, owner):
        self._free_exclusive.reverse()
        block = super()._take(owner)
        self._free_exclusive.reverse()
        return block


class HandsOutFreshBlocksFirst(BlockAllocator):
    def _take(self, owner):
        freed = self._free_exclusive
        if self._next_fresh < self.num_blocks:
            self._free_exclusive = []
        block = super()._take(owner)
        self._free_exclusive = freed
        return block


class HandsOutSharedBlocksFirst(BlockAllocator):
    def _take(self, owner):
        if self._free_shared:
            self._free_exclusive.append(self._free_shared.popleft())
        return super()._take(owner)


class HandsOutTheNewestSharedBlock(BlockAllocator):
    def _take(self, owner):
        self._free_shared.reverse()
        block = super()._take(owner)
        self._free_shared.reverse()
        return block


class NeverForgetsSharing(BlockAllocator):
    def _take(self, owner):
        shared = bytes(self._ever_shared)
        block = super()._take(owner)
        self._ever_shared[block] = shared[block]
        return block


# -- counts ------------------------------------------------------------------------------------------------


class FreesWithoutChecking(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        super().free([b for b in blocks if self.ref_cnt(b)], owner=owner, reason=reason)


class FreesOneByOne(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        for block in blocks:
            super().free([block], owner=owner, reason=reason)


class FreesATwiceNamedBlockOnce(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        super().free(dict.fromkeys(blocks), owner=owner, reason=reason)


class FreesWhileOthersHold(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        super().free(blocks, owner=owner, reason=reason)
        super().free([b for b in dict.fromkeys(blocks) if self.ref_cnt(b)], owner=owner, reason=reason)


class IncrefRevivesAFreeBlock(BlockAllocator):
    def incref(self, blocks, *, owner, reason=""):
        for block in blocks:
            if block in self._free_exclusive:
                self._ref_cnt[block] += 1
            else:
                super().incref([block], owner=owner, reason=reason)


class IncrefLeavesTheBlockEvictable(BlockAllocator):
    def incref(self, blocks, *, owner, reason=""):
        cached = [block for block in blocks if block in self._free_cached]
        super().incref(blocks, owner=owner, reason=reason)
        self._free_cached.update(dict.fromkeys(cached))


class ChecksNothing(BlockAllocator):
    def check(self, holders):
        pass


# -- prefix cache ------------------------------------------------------------------------------------------


class EvictsAHeldBlock(BlockAllocator):
    def allocate(self, n=1, *, owner, reason=""):
        if n == 1 and not self.num_free_blocks and self._key_of_block:
            block, key = self._key_of_block.popitem()
            del self._block_of_key[key]
            return [block]
        return super().allocate(n, owner=owner, reason=reason)


class FindsEvictedBlocks(BlockAllocator):
    def register(self, block, key):
        super().register(block, key)
        self.__dict__.setdefault("memory", {}).setdefault(key, block)

    def lookup(self, key):
        return self.__dict__.get("memory", {}).get(key)


class TheSecondRegistrationWins(BlockAllocator):
    def register(self, block, key):
        old = self._block_of_key.pop(key, None)
        if old is not None:
            del self._key_of_block[old]
        super().register(block, key)


class ABlockTakesASecondKey(BlockAllocator):
    def register(self, block, key):
        self._block_of_key.pop(self._key_of_block.pop(block, None), None)
        super().register(block, key)


class RegistersFreeBlocks(BlockAllocator):
    def register(self, block, key):
        self._block_of_key.setdefault(key, block)
        self._key_of_block.setdefault(block, key)


class EvictsTheMostRecentlyUsed(BlockAllocator):
    def _take(self, owner):
        if self._free_cached:
            self._free_cached.move_to_end(next(reversed(self._free_cached)), last=False)
        return super()._take(owner)


class CountsALookupAsAUse(BlockAllocator):
    def lookup(self, key):
        block = super().lookup(key)
        if block in self._free_cached:
            self._free_cached.move_to_end(block)
        return block


class ForgetsTheCacheWhenFreed(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        for block in blocks:
            if block in self._key_of_block and self.ref_cnt(block) == 1:
                del self._block_of_key[self._key_of_block.pop(block)]
        super().free(blocks, owner=owner, reason=reason)


class CountsCachedBlocksAsUsed(BlockAllocator):
    num_free_blocks = property(
        lambda self: BlockAllocator.num_free_blocks.fget(self) - len(self._free_cached)
    )


class CountsHeldBlocksAsCached(BlockAllocator):
    num_cached_blocks = property(lambda self: len(self._key_of_block))


class ForgetsFreeBlocksOnly(BlockAllocator):
    def forget_cached(self):
        held = {key: block for key, block in self._block_of_key.items() if self.ref_cnt(block)}
        super().forget_cached()
        self._block_of_key.update(held)
        self._key_of_block.update({block: key for key, block in held.items()})


class ForgetsInTheReversedOrder(BlockAllocator):
    def forget_cached(self):
        self._free_cached = type(self._free_cached)(reversed(self._free_cached.items()))
        super().forget_cached()


class CountsEveryShare(BlockAllocator):
    num_shared_blocks = property(lambda self: sum(count - 1 for count in self._ref_cnt if count > 1))


class LosesSharesInARefusedFree(BlockAllocator):
    def free(self, blocks, *, owner, reason=""):
        before = self.num_shared_blocks
        try:
            super().free(blocks, owner=owner, reason=reason)
        except errors.PagedJaxError:
            self.num_shared_blocks = max(before - 1, 0)
            raise


# -- block tables ------------------------------------------------------------------------------------------


class KeepsTheCountOfACopiedBlock(BlockTable):
    def _replace_last(self, dst):
        src, self.blocks[-1] = self.blocks[-1], dst
        return src, dst


class WritesIntoASharedBlock(BlockTable):
    def append(self, n):
        pool, self.allocator = self.allocator, LyingPool(self.allocator, count=1)
        try:
            return super().append(n)
        finally:
            self.allocator = pool


class WritesOneTokenIntoASharedBlock(BlockTable):
    def append_one(self):
        if self.num_tokens % self.allocator.block_size:
            self.num_tokens += 1
            return None
        return super().append_one()


class TheLastHolderCopies(BlockTable):
    def append(self, n):
        pool, self.allocator = self.allocator, LyingPool(self.allocator, count=2)
        try:
            return super().append(n)
        finally:
            self.allocator = pool


class CopiesFullBlocks(BlockTable):
    def append(self, n):
        full = n and self.blocks and self.num_tokens % self.allocator.block_size == 0
        if not full or self.allocator.ref_cnt(self.blocks[-1]) == 1:
            return super().append(n)
        copy = self._replace_last(self.allocator.allocate(owner=self.owner)[0])
        done = super().append(n)
        return done._replace(new_blocks=[copy[1], *done.new_blocks], copies=[copy])


class AppendsTokenByToken(BlockTable):
    """Right as long as it succeeds; a failure leaves the tokens before it."""

    def append(self, n):
        done = super().append(0)
        for _ in range(n):
            for all_of_them, more in zip(done, super().append(1), strict=True):
                all_of_them.extend(more)
        return done


class ContinuesPastABlocksEnd(BlockTable):
    def append(self, n):
        done = super().append(n)
        return done._replace(slots=[done.slots[0] + i for i in range(n)])


class TakesABlockAhead(BlockTable):
    def append(self, n):
        done = super().append(n)
        self.blocks.extend(self.allocator.allocate(owner=self.owner))
        return done


class ForksWithoutCounting(BlockTable):
    def fork(self, owner):
        twin = BlockTable(self.allocator, owner)
        twin.blocks, twin.num_tokens = list(self.blocks), self.num_tokens
        return twin


class ForksShareTheirList(BlockTable):
    def fork(self, owner):
        twin = super().fork(owner)
        twin.blocks = self.blocks
        return twin


class AdoptsWithAnotherCount(BlockTable):
    def adopt(self, blocks, num_tokens):
        super().adopt(blocks, num_tokens)
        self.allocator.incref(self.blocks, owner=self.owner)


class AdoptsOverWhatItHas(BlockTable):
    def adopt(self, blocks, num_tokens):
        self.blocks = []
        super().adopt(blocks, num_tokens)


class ReleasesTwice(BlockTable):
    def release(self):
        self.allocator.free(self.blocks[::-1], owner=self.owner)


class ReleasesAllButTheLast(BlockTable):
    def release(self):
        self.blocks = self.blocks[:-1]
        super().release()


class ReleasesTheHeadFirst(BlockTable):
    def release(self):
        self.blocks.reverse()
        super().release()


def every_sibling_copies(tables, n):
    return sum(blocks_needed([table], n) for table in tables)


def forgets_holders_outside_the_group(tables, n):
    tables = list(tables)
    partial = Counter(t.blocks[-1] for t in tables if n and t.num_tokens % t.allocator.block_size)
    held_outside = sum(tables[0].allocator.ref_cnt(block) > inside for block, inside in partial.items())
    return blocks_needed(tables, n) - held_outside


def names_the_block(paging):
    pool_checks.test_check_names_the_block_that_holders_and_counts_disagree_on([[1]], "block 2", paging)


def one_token_into_a_fork(paging):
    table_checks.test_append_one_is_append_of_one(6, 1, paging)


def frees_nothing_if_one_is_bad(paging):
    pool_checks.test_free_is_all_or_nothing([2, 0], paging)


A, T = pool_checks, table_checks
BROKEN_POOLS = [
    (HandsOutTheNullBlock, A.test_every_block_but_the_null_block_can_be_allocated),
    (LosesTheLastBlock, A.test_every_block_but_the_null_block_can_be_allocated),
    (AllocatesWhatThereIs, A.test_allocation_is_all_or_nothing),
    (AllocatesWhatThereIs, A.test_a_failed_allocation_evicts_nothing),
    (HandsOutDescendingIds, A.test_a_fresh_pool_hands_out_ascending_ids_in_one_call),
    (HandsOutTheColdestFirst, A.test_the_block_freed_last_is_the_warmest),
    (HandsOutFreshBlocksFirst, A.test_freed_blocks_come_before_fresh_ones),
    (HandsOutSharedBlocksFirst, A.test_blocks_freed_by_a_sole_owner_come_before_once_shared_ones),
    (HandsOutSharedBlocksFirst, A.test_fresh_blocks_come_before_once_shared_ones),
    (HandsOutTheNewestSharedBlock, A.test_once_shared_blocks_rest_the_longest_possible),
    (NeverForgetsSharing, A.test_sharing_is_forgotten_with_the_next_allocation),
    (FreesWithoutChecking, A.test_a_second_free_is_refused_and_names_block_and_owner),
    (FreesOneByOne, frees_nothing_if_one_is_bad),
    (FreesOneByOne, A.test_giving_back_two_counts_needs_two),
    (FreesATwiceNamedBlockOnce, A.test_a_block_named_twice_loses_two_counts),
    (FreesWhileOthersHold, A.test_a_shared_block_is_free_only_when_the_last_count_is_given_back),
    (IncrefRevivesAFreeBlock, A.test_a_free_block_cannot_be_shared),
    (IncrefLeavesTheBlockEvictable, A.test_incref_revives_a_cached_block),
    (EvictsAHeldBlock, A.test_a_held_block_is_never_evicted),
    (FindsEvictedBlocks, A.test_eviction_forgets_the_key),
    (TheSecondRegistrationWins, A.test_the_first_registration_of_a_key_wins),
    (ABlockTakesASecondKey, A.test_the_first_key_of_a_block_wins),
    (RegistersFreeBlocks, A.test_a_free_block_cannot_be_registered),
    (EvictsTheMostRecentlyUsed, A.test_the_least_recently_used_prefix_is_evicted_first),
    (CountsALookupAsAUse, A.test_a_lookup_alone_is_no_use),
    (ForgetsTheCacheWhenFreed, A.test_a_cached_block_is_free_and_still_found),
    (CountsHeldBlocksAsCached, A.test_cached_blocks_are_those_that_nobody_holds_but_a_key_leads_to),
    (ForgetsFreeBlocksOnly, A.test_after_forgetting_no_key_leads_anywhere_and_every_count_is_as_it_was),
    (ForgetsInTheReversedOrder, A.test_forgotten_blocks_are_free_as_if_they_had_never_been_cached),
    (CountsEveryShare, A.test_a_block_is_shared_while_it_is_held_more_than_once),
    (LosesSharesInARefusedFree, A.test_a_refused_free_leaves_the_shared_blocks_shared),
    (CountsCachedBlocksAsUsed, A.test_a_cached_block_is_free_and_still_found),
]
BROKEN_TABLES = [
    (KeepsTheCountOfACopiedBlock, T.test_the_first_write_into_a_shared_partial_block_copies_it),
    (WritesIntoASharedBlock, T.test_the_first_write_into_a_shared_partial_block_copies_it),
    (WritesOneTokenIntoASharedBlock, one_token_into_a_fork),
    (WritesIntoASharedBlock, T.test_a_pending_swap_out_is_a_holder_too),
    (TheLastHolderCopies, T.test_the_last_holder_of_a_once_shared_block_writes_in_place),
    (CopiesFullBlocks, T.test_a_full_block_is_never_copied),
    (AppendsTokenByToken, T.test_a_failed_append_changes_nothing),
    (ContinuesPastABlocksEnd, T.test_nine_tokens_in_blocks_7_1_9),
    (TakesABlockAhead, T.test_allocation_follows_the_write),
    (ForksWithoutCounting, T.test_a_fork_shares_every_block_and_takes_none),
    (ForksShareTheirList, T.test_the_first_write_into_a_shared_partial_block_copies_it),
    (AdoptsWithAnotherCount, T.test_adopt_takes_over_the_counts_of_a_prefix_hit),
    (AdoptsOverWhatItHas, T.test_only_an_empty_table_adopts),
    (ReleasesTwice, T.test_releasing_twice_changes_nothing),
    (ReleasesAllButTheLast, T.test_release_gives_every_block_back),
    (ReleasesTheHeadFirst, T.test_the_tail_of_a_released_sequence_is_evicted_before_its_head),
]
BROKEN_COUNTS = [
    (every_sibling_copies, T.test_siblings_need_one_copy_less_than_they_are),
    (forgets_holders_outside_the_group, T.test_all_siblings_copy_while_somebody_else_holds_their_block),
]
VARIANTS = [
    *((REAL._replace(BlockAllocator=pool), check) for pool, check in BROKEN_POOLS),
    *((REAL._replace(BlockTable=table), check) for table, check in BROKEN_TABLES),
    *((REAL._replace(blocks_needed=count), check) for count, check in BROKEN_COUNTS),
]


def name_of(paging):
    return next(broken.__name__ for broken, real in zip(paging, REAL, strict=True) if broken is not real)


def fails(check, *args):
    """Whether a check fails, be it by an assertion or by an error of the code under test."""
    try:
        check(*args)
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize(
    ("paging", "check"), VARIANTS, ids=[f"{name_of(paging)}-{check.__name__}" for paging, check in VARIANTS]
)
def test_the_named_check_fails(paging, check):
    assert not fails(check, REAL)
    assert fails(check, paging)


@pytest.mark.parametrize("paging", {name_of(p): p for p, _ in VARIANTS}.values(), ids=name_of)
def test_the_model_disagrees(paging):
    assert any(fails(run_program, program, paging) for program in PROGRAMS)


def test_the_model_agrees_with_the_real_classes():
    assert not any(fails(run_program, program, REAL) for program in PROGRAMS)


def test_an_integrity_check_that_finds_nothing_fails():
    paging = REAL._replace(BlockAllocator=ChecksNothing)
    with pytest.raises(pytest.fail.Exception, match=errors.AllocatorCorruption.__name__):
        names_the_block(paging)
