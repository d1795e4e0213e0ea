"""Which sequences run in the next step, and which blocks they get for it.

First come, first served. A prompt is computed before the running sequences go on decoding, in pieces when
it is longer than a step's budget. Blocks are taken when tokens are about to be written, never ahead. When
the pool cannot serve the next token of every running sequence, the one admitted last gives its blocks back
and waits, ahead of all others, to be computed again from its tokens.

That always ends: the sequence admitted first is never set back (the pool holds the longest sequence there
can be, so alone it always fits), and a newcomer is admitted only when, after its blocks, one more is left
for every running sequence, so each admission is followed by a token for everyone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import blocks_needed
from paged_jax.capacity import blocks_for_tokens, check_pool_holds
from paged_jax.sequence import Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part in a step: compute its next num_tokens tokens into these slots."""

    sequence: Sequence
    first_position: int
    num_tokens: int
    slots: Seq[int]

    @property
    def seq_len(self) -> int:
        """Tokens with a slot once the step is done."""
        return self.first_position + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one is sampled."""
        return self.seq_len == len(self.sequence.token_ids)


@dataclass(frozen=True)
class Schedule:
    """One step: whose tokens are computed, and which blocks are copied before anything is written."""

    phase: Literal["prefill", "decode"]
    entries: list[ScheduledSequence]
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the queue and the running sequences; takes blocks through their tables."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_seqs: int,
        max_model_len: int,
    ) -> None:
        check_pool_holds(allocator.num_blocks, allocator.block_size, max_model_len)
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_seqs = max_prefill_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence still wants tokens."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Take a request back wherever it stands; unknown or finished ids change nothing."""
        now = monotonic()
        for sequence in [*self.waiting, *self.running]:
            if sequence.request.request_id == request_id:
                sequence.finish("abort", now)
        self._drop_finished()

    def schedule(self) -> Schedule | None:
        """Settle who runs and give them blocks; None when nothing is left to do."""
        return self._schedule_prefill() or self._schedule_decode()

    def update(self, schedule: Schedule, tokens: Seq[int]) -> list[Sequence]:
        """Give each sequence the token that was sampled for it; returns those that got one."""
        now = monotonic()
        advanced = []
        for entry, token in zip(schedule.entries, tokens, strict=True):
            if entry.samples and not entry.sequence.is_finished:
                entry.sequence.append(token, now)
                advanced.append(entry.sequence)
        self._drop_finished()
        return advanced

    def set_back_all(self) -> None:
        """Have every running sequence computed again: after a failure nobody knows what its blocks hold."""
        while self.running:
            self._preempt(self.running.pop())

    def _schedule_prefill(self) -> Schedule | None:
        entries: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        budget = self.max_num_batched_tokens
        for sequence in self._prefilling():
            if budget == 0 or len(entries) == self.max_prefill_seqs:
                break
            num_tokens = min(sequence.num_uncomputed, budget)
            budget -= num_tokens
            entries.append(self._give_slots(sequence, num_tokens, copies))
        return Schedule("prefill", entries, copies) if entries else None

    def _prefilling(self) -> list[Sequence]:
        """Running sequences amid their prefill, then newcomers for as long as the pool takes them."""
        amid = [sequence for sequence in self.running if sequence.is_prefilling]
        promised = sum(self._missing_blocks(sequence) for sequence in amid)
        room = min(self.max_num_seqs - len(self.running), self.max_prefill_seqs - len(amid))
        while self.waiting and room > 0:
            newcomer = self.waiting[0]
            promised += self._missing_blocks(newcomer)
            spare = len(self.running) + 1 if self.running else 0
            if promised + spare > self.allocator.num_free_blocks:
                break
            self.running.append(self.waiting.popleft())
            amid.append(newcomer)
            room -= 1
        return amid

    def _missing_blocks(self, sequence: Sequence) -> int:
        return blocks_for_tokens(len(sequence.token_ids), self.allocator.block_size) - len(
            sequence.table.blocks
        )

    def _schedule_decode(self) -> Schedule | None:
        if not self.running:
            return None
        preempted = []
        while (
            blocks_needed([sequence.table for sequence in self.running], 1) > self.allocator.num_free_blocks
        ):
            preempted.append(self._preempt(self.running.pop()))
        copies: list[tuple[int, int]] = []
        entries = [self._give_slots(sequence, 1, copies) for sequence in self.running]
        return Schedule("decode", entries, copies, preempted)

    def _give_slots(
        self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]
    ) -> ScheduledSequence:
        first_position = sequence.table.num_tokens
        append = sequence.table.append(num_tokens)
        copies.extend(append.copies)
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.metrics.first_scheduled_time = monotonic()
        return ScheduledSequence(sequence, first_position, num_tokens, append.slots)

    def _preempt(self, sequence: Sequence) -> Sequence:
        sequence.table.release()
        sequence.request.metrics.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _drop_finished(self) -> None:
        self.running = [sequence for sequence in self.running if not sequence.is_finished]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_finished)
