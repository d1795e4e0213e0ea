"""Blocks found again by what they hold: requests that begin alike share the blocks of that beginning.

A full block is known by a chained hash: of its parent's key and its own token ids, the first one's parent
being the request's salt. Keys have 128 bits, so two different prefixes never meet in practice. The
allocator keeps the blocks: a cached one that nobody holds is the last to be handed out, and the least
recently used of them the first among those.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from paged_jax.block_allocator import BlockAllocator
from paged_jax.sequence import Sequence

KEY_BYTES = 16


def root_key(salt: str) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"prefix root").digest()


def block_key(parent: bytes, token_ids: list[int]) -> bytes:
    """The key of a full block with these tokens, after the block with the key `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Looks prefixes up and offers written blocks; counts what it was asked for and what it had, in tokens.

    chunk: for batch invariance. Hits are then a multiple of so many tokens, and only blocks that a prefill
    computed are offered, because a decode step rounds differently.
    """

    def __init__(self, allocator: BlockAllocator, *, chunk: int | None = None) -> None:
        self.allocator = allocator
        self.chunk = chunk
        self.queried_tokens = 0
        self.hit_tokens = 0

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest cached prefix of a sequence; nothing is counted or held yet.

        At most (num_tokens - 1) // block_size: the last token is always computed. Take the counts before
        anything is allocated.
        """
        size = self.allocator.block_size
        limit = (len(sequence.token_ids) - 1) // size
        blocks: list[int] = []
        for index in range(limit):
            block = self.allocator.lookup(self._key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        if self.chunk is not None:
            del blocks[len(blocks) * size // self.chunk * self.chunk // size :]
        return blocks

    def is_on_its_way(self, sequence: Sequence, index: int, others: Iterable[Sequence]) -> bool:
        """Whether one of the others, amid its prefill, is about to fill the same block as this at an index.

        Then a newcomer does better to wait for it than to compute it a second time.
        """
        size = self.allocator.block_size
        if index >= (len(sequence.token_ids) - 1) // size:
            return False
        key = self._key(sequence, index)
        return any(
            other.num_registered <= index < (len(other.token_ids) - 1) // size
            and self._key(other, index) == key
            for other in others
        )

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        """Hand blocks that `match` found to a sequence whose table is empty."""
        tokens = len(blocks) * self.allocator.block_size
        self.allocator.incref(blocks, owner=sequence.table.owner, reason="prefix hit")
        sequence.table.adopt(blocks, tokens)
        sequence.num_registered = len(blocks)
        self.queried_tokens += len(sequence.token_ids)
        self.hit_tokens += tokens

    def offer(self, sequence: Sequence) -> None:
        """Register the full blocks of a sequence that steps which have ended wrote."""
        tokens = sequence.table.num_tokens
        if self.chunk is not None:
            tokens = min(tokens, len(sequence.request.prompt_token_ids) - 1)
        full = tokens // self.allocator.block_size
        for index in range(sequence.num_registered, full):
            block, owner = sequence.table.blocks[index], sequence.table.owner
            self.allocator.register(block, self._key(sequence, index), owner=owner)
        sequence.num_registered = max(sequence.num_registered, full)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        keys, size = sequence.block_keys, self.allocator.block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else root_key(sequence.request.cache_salt)
            keys.append(block_key(parent, sequence.token_ids[start : start + size]))
        return keys[index]
