"""A simulated device memory and a ledger that says, in the plainest terms, what the allocator must do.

The ledger keeps no count and no free list: it answers every question by looking at all holders, so it shares
no bookkeeping with the code under test. `run_program` plays a program of random operations on both and then
compares everything: ids, counts, copies, slots, the cache, and every token read back through the tables.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from paged_jax import errors
from paged_jax.audit import AuditLog
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import Append, BlockTable, blocks_needed


class Paging(NamedTuple):
    """The classes under test, so that the same checks run on the real ones and on broken ones."""

    BlockAllocator: type
    BlockTable: type
    blocks_needed: Callable


REAL = Paging(BlockAllocator, BlockTable, blocks_needed)

BYTES_PER_OPERATION = 4
MAX_SEQUENCES = 6


class Hold:
    """A plain holder: ids and an owner. A parked one remembers the tokens of a swapped-out sequence."""

    def __init__(self, name, blocks, tokens=None):
        self.name, self.blocks, self.tokens = name, blocks, tokens


class Sequence:
    def __init__(self, name, table, tokens):
        self.name, self.table, self.tokens = name, table, tokens


class Ledger:
    """Who holds which blocks, and when each block was freed; the rest follows."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.held = {}  # holder's name -> its blocks, in order
        self.freed_at = {}  # block -> when its last holder let go of it
        self.shared = set()  # blocks held twice at some time since they were allocated
        self.key_of = {}
        self.clock = 0
        self.evictions = 0

    def counts(self):
        return Counter(chain.from_iterable(self.held.values()))

    def free_in_order(self):
        """The free blocks, the next one to be handed out first: the design's free order as a sort key."""

        def rank(block):
            if block in self.key_of:
                return 3, self.freed_at[block]
            if block in self.shared:
                return 2, self.freed_at[block]
            if block in self.freed_at:
                return 0, -self.freed_at[block]
            return 1, block

        counts = self.counts()
        return sorted((b for b in range(1, self.num_blocks) if not counts[b]), key=rank)

    def take(self, name, n):
        """The ids that allocate(n) must return, or None if it must fail."""
        free = self.free_in_order()
        if n > len(free):
            return None
        for block in free[:n]:
            self.evictions += self.key_of.pop(block, None) is not None
            self.shared.discard(block)
        self.held.setdefault(name, []).extend(free[:n])
        return free[:n]

    def share(self, name, blocks):
        self.held.setdefault(name, []).extend(blocks)
        counts = self.counts()
        self.shared.update(b for b in blocks if counts[b] > 1)

    def drop(self, name, blocks):
        for block in list(blocks):
            self.held[name].remove(block)
            if not self.counts()[block]:
                self.clock += 1
                self.freed_at[block] = self.clock

    def cached(self):
        """The free blocks that hold a prefix, the least recently used first."""
        counts = self.counts()
        return sorted((b for b in self.key_of if not counts[b]), key=self.freed_at.get)

    def forget_cached(self):
        for block in self.cached():
            self.clock += 1
            self.freed_at[block] = self.clock
        self.key_of.clear()

    def block_of(self, key):
        return next((block for block, k in self.key_of.items() if k == key), None)


