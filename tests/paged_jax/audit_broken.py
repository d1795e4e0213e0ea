"""Allocators and tables that do one wrong thing once, when a certain request gives them the occasion."""

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable

CULPRITS = tuple(f"r{number}" for number in range(0, 40, 3))
did = []
"""(owner, block) of each fault that was made."""


def is_culprit(owner):
    return str(owner).split("/")[0] in CULPRITS and not did


# -- tables ------------------------------------------------------------------------------------------------


class KeepsItsLastBlock(BlockTable):
    def release(self, reason="release"):
        if self.blocks and reason in ("finish", "abort", "beam dropped") and is_culprit(self.owner):
            did.append((self.owner, self.blocks.pop()))
        super().release(reason)


class ForgetsToRelease(BlockTable):
    def release(self, reason="release"):
        if self.blocks and is_culprit(self.owner):
            did.append((self.owner, self.blocks[0]))
            self.lose()
        super().release(reason)


class KeepsTheCountOfACopiedBlock(BlockTable):
    def _replace_last(self, dst):
        if not is_culprit(self.owner):
            return super()._replace_last(dst)
        src, self.blocks[-1] = self.blocks[-1], dst
        did.append((self.owner, src))
        return src, dst


class ReleasesASharedBlockTwice(BlockTable):
    def release(self, reason="release"):
        again = [block for block in self.blocks if self.allocator.ref_cnt(block) > 1]
        super().release(reason)
        if again and is_culprit(self.owner):
            did.append((self.owner, again[0]))
            self.allocator.free(again[:1], owner=self.owner, reason=reason)


class ReleasesABlockOfItsOwnTwice(BlockTable):
    def release(self, reason="release"):
        blocks = [block for block in self.blocks if self.allocator.ref_cnt(block) == 1]
        super().release(reason)
        if blocks and is_culprit(self.owner):
            did.append((self.owner, blocks[0]))
            self.allocator.free(blocks[:1], owner=self.owner, reason=reason)


class WritesOnAfterItGaveItsLastBlockBack(BlockTable):
    def append_one(self):
        if self.num_tokens % self.allocator.block_size and is_culprit(self.owner):
            did.append((self.owner, self.blocks[-1]))
            self.allocator.free([self.blocks[-1]], owner=self.owner, reason="by mistake")
            self._tell("write", self.allocator.audit, self.num_tokens, self.num_tokens + 1)
        return super().append_one()


class LyingPool:
    """A pool that reports another ref_cnt than it has."""

    def __init__(self, pool, count):
        self.pool, self.count = pool, count

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def ref_cnt(self, block):
        return self.count


def with_count(table, count, call):
    pool, table.allocator = table.allocator, LyingPool(table.allocator, count)
    try:
        return call()
    finally:
        table.allocator = pool


class WritesIntoASharedBlock(BlockTable):
    def append_one(self):
        partial = self.num_tokens % self.allocator.block_size
        if partial and self.allocator.ref_cnt(self.blocks[-1]) > 1 and is_culprit(self.owner):
            did.append((self.owner, self.blocks[-1]))
            return with_count(self, 1, super().append_one)
        return super().append_one()


class WritesAndTellsNobody(BlockTable):
    def append_one(self):
        if self.num_tokens % self.allocator.block_size and self.owner in (CULPRITS if not did else did[0]):
            did.append((self.owner, self.blocks[-1]))
            self.num_tokens += 1
            return None
        return super().append_one()


class TheLastHolderCopies(BlockTable):
    def append_one(self):
        partial = self.num_tokens % self.allocator.block_size
        if partial and self.allocator.ref_cnt(self.blocks[-1]) == 1 and is_culprit(self.owner):
            did.append((self.owner, self.blocks[-1]))
            return with_count(self, 2, super().append_one)
        return super().append_one()


