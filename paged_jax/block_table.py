"""The block table of one sequence: which physical block holds each of its logical blocks.

This file turns tokens into blocks and decides when a shared block is copied. It takes and gives back counts
through the allocator's public methods only, and moves no data: `Append.copies` says what is to be copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, Self

from paged_jax.audit import AuditLog
from paged_jax.block_allocator import BlockAllocator
from paged_jax.errors import InvalidArgument, InvalidBlock

__all__ = ["Append", "BlockTable", "blocks_needed"]


class Append(NamedTuple):
    """What one append changed.

    `new_blocks`: every block it took from the pool, in table order (a copy's destination is the first).
    `copies`: (source, destination), at most one. A step's copies are simultaneous and precede its writes.
    `slots`: for each appended token, block_id * block_size + offset.
    """

    new_blocks: list[int]
    copies: list[tuple[int, int]]
    slots: Sequence[int]


class BlockTable:
    """The blocks of one sequence, in order; token i lies in `blocks[i // block_size]` at `i % block_size`.

    `blocks` and `num_tokens` are for reading; `append` (or `append_one`) is the only way to write. A full
    block is never written again. A partly filled last block is written in place by its only holder, and
    copied first (copy-on-write) while others hold it too. Every call is all or nothing. Not thread safe.
    """

    __slots__ = ("allocator", "blocks", "num_tokens", "owner")

    def __init__(self, allocator: BlockAllocator, owner: Hashable) -> None:
        self.allocator = allocator
        self.owner = owner
        self.blocks: list[int] = []
        self.num_tokens = 0

    def __repr__(self) -> str:
        return f"BlockTable(owner={self.owner!r}, num_tokens={self.num_tokens}, blocks={self.blocks})"

    def append(self, n: int) -> Append:
        """Give n more tokens a slot each. O(n).

        NoFreeBlocks if the pool cannot serve it; InvalidArgument unless n is an int of at least 0.
        """
        _check_count(n)
        pool, blocks, start = self.allocator, self.blocks, self.num_tokens
        room = len(blocks) * pool.block_size - start
        copy = room > 0 and n > 0 and pool.ref_cnt(blocks[-1]) > 1
        num_new = -((room - n) // pool.block_size) + copy
        new_blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        if num_new:
            new_blocks = pool.allocate(num_new, owner=self.owner, reason="append")
            if copy:
                copies.append(self._replace_last(new_blocks[0]))
            blocks.extend(new_blocks[copy:])
        if pool.audit is not None:
            self._tell("write", pool.audit, start, start + n)
        self.num_tokens = start + n
        return Append(new_blocks, copies, self._slots(start, n))

    def append_one(self) -> tuple[int, int] | None:
        """`append(1)`, where only the copy is asked for: (source, destination), or None. Cheaper."""
        pool = self.allocator
        if self.num_tokens % pool.block_size and pool.ref_cnt(self.blocks[-1]) == 1:
            if pool.audit is not None:
                self._tell("write", pool.audit, self.num_tokens, self.num_tokens + 1)
            self.num_tokens += 1
            return None
        copies = self.append(1).copies
        return copies[0] if copies else None

    def _replace_last(self, dst: int) -> tuple[int, int]:
        src = self.blocks[-1]
        audit = self.allocator.audit
        if audit is not None:
            count = self.allocator.ref_cnt(src)
            audit.record("copy", src, self.owner, count, count, f"to block {dst}", other=dst)
        self.allocator.free([src], owner=self.owner, reason="copy-on-write")
        self.blocks[-1] = dst
        return src, dst

    def _tell(self, action: Literal["write", "adopt"], audit: AuditLog, start: int, end: int) -> None:
        """Tokens start, start + 1, .. end - 1 get their slots, or have them already."""
        size = self.allocator.block_size
        while start < end:
            index, offset = divmod(start, size)
            block, stop = self.blocks[index], min(end - index * size, size)
            count = self.allocator.ref_cnt(block)
            audit.record(action, block, self.owner, count, count, start=offset, end=stop)
            start = index * size + stop

    def _slots(self, start: int, n: int) -> list[int]:
        size = self.allocator.block_size
        offset = start % size
        if n == 1:  # the hot path of decoding
            return [self.blocks[-1] * size + offset]
        slots: list[int] = []
        for block in self.blocks[start // size :]:
            slots.extend(range(block * size, (block + 1) * size))
        return slots[offset : offset + n]

    def adopt(self, blocks: Iterable[int], num_tokens: int) -> None:
        """Fill an empty table with blocks that already hold num_tokens tokens: a prefix hit, or a swap-in.

        The table takes over the counts that the caller has taken on them (by lookup and incref, or allocate):
        they do not change here, and from now on `release` gives them back. InvalidBlock for a block that
        nobody holds; InvalidArgument if the table is not empty, or the number of blocks does not fit.
        """
        _check_count(num_tokens, "num_tokens")
        if self.blocks:
            raise InvalidArgument(f"{self!r} is not empty: release it before it adopts other blocks.")
        blocks = list(blocks)
        expected = -(-num_tokens // self.allocator.block_size)
        if len(blocks) != expected:
            raise InvalidArgument(
                f"{len(blocks)} blocks for {num_tokens} tokens: expected {expected} at "
                f"block_size={self.allocator.block_size}. Adopt exactly the blocks that the tokens fill."
            )
        for block in blocks:
            if not self.allocator.ref_cnt(block):
                if self.allocator.audit is not None:
                    self.allocator.audit.record("refused", block, self.owner, 0, 0, "use after free")
                raise InvalidBlock(
                    f"block {block}: {self.owner!r} adopts it, but nobody holds it. "
                    "Incref or allocate it first."
                )
        self.blocks = blocks
        self.num_tokens = num_tokens
        if self.allocator.audit is not None:
            self._tell("adopt", self.allocator.audit, 0, num_tokens)

    def fork(self, owner: Hashable) -> Self:
        """A table with the same tokens over the same blocks: one more count each, no allocation, no copy."""
        twin = type(self)(self.allocator, owner)
        self.allocator.incref(self.blocks, owner=owner, reason="fork")
        twin.blocks = self.blocks.copy()
        twin.num_tokens = self.num_tokens
        return twin

    def release(self, reason: str = "release") -> None:
        """Give back every count, the tail's first. The table is then empty, and may be filled again.

        Calling it twice changes nothing: an empty table has nothing to give back. `reason`: for the log.
        """
        self.allocator.free(reversed(self.blocks), owner=self.owner, reason=reason)
        self.blocks = []  # not clear(): whoever still has the old list keeps what it saw
        self.num_tokens = 0

    def lose(self) -> None:
        """Empty the table and give nothing back: after `BlockAllocator.reset` there is nothing to give."""
        self.blocks = []
        self.num_tokens = 0


def blocks_needed(tables: Iterable[BlockTable], n: int) -> int:
    """How many blocks appending n tokens to each of these tables, in this order, takes from the pool.

    Exact for a group: of W tables that share a partly filled last block, W - 1 copy it and the last one
    writes in place, unless a holder outside the group remains; then all W copy. O(number of tables).
    """
    _check_count(n)
    if n == 0:
        return 0
    needed = 0
    counts: dict[int, int] = {}
    for table in tables:
        size = table.allocator.block_size
        room = len(table.blocks) * size - table.num_tokens
        needed += -((room - n) // size)
        if room:
            last = table.blocks[-1]
            count = counts.get(last) or table.allocator.ref_cnt(last)
            if count > 1:
                needed += 1
                count -= 1
            counts[last] = count
    return needed


def _check_count(n: int, name: str = "n") -> None:
    if type(n) is not int or n < 0:
        raise InvalidArgument.of(name, n, "an int of at least 0: a number of tokens")