class World:
    """The code under test, the ledger, and the memory that the ids stand for."""

    def __init__(self, paging, num_blocks, block_size, audit):
        self.paging, self.block_size, self.num_blocks = paging, block_size, num_blocks
        self.audit = AuditLog() if audit else None
        self.pool = paging.BlockAllocator(num_blocks, block_size, audit=self.audit)
        self.ledger = Ledger(num_blocks)
        self.memory = [None] * (num_blocks * block_size)
        self.sequences, self.holds, self.parked = [], [], []
        self.contents = {}  # every key ever registered -> the tokens of its block
        self.names = 0
        self.done = Counter()

    # -- operations: each takes three small numbers and does what it can with them -------------------------

    def new(self, x, y, z):
        """A prompt: adopt the blocks that the cache holds of it, then append the rest."""
        if len(self.sequences) == MAX_SEQUENCES:
            return self.release(x, y, z)
        size = self.block_size
        tokens = [(x + i * (y % 3)) % 3 for i in range(z % (3 * size + 2))]
        name, hits = self.name(), []
        while (len(hits) + 1) * size < len(tokens):
            block = self.pool.lookup(bytes(tokens[: (len(hits) + 1) * size]))
            if block is None:
                break
            hits.append(block)
        table = self.paging.BlockTable(self.pool, name)
        self.done["revived"] += sum(not self.pool.ref_cnt(block) for block in hits)
        self.pool.incref(hits, owner=name)
        self.ledger.share(name, hits)
        table.adopt(hits, len(hits) * size)
        self.done["hits"] += len(hits)
        sequence = Sequence(name, table, tokens[: len(hits) * size])
        self.sequences.append(sequence)
        self.step([(sequence, tokens[len(hits) * size :])])

    def append(self, x, y, z):
        """One token, or several, for one sequence."""
        if self.sequences:
            n = 1 if y % 4 else z % (3 * self.block_size)
            self.step([(self.pick(self.sequences, x), [(z + i) % 3 for i in range(n)])])

    def append_group(self, x, y, z):
        """The same number of tokens for several sequences in one step: blocks_needed must be exact."""
        group = [s for i, s in enumerate(self.sequences) if x >> i & 1]
        n = 1 + y % 2 * (z % (2 * self.block_size))
        free_before = self.pool.num_free_blocks
        needed = self.paging.blocks_needed([s.table for s in group], n)
        served = self.step([(s, [(z + i) % 3] * n) for i, s in enumerate(group)])
        assert served == (needed <= free_before)
        assert not served or free_before - self.pool.num_free_blocks == needed
        self.done["groups"] += len(group) > 1

    def fork(self, x, y, z):
        if self.sequences and len(self.sequences) < MAX_SEQUENCES:
            parent, name = self.pick(self.sequences, x), self.name()
            free_before = self.pool.num_free_blocks
            twin = parent.table.fork(name)
            assert self.pool.num_free_blocks == free_before
            self.ledger.share(name, self.ledger.held.get(parent.name, []))
            self.sequences.append(Sequence(name, twin, parent.tokens.copy()))
            self.done["forks"] += 1

    def release(self, x, y, z):
        """Release once or twice; the table is dropped, or stays for another life."""
        if self.sequences:
            sequence = self.pick(self.sequences, x)
            sequence.table.release()
            if y % 2:
                sequence.table.release()
            self.ledger.drop(sequence.name, self.ledger.held.get(sequence.name, [])[::-1])
            sequence.tokens.clear()
            if z % 4:
                self.sequences.remove(sequence)
            self.done["releases"] += 1

    def register(self, x, y, z):
        """Register the full blocks of a sequence, head first, each under the tokens up to its end."""
        if self.sequences:
            sequence, size = self.pick(self.sequences, x), self.block_size
            for i in range(len(sequence.tokens) // size):
                block, key = sequence.table.blocks[i], bytes(sequence.tokens[: (i + 1) * size])
                self.pool.register(block, key)
                if block not in self.ledger.key_of:
                    if self.ledger.block_of(key) is None:
                        self.ledger.key_of[block] = key
                        self.contents[key] = sequence.tokens[i * size : (i + 1) * size]
                        self.done["registered"] += 1
                    else:
                        self.done["registered second"] += 1
                if block in self.ledger.key_of and y % 2:
                    self.pool.register(block, b"a second key")
                    assert self.pool.lookup(b"a second key") is None

    def forget_cached(self, x, y, z):
        """Rarely, since it takes the cache from all that come after it; else one more token."""
        if x % 8:
            return self.append(x, 1, z)
        self.done["forgotten"] += bool(self.ledger.key_of)
        self.pool.forget_cached()
        self.ledger.forget_cached()

    def hold(self, x, y, z):
        """Take blocks without a table, often more than there are."""
        name, n = self.name(), x % 3 if y % 4 else x % (self.num_blocks + 2)
        expected = self.ledger.take(name, n)
        if expected is None:
            self.refused(errors.NoFreeBlocks, lambda: self.pool.allocate(n, owner=name))
            self.done["allocations refused"] += 1
        else:
            assert self.pool.allocate(n, owner=name) == expected
            self.holds.append(Hold(name, expected.copy()))

    def share_hold(self, x, y, z):
        if self.holds and len((hold := self.pick(self.holds, x)).blocks) < self.num_blocks:
            more = hold.blocks[y % 3 :]
            self.pool.incref(more, owner=hold.name)
            self.ledger.share(hold.name, more)
            hold.blocks += more

    def free_hold(self, x, y, z):
        """Give back some of the counts, in an odd order, a block perhaps twice."""
        if self.holds:
            hold = self.pick(self.holds, x)
            blocks = hold.blocks[:: -1 if y % 2 else 1][: 1 + z % 4]
            self.pool.free(blocks, owner=hold.name)
            self.ledger.drop(hold.name, blocks)
            for block in blocks:
                hold.blocks.remove(block)
            if not hold.blocks:
                self.holds.remove(hold)

    def swap_out(self, x, y, z):
        """A pending swap-out keeps the blocks for a while after the table has let go of them."""
        if self.sequences:
            sequence, name = self.pick(self.sequences, x), self.name()
            blocks = list(sequence.table.blocks)
            self.pool.incref(blocks, owner=name, reason="swap-out")
            self.ledger.share(name, blocks)
            sequence.table.release()
            self.ledger.drop(sequence.name, blocks[::-1])
            self.sequences.remove(sequence)
            self.parked.append(Hold(name, blocks, sequence.tokens))

    def swap_in(self, x, y, z):
        """The fetch has ended; bring the tokens back into other blocks, if there are any."""
        if self.parked and len(self.sequences) < MAX_SEQUENCES:
            parked = self.pick(self.parked, x)
            self.pool.free(parked.blocks, owner=parked.name)
            self.ledger.drop(parked.name, parked.blocks)
            parked.blocks = []
            n, name = -(-len(parked.tokens) // self.block_size), self.name()
            expected = self.ledger.take(name, n)
            if expected is None:
                return
            blocks = self.pool.allocate(n, owner=name)
            assert blocks == expected
            table = self.paging.BlockTable(self.pool, name)
            table.adopt(blocks, len(parked.tokens))
            for position, token in enumerate(parked.tokens):
                self.memory[self.slot(blocks, position)] = token
            self.parked.remove(parked)
            self.sequences.append(Sequence(name, table, parked.tokens))
            self.done["swaps in"] += 1

    def misuse(self, x, y, z):
        """What must be refused, and must change nothing."""
        pool, counts = self.pool, self.ledger.counts()
        free = [b for b in self.ledger.free_in_order() if b not in self.ledger.key_of]
        used = sorted(counts)
        good = used[:1]
        bad_id = (0, -1, self.num_blocks, True, 1.0, None)[z % 6]
        self.refused(errors.InvalidBlock, lambda: pool.free([*good, bad_id], owner="misuse"))
        self.refused(errors.InvalidBlock, lambda: pool.incref([*good, bad_id], owner="misuse"))
        if free:
            block = self.pick(free, x)
            self.refused(errors.DoubleFree, lambda: pool.free([*good, block], owner="misuse"))
            self.refused(errors.InvalidBlock, lambda: pool.incref([*good, block], owner="misuse"))
            self.refused(errors.InvalidBlock, lambda: pool.register(block, b"never"))
        if used:
            block = self.pick(used, y)
            once_too_often = [block] * (counts[block] + 1)
            self.refused(errors.DoubleFree, lambda: pool.free(once_too_often, owner="misuse"))
        for sequence in self.sequences:
            if sequence.tokens:
                self.refused(errors.InvalidArgument, lambda table=sequence.table: table.adopt([], 0))
        self.done["misuses"] += 1

    # -- one step of appends -------------------------------------------------------------------------------

    def step(self, work):
        """Append tokens to each sequence, then make all copies at once, then all writes. False if refused."""
        copies, writes = [], []
        for sequence, tokens in work:
            if not self.append_one(sequence, tokens, copies, writes):
                break
        else:
            sequence = None
        assert len({dst for _, dst in copies}) == len(copies)
        read = [(dst, self.content(src)) for src, dst in copies]
        for dst, cells in read:
            self.memory[dst * self.block_size : (dst + 1) * self.block_size] = cells
        for slot, token in writes:
            self.memory[slot] = token
        return sequence is None

    def append_one(self, sequence, tokens, copies, writes):
        size, table, name, n = self.block_size, sequence.table, sequence.name, len(tokens)
        length = len(sequence.tokens)
        blocks = self.ledger.held.setdefault(name, [])
        shared = n > 0 and length % size > 0 and self.ledger.counts()[blocks[-1]] > 1
        kept = length // size if shared else -(-length // size)
        cost = -(-(length + n) // size) - kept
        taken = self.ledger.take(name, cost)
        if taken is None:
            self.refused(errors.NoFreeBlocks, lambda: table.append(n))
            self.done["appends refused"] += 1
            return False
        if shared:
            old = blocks[kept]
            del blocks[-cost:]
            self.ledger.drop(name, [old])
            blocks.extend(taken)
        if tokens == [0]:
            copy = table.append_one()
            done = Append(taken, [copy] if copy else [], [self.slot(blocks, length)])
        else:
            done = table.append(n)
        assert done.new_blocks == taken
        assert done.copies == ([(old, taken[0])] if shared else [])
        assert list(done.slots) == [self.slot(blocks, position) for position in range(length, length + n)]
        assert len(done.slots) == n
        copies += done.copies
        writes += zip(done.slots, tokens, strict=True)
        sequence.tokens += tokens
        self.done["copies"] += shared
        return True

    # -- comparison ----------------------------------------------------------------------------------------

    def compare(self):
        """Everything that can be seen of the code under test, against the ledger and the memory."""
        pool, counts = self.pool, self.ledger.counts()
        pool.check([*(s.table for s in self.sequences), *self.holds, *self.parked])
        blocks = range(1, self.num_blocks)
        assert [pool.ref_cnt(block) for block in blocks] == [counts[block] for block in blocks]
        assert pool.num_free_blocks == self.num_blocks - 1 - len(counts)
        assert pool.num_shared_blocks == sum(count > 1 for count in counts.values())
        assert pool.num_cached_blocks == len(self.ledger.cached())
        for sequence in self.sequences:
            table, tokens = sequence.table, sequence.tokens
            assert list(table.blocks) == self.ledger.held.get(sequence.name, [])
            assert table.num_tokens == len(tokens)
            cells = chain.from_iterable(self.content(block) for block in table.blocks)
            assert list(cells)[: len(tokens)] == tokens
        block_of = {key: block for block, key in self.ledger.key_of.items()}
        for key, tokens in self.contents.items():
            block = pool.lookup(key)
            assert block == block_of.get(key)
            assert block is None or self.content(block) == tokens

    def compare_audit(self):
        """The records add up to the counts, one by one."""
        if self.audit is None:
            return
        counts, actions = Counter(), Counter()
        for record in self.audit:
            assert record.ref_cnt_before == counts[record.block]
            counts[record.block] = record.ref_cnt_after
            actions[record.action] += 1
        assert +counts == self.ledger.counts()
        assert actions["copy"] == self.done["copies"]
        assert actions["evict"] == self.ledger.evictions

    def refused(self, error, call):
        """The call raises this error and changes nothing that can be seen."""
        before = self.seen()
        try:
            call()
        except error:
            assert self.seen() == before
        else:
            raise AssertionError(f"expected {error.__name__}")

    def seen(self):
        pool = self.pool
        return (
            pool.num_free_blocks,
            pool.num_shared_blocks,
            pool.num_cached_blocks,
            [pool.ref_cnt(block) for block in range(1, self.num_blocks)],
            [(list(s.table.blocks), s.table.num_tokens) for s in self.sequences],
            [pool.lookup(key) for key in self.contents],
            self.audit is not None and sum(record.action != "refused" for record in self.audit),
        )

    # -- small things --------------------------------------------------------------------------------------

    def name(self):
        self.names += 1
        return self.names

    def pick(self, items, x):
        return items[x % len(items)]

    def slot(self, blocks, position):
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def content(self, block):
        return self.memory[block * self.block_size : (block + 1) * self.block_size]


OPERATIONS = [
    *[World.append] * 5,
    *[World.append_group] * 2,
    *[World.new] * 3,
    *[World.fork] * 3,
    World.release,
    *[World.register] * 4,
    World.forget_cached,
    World.hold,
    World.share_hold,
    *[World.free_hold] * 3,
    World.swap_out,
    *[World.swap_in] * 2,
    World.misuse,
]


def operations(program):
    """The operations of a program, 4 bytes each; a zero byte is no operation."""
    for at in range(BYTES_PER_OPERATION, len(program) - BYTES_PER_OPERATION + 1, BYTES_PER_OPERATION):
        code, *numbers = program[at : at + BYTES_PER_OPERATION]
        if code:
            yield OPERATIONS[code % len(OPERATIONS)], numbers


def world_of(program, paging):
    """The setting, which the first 4 bytes of a program choose."""
    sizes = (1, 2, 3, 4, 5, 8)
    return World(paging, 3 + program[0] % 40, sizes[program[1] % len(sizes)], audit=program[2] % 2)


def describe(program):
    """A program for readers: what a failure shows."""
    world = world_of(program, REAL)
    lines = [f"{operation.__name__}{tuple(numbers)}" for operation, numbers in operations(program)]
    return "\n".join([f"num_blocks={world.num_blocks} block_size={world.block_size}", *lines])


def run_program(program, paging=REAL):
    """Play a program; returns how often each thing happened.

    AssertionError, or what the code under test raises, at the first operation after which anything differs.
    """
    world = world_of(program, paging)
    for operation, numbers in operations(program):
        operation(world, *numbers)
        world.compare()
        world.done["operations"] += 1
    world.compare_audit()
    world.done["evictions"] += world.ledger.evictions
    return world.done
