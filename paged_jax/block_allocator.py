"""The block allocator: which blocks are free, how often the others are held, and which hold a cached prefix.

Only this file changes a reference count. It knows nothing of tokens and tables (that is block_table), and
never touches the memory that the ids stand for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn, Protocol

from paged_jax.audit import AuditLog, key_name
from paged_jax.errors import AllocatorCorruption, DoubleFree, InvalidArgument, InvalidBlock, NoFreeBlocks

__all__ = ["BlockAllocator", "Holder"]


class Holder(Protocol):
    """Whatever holds counts on blocks: a BlockTable, or a pending swap-out."""

    @property
    def blocks(self) -> Sequence[int]:
        """The held blocks; an id that occurs twice is held twice."""


class BlockAllocator:
    """A ledger over the blocks 1..num_blocks-1; block 0 is the null block, which nobody ever owns.

    A block is in exactly one state: in use (ref_cnt >= 1), or free. `allocate` hands out free blocks in this
    order, so that what is handed out was used last (warm), and what may still be of use goes last:

    1. blocks freed by a sole owner, the newest first;
    2. blocks never handed out so far, ascending;
    3. blocks that were shared at some time since they were allocated, the oldest first;
    4. blocks that hold a cached prefix, the least recently used first. Handing one out evicts it: its key is
       forgotten. A use is a count: a block's place is set when its last holder frees it, in the order inside
       the call too, so tail-first frees keep a sequence's head longer than its tail. A `lookup` alone moves
       nothing.

    Every call is all or nothing: one that raises has changed nothing. Each costs O(1) a block, whatever the
    size of the pool; only `check` looks at all of it. `owner` is an opaque hashable label and `reason` a word
    for the audit log; nothing depends on them. Not thread safe: one thread, or one lock around all calls.
    """

    # Lists, not arrays: a count in a list was measured at 29 ns against 79 ns, for 8 bytes a block and not 4.
    # The blocks never handed out need no list: they are the ids from _next_fresh on.
    __slots__ = (
        "_block_of_key",
        "_ever_shared",
        "_free_cached",
        "_free_exclusive",
        "_free_shared",
        "_key_of_block",
        "_next_fresh",
        "_ref_cnt",
        "audit",
        "block_size",
        "num_blocks",
        "num_shared_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, *, audit: AuditLog | None = None) -> None:
        """`num_blocks` counts the null block; `block_size` is in tokens. InvalidArgument if out of range."""
        if type(num_blocks) is not int or num_blocks < 2:
            hint = "Block 0 is the null block, so a pool of n usable blocks needs num_blocks=n + 1."
            raise InvalidArgument.of("num_blocks", num_blocks, "an int of at least 2", hint)
        if type(block_size) is not int or block_size < 1:
            hint = "It is the number of tokens in a block; 16 is usual."
            raise InvalidArgument.of("block_size", block_size, "an int of at least 1", hint)
        if audit is not None and not callable(getattr(audit, "record", None)):
            raise InvalidArgument.of("audit", audit, "None or an AuditLog")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.audit = audit
        if audit is not None:
            audit.begin(num_blocks, block_size)
        self._ref_cnt: list[int] = []
        self.reset()

    # -- counts --------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `allocate` could hand out now, cached ones that it would evict included."""
        return (
            len(self._free_exclusive)
            + (self.num_blocks - self._next_fresh)
            + len(self._free_shared)
            + len(self._free_cached)
        )

    @property
    def num_cached_blocks(self) -> int:
        """How many free blocks hold a cached prefix; `allocate` evicts them last."""
        return len(self._free_cached)

    def ref_cnt(self, block: int) -> int:
        """How often a block is held; 0 if it is free. InvalidBlock if there is no such block."""
        if type(block) is not int or not 0 < block < self.num_blocks:
            self._reject(block)
        return self._ref_cnt[block]

    def allocate(self, n: int = 1, *, owner: Hashable, reason: str = "") -> list[int]:
        """Take n free blocks, each with ref_cnt 1. NoFreeBlocks if there are fewer."""
        if type(n) is not int or n < 0:
            raise InvalidArgument.of("n", n, "an int of at least 0: how many blocks to allocate")
        if n > self.num_free_blocks:
            raise NoFreeBlocks(
                f"{owner!r} asks for blocks: {n} wanted, {self.num_free_blocks} of "
                f"{self.num_blocks - 1} free. "
                "Release or preempt a sequence and try again, or make the pool larger (num_blocks)."
            )
        blocks = [self._take(owner) for _ in range(n)]
        if self.audit is not None:
            for block in blocks:
                self.audit.record("allocate", block, owner, 0, 1, reason)
        return blocks

    def _take(self, owner: Hashable) -> int:
        if self._free_exclusive:
            block = self._free_exclusive.pop()
        elif self._next_fresh < self.num_blocks:
            block = self._next_fresh
            self._next_fresh += 1
        elif self._free_shared:
            block = self._free_shared.popleft()
        else:
            block, _ = self._free_cached.popitem(last=False)
            key = self._key_of_block.pop(block)
            del self._block_of_key[key]
            if self.audit is not None:
                self.audit.record("evict", block, owner, 0, 0, key_name(key))
        self._ref_cnt[block] = 1
        self._ever_shared[block] = False
        return block

    def incref(self, blocks: Iterable[int], *, owner: Hashable, reason: str = "") -> None:
        """Take one more count for each occurrence.

        A cached block whose ref_cnt is 0 is in use again, with its content. InvalidBlock for a free one that
        caches nothing. The audit log calls it a `hit` where a registered one is shared for that alone.
        """
        blocks = list(blocks)
        counts = self._ref_cnt
        for block in blocks:
            if type(block) is not int or not 0 < block < self.num_blocks:
                self._reject(block)
            if not counts[block] and block not in self._key_of_block:
                if self.audit is not None:
                    self.audit.record("refused", block, owner, 0, 0, "use after free")
                raise InvalidBlock(
                    f"block {block}: {owner!r} wants a count on it, but it is free and caches nothing. "
                    "Only a block in use, or one that lookup has just returned, can be shared."
                )
        for block in blocks:
            if counts[block]:
                self._ever_shared[block] = True
                self.num_shared_blocks += counts[block] == 1
            else:
                del self._free_cached[block]
            counts[block] += 1
        if self.audit is not None:
            self.audit.taken(blocks, counts, owner, reason, self._key_of_block)

    def free(self, blocks: Iterable[int], *, owner: Hashable, reason: str = "") -> None:
        """Give back one count for each occurrence; a block whose last count this was becomes free.

        DoubleFree if more counts of a block are given back than are held, InvalidBlock for an unknown id.
        """
        blocks = list(blocks)
        counts = self._ref_cnt
        emptied = []
        for position, block in enumerate(blocks):
            if type(block) is not int or not 0 < block < self.num_blocks or not counts[block]:
                for undone in blocks[:position]:
                    counts[undone] += 1
                    self.num_shared_blocks += counts[undone] == 2
                self._refuse_free(block, blocks, owner)
            counts[block] -= 1
            if not counts[block]:
                emptied.append(block)
            elif counts[block] == 1:
                self.num_shared_blocks -= 1
        for block in emptied:
            if block in self._key_of_block:
                self._free_cached[block] = None
            elif self._ever_shared[block]:
                self._free_shared.append(block)
            else:
                self._free_exclusive.append(block)
        if self.audit is not None:
            self.audit.given_back(blocks, counts, owner, reason)

    # -- prefix cache --------------------------------------------------------------------------------------

    def register(self, block: int, key: Hashable, *, owner: Hashable = None) -> None:
        """Let `lookup(key)` find this block, from now until it is evicted.

        The block must be in use, full, and written by a step that has ended. The first registration wins: a
        key that already leads to a block, and a block that already has a key, keep what they have.
        """
        if not self.ref_cnt(block):
            raise InvalidBlock(
                f"block {block}: it is free, so its content belongs to nobody. "
                f"Register a block while a sequence holds it (key {key!r})."
            )
        if key not in self._block_of_key and block not in self._key_of_block:
            self._block_of_key[key] = block
            self._key_of_block[block] = key
            if self.audit is not None:
                count = self._ref_cnt[block]
                self.audit.record("register", block, owner, count, count, key_name(key))

    def lookup(self, key: Hashable) -> int | None:
        """The block registered under a key, or None.

        Its ref_cnt may be 0: take a count with `incref` before the next `allocate`, which could evict it.
        """
        return self._block_of_key.get(key)

    def forget_cached(self) -> None:
        """Forget every key, as when the content of blocks may be lost; counts stay as they are."""
        for block in self._free_cached:
            (self._free_shared if self._ever_shared[block] else self._free_exclusive).append(block)
        self._free_cached.clear()
        self._key_of_block.clear()
        self._block_of_key.clear()
        if self.audit is not None:
            self.audit.record("forget", 0, None, 0, 0)

    def reset(self) -> None:
        """Every block free and no key known, whatever was before: nobody may hold a count any longer."""
        if self.audit is not None:
            self.audit.reset(self._ref_cnt)
        self._ref_cnt = [0] * self.num_blocks
        self.num_shared_blocks = 0  # held more than once
        self._ever_shared = bytearray(self.num_blocks)
        self._free_exclusive: list[int] = []
        self._next_fresh = 1
        self._free_shared: deque[int] = deque()
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._key_of_block: dict[int, Hashable] = {}
        self._block_of_key: dict[Hashable, int] = {}

    # -- errors --------------------------------------------------------------------------------------------

    def _reject(self, block: object) -> NoReturn:
        if type(block) is not int:
            raise InvalidBlock(
                f"block {block!r}: expected an int, not {type(block).__name__}. Use int(block)."
            )
        what = "the null block, which pads tables and is never owned" if block == 0 else "not in this pool"
        raise InvalidBlock(f"block {block}: {what}. Ids from 1 to {self.num_blocks - 1} are valid.")

    def _refuse_free(self, block: int, blocks: list[int], owner: Hashable) -> NoReturn:
        held = self.ref_cnt(block)
        if self.audit is not None:
            self.audit.record("refused", block, owner, held, held, "double free")
        raise DoubleFree(
            f"block {block}: {owner!r} gives back more counts than are held: "
            f"{blocks.count(block)} given back, {held} held. "
            "Each allocate, incref or fork is given back once; the audit log shows who did it before."
        )

    # -- integrity -----------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Holder]) -> None:
        """AllocatorCorruption unless every ref_cnt equals the block's occurrences over all `.blocks` of the
        holders, every block is in exactly one state, and keys and blocks lead to each other. O(num_blocks).
        """
        held = Counter(block for holder in holders for block in holder.blocks)
        for block in held:
            if type(block) is not int or not 0 < block < self.num_blocks:
                _corrupt(block, "a holder has it, but no such block can be held")
        state = self._free_states()
        for block, count in enumerate(self._ref_cnt):
            if count != held.get(block, 0):
                _corrupt(
                    block, f"ref_cnt is {count}, but it occurs {held.get(block, 0)} times over all holders"
                )
            if count > 0 and block in state:
                _corrupt(block, f"ref_cnt is {count}, but it is listed as {state[block]}")
            if count == 0 and block not in state and block != 0:
                _corrupt(block, "ref_cnt is 0, but no free list has it")
            if count > 1 and not self._ever_shared[block]:
                _corrupt(block, f"ref_cnt is {count}, but it is not marked as shared")
        if (shared := sum(count > 1 for count in self._ref_cnt)) != self.num_shared_blocks:
            raise AllocatorCorruption(f"{shared} blocks are shared; {self.num_shared_blocks} are counted.")
        for block, name in state.items():
            if (name == "free (cached)") != (block in self._key_of_block):
                _corrupt(block, f"it is listed as {name}, but its key is {self._key_of_block.get(block)!r}")
        for block, key in self._key_of_block.items():
            if self._block_of_key.get(key) != block:
                _corrupt(block, f"its key {key!r} leads to block {self._block_of_key.get(key)}")
        for key, block in self._block_of_key.items():
            if block not in self._key_of_block:
                _corrupt(block, f"the key {key!r} leads to it, but it has no key")

    def _free_states(self) -> dict[int, str]:
        """Every free block's one state, by name."""
        lists: tuple[tuple[str, Iterable[int]], ...] = (
            ("free (exclusive)", self._free_exclusive),
            ("free (never used)", range(self._next_fresh, self.num_blocks)),
            ("free (once shared)", self._free_shared),
            ("free (cached)", self._free_cached),
        )
        state: dict[int, str] = {}
        for name, blocks in lists:
            for block in blocks:
                if not 0 < block < self.num_blocks:
                    _corrupt(block, f"it is listed as {name}, but no such block can be handed out")
                if block in state:
                    _corrupt(block, f"it is listed as {state[block]} and as {name}")
                state[block] = name
        return state


def _corrupt(block: int, what: str) -> NoReturn:
    raise AllocatorCorruption(f"block {block!r}: {what}. This is a bug; the audit log shows its history.")
