"""How a request gives its blocks back before it is done, and how it gets going again.

recompute: the blocks are freed, and the tokens prefilled again (what the prefix cache still has is not).
swap: the blocks are copied to host memory, each once however many sequences share it, and freed; later fresh
blocks are allocated and the bytes copied back. auto: a request of several sequences is swapped; one of a
single sequence too, where moving its blocks out and in takes less time than computing its tokens again by
the estimate below; whatever the swap space can not hold is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paged_jax.block_allocator import BlockAllocator
from paged_jax.schedule import Schedule
from paged_jax.sequence import Request, Sequence, SwappedBlocks

PreemptionMode = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True)
class PreemptionCosts:
    """Estimated seconds: to compute a token again, and to move a block once between device and host.

    of: 2 FLOPs a parameter and token, at nominal rates of the device.
    """

    compute_token: float
    move_block: float

    @classmethod
    def of(
        cls, *, num_parameters: int, block_bytes: int, flops_per_second: float, bytes_per_second: float
    ) -> PreemptionCosts:
        """From the sizes of a model and the nominal rates of a device and its link to the host."""
        return cls(2 * num_parameters / flops_per_second, block_bytes / bytes_per_second)


class SwapSpace:
    """The books of the host's block pool: which of its blocks are free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []
        self._next_fresh = 0

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `allocate` could give."""
        return len(self._free) + self.num_blocks - self._next_fresh

    def allocate(self, n: int) -> list[int]:
        """Take n blocks; the caller has seen that there are so many."""
        assert n <= self.num_free_blocks
        reused = [self._free.pop() for _ in range(min(n, len(self._free)))]
        start = self._next_fresh
        self._next_fresh += n - len(reused)
        return reused + list(range(start, self._next_fresh))

    def reset(self, held: set[int]) -> None:
        """All blocks free but those that are held, whatever was before."""
        self._next_fresh = max(held, default=-1) + 1
        self._free = [block for block in range(self._next_fresh) if block not in held]

    def free(self, blocks: list[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)


class Preemption:
    """Sets requests back and brings swapped ones home; the queue is the scheduler's."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        mode: PreemptionMode = "recompute",
        num_host_blocks: int = 0,
        costs: PreemptionCosts | None = None,
    ) -> None:
        self.allocator = allocator
        self.mode = mode
        self.space = SwapSpace(num_host_blocks)
        self.costs = costs or PreemptionCosts(compute_token=1.0, move_block=0.0)

    def set_back(self, request: Request, schedule: Schedule) -> None:
        """Free the blocks of a request, swapping them out first where that is the way."""
        if self._swaps(request):
            self._swap_out(request, schedule)
        self.drop_tables(request)

    def drop_tables(self, request: Request, *, lost: bool = False) -> None:
        """Give the blocks back; only who shared what with whom is remembered.

        lost: the allocator's books are to be reset, so nothing is given back.
        """
        _remember_sharing(request, self.allocator.block_size)
        reason = "preempt" if request.swapped is None else "swap-out"
        for sequence in request.sequences:
            if lost:
                sequence.table.lose()
            else:
                sequence.table.release(reason)
            sequence.num_registered = 0

    def reset_books(self, requests: Iterable[Request]) -> None:
        """All blocks free but what these requests have in the swap space, whatever was before."""
        self.allocator.reset()
        self.space.reset({b for r in requests if r.swapped is not None for b in r.swapped.host_blocks})

    def forget(self, request: Request) -> None:
        """Give back what a request has in the swap space."""
        if request.swapped is not None:
            self.space.free(request.swapped.host_blocks)
            request.swapped = None

    def swap_in(self, request: Request, schedule: Schedule) -> None:
        """Fresh blocks for a swapped request, its tables rebuilt over them, sharing as it was.

        Its bytes stay in the swap space until the step is done: `forget` gives them back.
        """
        assert request.swapped is not None
        block_of: dict[int, int] = {}
        for sequence, (host, tokens) in zip(request.sequences, request.swapped.tables, strict=True):
            owner, new = sequence.table.owner, [block for block in host if block not in block_of]
            again = [block_of[block] for block in host if block in block_of]
            fresh = self.allocator.allocate(len(new), owner=owner, reason="swap-in")
            self.allocator.incref(again, owner=owner, reason="swap-in")
            block_of.update(zip(new, fresh, strict=True))
            sequence.table.adopt([block_of[block] for block in host], tokens)
        if self.allocator.audit is not None:
            for source, block in block_of.items():
                count, reason = self.allocator.ref_cnt(block), f"from host block {source}"
                self.allocator.audit.record(
                    "swap-in", block, request.request_id, count, count, reason, other=source
                )
        schedule.swap_in.extend(block_of.items())
        schedule.resumed.append(request)

    def may_begin(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Whether a sequence may be computed now: one that shared blocks waits for them, then takes them."""
        if sequence.shared_with is None or sequence.table.blocks:
            return True
        place, tokens = sequence.shared_with
        leader = sequence.request.sequences[place]
        if leader.is_finished:
            sequence.shared_with = None
            return True
        if leader.table.num_tokens < tokens or any(chunk.sequence is leader for chunk in schedule.prefill):
            return False
        blocks = leader.table.blocks[: tokens // self.allocator.block_size]
        self.allocator.incref(blocks, owner=sequence.table.owner, reason="shared again")
        sequence.table.adopt(blocks, tokens)
        return True

    def _swaps(self, request: Request) -> bool:
        blocks = {block for sequence in request.sequences for block in sequence.table.blocks}
        if self.mode == "recompute" or not blocks or len(blocks) > self.space.num_free_blocks:
            return False
        alive = [sequence for sequence in request.sequences if not sequence.is_finished]
        if self.mode == "swap" or len(alive) > 1:
            return True
        tokens = alive[0].table.num_tokens
        return 2 * len(blocks) * self.costs.move_block < tokens * self.costs.compute_token

    def _swap_out(self, request: Request, schedule: Schedule) -> None:
        blocks = list(
            dict.fromkeys(block for sequence in request.sequences for block in sequence.table.blocks)
        )
        host_of = dict(zip(blocks, self.space.allocate(len(blocks)), strict=True))
        request.swapped = SwappedBlocks(
            [
                ([host_of[block] for block in sequence.table.blocks], sequence.table.num_tokens)
                for sequence in request.sequences
            ]
        )
        if self.allocator.audit is not None:
            for block, host in host_of.items():
                count = self.allocator.ref_cnt(block)
                self.allocator.audit.record(
                    "swap-out", block, request.request_id, count, count, f"to host block {host}", other=host
                )
        schedule.swap_out.extend(host_of.items())


def add_copies(copies: list[tuple[int, int]], schedule: Schedule) -> None:
    """Take up copies (source, destination) of a step.

    They are made before its swap-ins: what comes back in this step and is to be copied comes back twice.
    """
    host_of = {block: host for host, block in schedule.swap_in}
    for source, destination in copies:
        if source in host_of:
            schedule.swap_in.append((host_of[source], destination))
        else:
            schedule.copies.append((source, destination))


def _remember_sharing(request: Request, block_size: int) -> None:
    """Note for each sequence which earlier sibling it shares most full blocks with, to rebuild that."""
    for place, sequence in enumerate(request.sequences):
        if not sequence.table.blocks:
            continue  # it had not begun again: what is remembered still holds
        sequence.shared_with = None
        best = 0
        for other in range(place):
            leader = request.sequences[other]
            common = 0
            for mine, its in zip(sequence.table.blocks, leader.table.blocks, strict=False):
                if mine != its:
                    break
                common += 1
            # A prefill leaves out the last token, whose slot a step that failed may have taken already.
            prefilled = min(len(sequence.token_ids), len(leader.token_ids), sequence.table.num_tokens + 1) - 1
            tokens = min(common, prefilled // block_size) * block_size
            if tokens > best and not leader.is_finished:
                best = tokens
                sequence.shared_with = (other, tokens)