class CopiesFullBlocks(BlockTable):
    def append(self, n):
        full = n and self.blocks and self.num_tokens % self.allocator.block_size == 0
        if full and self.allocator.ref_cnt(self.blocks[-1]) > 1 and is_culprit(self.owner):
            did.append((self.owner, self.blocks[-1]))
            self._replace_last(self.allocator.allocate(owner=self.owner)[0])
        return super().append(n)


class WritesItsLastTokenAgain(BlockTable):
    def append(self, n):
        full = self.blocks and self.num_tokens % self.allocator.block_size == 0
        if full and self.allocator.ref_cnt(self.blocks[-1]) == 1 and is_culprit(self.owner):
            did.append((self.owner, self.blocks[-1]))
            self.num_tokens -= 1
        return super().append(n)


BROKEN_TABLES = [
    (KeepsItsLastBlock, "leak"),
    (ForgetsToRelease, "leak"),
    (KeepsTheCountOfACopiedBlock, "leak"),
    (ReleasesASharedBlockTwice, "double free"),
    (ReleasesABlockOfItsOwnTwice, "double free"),
    (WritesOnAfterItGaveItsLastBlockBack, "use after free"),
    (WritesIntoASharedBlock, "write into a shared block"),
    (TheLastHolderCopies, "copy without need"),
    (CopiesFullBlocks, "copy without need"),
    (WritesItsLastTokenAgain, "write into a full block"),
]


# -- allocators --------------------------------------------------------------------------------------------


class FreesWithoutChecking(BlockAllocator):
    """Somebody gives a block back twice, and nobody minds."""

    __slots__ = ()

    def free(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        super().free(blocks, owner=owner, reason=reason)
        if blocks and not self.ref_cnt(blocks[0]) and is_culprit(owner):
            did.append((owner, blocks[0]))
            self.audit.record("free", blocks[0], owner, 1, 0, reason)


class FreesWhileOthersHold(BlockAllocator):
    __slots__ = ()

    def free(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        super().free(blocks, owner=owner, reason=reason)
        held = [block for block in blocks if self.ref_cnt(block)]
        if held and is_culprit(owner):
            did.append((owner, held[0]))
            super().free(held[:1] * self.ref_cnt(held[0]), owner=owner, reason=reason)


class CountsAForkTwice(BlockAllocator):
    __slots__ = ()

    def incref(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        super().incref(blocks, owner=owner, reason=reason)
        if blocks and is_culprit(owner):
            did.append((owner, blocks[-1]))
            self._ref_cnt[blocks[-1]] += 1


class HandsOutAHeldBlock(BlockAllocator):
    __slots__ = ()

    def allocate(self, n=1, *, owner, reason=""):
        held = [block for block in range(1, self.num_blocks) if self.ref_cnt(block) == 1]
        if n and held and reason == "append" and is_culprit(owner):
            did.append((owner, held[0]))
            self.audit.record("allocate", held[0], owner, 0, 1, reason)
            return [held[0], *super().allocate(n - 1, owner=owner, reason=reason)]
        return super().allocate(n, owner=owner, reason=reason)


class FindsEvictedBlocks(BlockAllocator):
    __slots__ = ()
    memory = {}  # noqa: RUF012

    def register(self, block, key, *, owner=None):
        super().register(block, key, owner=owner)
        self.memory.setdefault(key, block)

    def lookup(self, key):
        found = super().lookup(key)
        old = self.memory.get(key)
        return old if found is None and old is not None and self.ref_cnt(old) and not did else found

    def incref(self, blocks, *, owner, reason=""):
        blocks = list(blocks)
        stale = [block for block in blocks if block not in self._key_of_block]
        if reason == "prefix hit" and stale and not did:
            did.append((owner, stale[0]))
        super().incref(blocks, owner=owner, reason=reason)


BROKEN_POOLS = [
    (FreesWithoutChecking, "double free"),
    (FreesWhileOthersHold, "double free"),
    (CountsAForkTwice, "ref_cnt disagrees"),
    (HandsOutAHeldBlock, "handed out twice"),
    (FindsEvictedBlocks, "use after free"),
]
