"""Which sequences run in the next step, and which blocks they get for it.

Requests go in order of priority, then of arrival. A step lets every sequence that is computed decode one
token, spends what is left of its token budget on prompts, in pieces where they are long, and then admits
newcomers. Blocks are taken when tokens are about to be written, never ahead. When the pool cannot serve the
next token of every sequence that decodes, the request that is last in order gives its blocks back, whole,
and waits at its place in the queue.

That ends, without going round in circles:
- The first request in order is never set back: the last one is, and alone the first one has the whole pool
  (a request that could not begin in it is refused; one that fills it alone ends with "length").
- A request is admitted only in a step that set nobody back, in order, and only if after all the blocks that
  it and the ones amid their prefill still lack, one more is left for every running sequence. So between an
  admission and the next set-back every running sequence got a token, and tokens are never taken back:
  each such round brings every request that stays nearer to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable, blocks_needed
from paged_jax.forks import Forks
from paged_jax.preemption import Preemption, add_copies
from paged_jax.prefix_cache import PrefixCache
from paged_jax.queues import Queues, check_can_begin, missing_blocks, order, unfinished
from paged_jax.schedule import Chunk, Sampled, Schedule
from paged_jax.sequence import Request, Sequence
from paged_jax.step_update import Update, take_tokens

SMALLEST_BUDGET = 32
"""Prompt tokens that a step may compute however many sequences decode in it."""


class Scheduler:
    """Owns the queue, the running requests and the device rows; takes blocks through block tables.

    max_num_seqs: rows. max_num_batched_tokens: tokens of a step, decoded and prefilled. max_prefill_seqs:
    chunks of one prefill. prefill_chunk: chunks end at multiples of so many tokens (batch invariance).
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_seqs: int,
        prefix_cache: PrefixCache | None = None,
        preemption: Preemption | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_seqs = max_prefill_seqs
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
        self.preemption = preemption or Preemption(allocator)
        self.queues = Queues(max_num_seqs)
        self.forks = Forks(self.queues)
        self._in_flight: Schedule | None = None

    @property
    def waiting(self) -> list[Request]:
        """The requests in the queue, first in order first."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """The requests that hold rows, first in order first."""
        return self.queues.running

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence still wants tokens."""
        return bool(self.queues.by_id)

    def __contains__(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self.queues.by_id

    def add(self, request: Request) -> None:
        """Queue a new request.

        PoolTooSmall, and nothing changes, if the pool can never hold its prompt, or of several sequences
        the first two tokens that each of them generates.
        """
        check_can_begin(request, self.allocator)
        request.sequences = [Sequence(request, 0, BlockTable(self.allocator, request.request_id))]
        self.queues.arrive(request)

    def abort(self, request_id: str) -> None:
        """Take a request back wherever it stands; unknown or finished ids change nothing."""
        request = self.queues.by_id.get(request_id)
        if request is not None:
            now = monotonic()
            for sequence in request.sequences:
                sequence.finish("abort", now)
            self.retire([request])

    def schedule(self) -> Schedule | None:
        """Settle who runs and give them blocks; None when nothing is left to do.

        `update`, or after a failure `set_back_all`, must follow before the next call; and `retire` of what
        has finished.
        """
        schedule = self._in_flight = Schedule(placed=self.forks.take_unplaced())
        while True:
            self._decode(schedule)
            self._continue_prefills(schedule)
            if not schedule.preempted:
                self._admit(schedule)
            self._join_decode(schedule)
            if schedule or not (running := self.queues.running):
                break
            # Nobody can go on: prompts amid their prefill hold the blocks that the others lack.
            self._yield_blocks(running, schedule)
        schedule.placed = [s for s in dict.fromkeys(schedule.placed) if s.row is not None]
        return schedule if schedule or schedule.exhausted else None

    def update(self, schedule: Schedule, sampled: Sampled) -> Update:
        """Give each sequence the token that was sampled for it. The caller retires what it finished."""
        now = monotonic()
        self._in_flight = None
        for request in schedule.resumed:
            self.preemption.forget(request)
        return take_tokens(schedule, sampled, self.forks, self.prefix_cache, now)

    def set_back_all(self) -> None:
        """Have every running request computed again: after a failure nobody knows what blocks hold.

        What the swap space holds for certain is kept; the prefix cache is forgotten. The books are made anew,
        since an interrupt may have come between any two of their lines. Finished requests that were not
        retired yet are.
        """
        failed, self._in_flight = self._in_flight or Schedule(), None
        for request in failed.preempted:
            request.swapped = None  # its copy may never have been made
        for request in failed.resumed:
            if request.swapped is not None:  # samples that were forked after it came back will be again
                del request.sequences[len(request.swapped.tables) :]
        for request in self.queues.by_id.values():
            if any(sequence.row is not None or sequence.table.blocks for sequence in request.sequences):
                request.metrics.num_preemptions += 1
                self.preemption.drop_tables(request, lost=True)
        self.queues.unseat_all()
        self.preemption.reset_books(self.queues.by_id.values())
        self.forks.take_unplaced()
        self.retire(list(self.queues.by_id.values()))

    def retire(self, requests: Iterable[Request]) -> None:
        """Drop those of the requests whose sequences have all finished, and free the rows of the others'."""
        for request in requests:
            for sequence in request.sequences:
                if sequence.is_finished:
                    self.queues.give_row_back(sequence)
            if request.is_finished and self.queues.by_id.get(request.request_id) is request:
                self.queues.drop(request)
                self.preemption.forget(request)

    # -- a step's parts ------------------------------------------------------------------------------------

    def _decode(self, schedule: Schedule) -> None:
        """Settle who decodes, by setting others back, then give each a slot."""
        while self.queues.decoding:
            sequences = unfinished(self.queues.decoding)
            free = self.allocator.num_free_blocks
            if len(sequences) <= free or _needed(sequences) <= free:
                self._append_each(sequences, schedule)
                return
            self._yield_blocks(self.queues.running, schedule)

    def _yield_blocks(self, running: list[Request], schedule: Schedule) -> None:
        """Set the last running request back, or end the only one."""
        if len(running) == 1:
            self._exhaust(running[0], schedule)
            return
        request = running[-1]
        schedule.preempted.append(request)  # first: if the next line fails, its swap-out is not believed
        self.preemption.set_back(request, schedule)
        self.queues.unseat(request)
        request.metrics.num_preemptions += 1

    def _append_each(self, sequences: list[Sequence], schedule: Schedule) -> None:
        """A slot for each one's last token. Samples fork here, to get their first tokens."""
        copies = []
        for sequence in sequences:
            if copy := sequence.table.append_one():
                copies.append(copy)
                sequence.request.metrics.num_cow_copies += 1
            schedule.decode.append(sequence)
            if sequence.request.params.n > 1 and sequence.index == 0:
                schedule.decode += self.forks.split(sequence)
                schedule.placed += self.forks.take_unplaced()
        if copies:
            add_copies(copies, schedule)

    def _continue_prefills(self, schedule: Schedule) -> None:
        for request in sorted(self.queues.prefilling, key=order):
            self._prefill(request, schedule)

    def _prefill(self, request: Request, schedule: Schedule) -> None:
        """Schedule what the budget and the pool allow of a request's missing tokens."""
        for sequence in request.sequences:
            if sequence.is_finished or not self.preemption.may_begin(sequence, schedule):
                continue
            missing = sequence.num_to_prefill
            if missing <= 0 or len(schedule.prefill) == self.max_prefill_seqs:
                continue
            start, size = sequence.table.num_tokens, self.allocator.block_size
            room = (self.allocator.num_free_blocks + len(sequence.table.blocks)) * size - start
            num_tokens = min(missing, room, self._budget(schedule))
            if self.prefill_chunk is not None:
                whole = min(missing, self.prefill_chunk - start % self.prefill_chunk)
                num_tokens = whole if num_tokens >= whole else 0
            if num_tokens <= 0:
                continue
            sequence.table.append(num_tokens)
            schedule.prefill.append(Chunk(sequence, start, num_tokens))
            schedule.placed.append(sequence)

    def _budget(self, schedule: Schedule) -> int:
        smallest = self.prefill_chunk or SMALLEST_BUDGET
        left = max(self.max_num_batched_tokens - len(schedule.decode), smallest)
        spent = sum(chunk.num_tokens for chunk in schedule.prefill)
        return min(left, self.max_num_batched_tokens) - spent

    def _admit(self, schedule: Schedule) -> None:
        """Newcomers, in order, for as long as rows, budget and pool take them."""
        if not self.waiting:
            return
        seats = sum(request.max_running for request in self.queues.running)
        while self.waiting:
            request = self.waiting[0]
            wanted = request.max_running
            if wanted > self.max_num_seqs - seats:
                return
            if len(schedule.prefill) == self.max_prefill_seqs or self._budget(schedule) <= 0:
                return
            alone = not (self.queues.prefilling or self.queues.decoding)
            if self._enter(request, 0 if alone else self._kept_free(seats + wanted), schedule):
                seats += wanted
            elif alone:
                self._exhaust(request, schedule)
            else:
                return

    def _kept_free(self, num_seqs: int) -> int:
        """Blocks that are left when one more is admitted, of num_seqs running sequences in all."""
        return num_seqs + sum(self._missing(request) for request in self.queues.prefilling)

    def _enter(self, request: Request, reserved: int, schedule: Schedule) -> bool:
        """Take a waiting request in, if so many blocks stay free beside its own."""
        free = self.allocator.num_free_blocks - reserved
        hits: list[int] = []
        leader, cache = unfinished([request])[0], self.prefix_cache
        if request.swapped is not None:
            more = self._missing(request) if reserved else 0
            if len(request.swapped.host_blocks) + more > free:
                return False
        else:
            if cache is not None:
                hits = cache.match(leader)
                amid = [other.sequences[0] for other in self.queues.prefilling]
                if cache.is_on_its_way(leader, len(hits), amid):
                    return False
            revived = sum(1 for block in hits if not self.allocator.ref_cnt(block))
            if self._missing(request) - len(hits) + revived > free:
                return False
        self.queues.seat(request)
        metrics = request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = monotonic()
            metrics.num_cached_tokens = len(hits) * self.allocator.block_size
        if request.swapped is not None:
            self.preemption.swap_in(request, schedule)
        elif cache is not None:
            cache.take(leader, hits)
        self._prefill(request, schedule)
        return True

    def _join_decode(self, schedule: Schedule) -> None:
        """Requests whose prefill ends with this step decode in it, if the pool has their next slots."""
        for request in sorted(self.queues.prefilling, key=order):
            sequences = unfinished([request])
            if any(sequence.num_to_prefill > 0 for sequence in sequences):
                continue
            self.queues.start_decoding(request)
            schedule.placed += sequences
            if _needed(sequences) <= self.allocator.num_free_blocks:
                self._append_each(sequences, schedule)

    # -- small parts ---------------------------------------------------------------------------------------

    def _missing(self, request: Request) -> int:
        return missing_blocks(request, self.allocator.block_size)

    def _exhaust(self, request: Request, schedule: Schedule) -> None:
        """End a request that has the whole pool to itself and needs more."""
        now = monotonic()
        schedule.exhausted.extend(unfinished([request]))
        for sequence in request.sequences:
            sequence.finish("length", now)
        self.queues.take_out(request)


def _needed(sequences: list[Sequence]) -> int:
    return blocks_needed([sequence.table for sequence in sequences], 1)
