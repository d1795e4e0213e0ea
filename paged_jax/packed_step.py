"""A schedule as calls of programs, each with the fresh array that it takes from the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from paged_jax.batch import pack_decode, pack_prefill, variant_of
from paged_jax.buckets import Buckets, ProgramKey
from paged_jax.host_pool import HostPool, pack_ids
from paged_jax.logprobs import want_logprobs
from paged_jax.rows import pack_rows
from paged_jax.schedule import Schedule

_T = TypeVar("_T")


class Call(NamedTuple):
    """One call of a program, and the array that it takes from the host."""

    key: ProgramKey
    packed: np.ndarray


class PackedStep(NamedTuple):
    """The calls that a schedule comes to, in their order on the device.

    swap_in: with the staged blocks that each call writes. wants_logprobs, has_beams: whether any sequence
    does, and is one.
    """

    swap_out: list[Call]
    copies: list[Call]
    swap_in: list[tuple[Call, np.ndarray]]
    place: list[Call]
    prefill: list[Call]
    decode: Call | None
    wants_logprobs: bool
    has_beams: bool


class Packer:
    """Packs steps for one runner. num_blocks: of the pools; swap_blocks: that one call swaps."""

    def __init__(
        self, buckets: Buckets, *, num_blocks: int, swap_blocks: int, host_pool: HostPool | None
    ) -> None:
        self.buckets = buckets
        self.num_blocks = num_blocks
        self.swap_blocks = swap_blocks
        self.host_pool = host_pool

    def pack(self, schedule: Schedule) -> PackedStep:
        """Everything of a step that crosses to the device. Reads the swap space, changes nothing."""
        return PackedStep(
            swap_out=list(self._swap_out(schedule.swap_out)),
            copies=list(self._copies(schedule.copies)),
            swap_in=list(self._swap_in(schedule.swap_in)),
            place=list(self._place(schedule)),
            prefill=list(self._prefill(schedule)),
            decode=self._decode(schedule),
            wants_logprobs=want_logprobs(schedule.decode),
            has_beams=any(sequence.request.beams is not None for sequence in schedule.decode),
        )

    def _decode(self, schedule: Schedule) -> Call | None:
        if not schedule.decode:
            return None
        buckets = self.buckets
        variant = "full" if len(buckets.variants) == 1 else variant_of(schedule.decode)
        size = buckets.decode_size(len(schedule.decode))
        packed = pack_decode(schedule.decode, size=size, num_rows=buckets.max_num_seqs)
        return Call(ProgramKey("decode", size, variant), packed)

    def _prefill(self, schedule: Schedule) -> Iterator[Call]:
        buckets = self.buckets
        for chunks in buckets.prefill_calls(schedule.prefill):
            size = buckets.prefill_size(sum(chunk.num_tokens for chunk in chunks))
            packed = pack_prefill(
                chunks, size=size, num_seqs=buckets.prefill_seqs, num_rows=buckets.max_num_seqs
            )
            yield Call(ProgramKey("prefill", size), packed)

    def _place(self, schedule: Schedule) -> Iterator[Call]:
        size, num_rows, max_blocks = (
            self.buckets.placed_rows,
            self.buckets.max_num_seqs,
            self.buckets.max_blocks,
        )
        for some in batches(schedule.placed, size):
            packed = pack_rows(some, size=size, num_rows=num_rows, max_blocks=max_blocks)
            yield Call(ProgramKey("place", size), packed)

    def _copies(self, copies: Sequence[tuple[int, int]]) -> Iterator[Call]:
        """All sources of a step differ from all destinations, so one call after the other is as good as one.

        Padding copies the null block to places past the pool's end, each its own: nowhere.
        """
        size = self.buckets.copy_pairs
        for some in batches(copies, size):
            pairs = np.zeros((2, size), np.int32)
            pairs[1] = self.num_blocks + np.arange(size)
            pairs[:, : len(some)] = np.array(some, np.int32).T
            yield Call(ProgramKey("copy", size), pairs)

    def _swap_out(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Call]:
        for some in batches(pairs, self.swap_blocks):
            yield self._swap("swap_out", [block for block, _ in some])

    def _swap_in(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[Call, np.ndarray]]:
        for some in batches(pairs, self.swap_blocks):
            assert self.host_pool is not None, "allocated without a swap space"
            staged = self.host_pool.read([host for host, _ in some], self.swap_blocks)
            yield self._swap("swap_in", [block for _, block in some]), staged

    def _swap(self, kind: Literal["swap_out", "swap_in"], blocks: list[int]) -> Call:
        ids = pack_ids(blocks, size=self.swap_blocks, num_blocks=self.num_blocks)
        return Call(ProgramKey(kind, self.swap_blocks), ids)


def batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items in order, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))
