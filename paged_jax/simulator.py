"""A workload through the engine's own scheduler, allocator, tables and prefix cache, with nothing computed.

What it says is what the engine does: the same code decides. Only the clock is made up, by a StepTime, and
stretches of steps in which nothing is to be decided are taken at once, see decode_window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paged_jax.block_allocator import BlockAllocator
from paged_jax.decode_window import DecodeWindow, plan_window
from paged_jax.errors import PoolTooSmall
from paged_jax.made_up_scores import made_up_scores
from paged_jax.preemption import Preemption, PreemptionCosts, PreemptionMode
from paged_jax.prefix_cache import PrefixCache
from paged_jax.queue_only import QueueOnlyScheduler
from paged_jax.queues import unfinished
from paged_jax.schedule import Sampled, Schedule
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, Sequence
from paged_jax.sim_request import SimRequest
from paged_jax.sim_series import SeriesBuilder, StepSeries
from paged_jax.stats import BlockCounts
from paged_jax.step_time import StepTime

Preempts = PreemptionMode | Literal["queue"]


@dataclass(frozen=True)
class PagedOptions:
    """The engine's limits in a simulation; num_blocks counts the null block, as the engine's does.

    preemption: the engine's modes, or "queue": admit only what will never have to be set back.
    free_recompute: the clock does not count tokens that are computed again.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_seqs: int = 16
    preemption: Preempts = "recompute"
    host_blocks: int = 0
    prefix_caching: bool = False
    costs: PreemptionCosts | None = None
    free_recompute: bool = False


@dataclass
class Outcome:
    """What became of a workload. queue_delays, latencies: seconds from arrival to the first step that worked
    on a request, and to its end, in order of ending; refused: names of those that can never fit.
    """

    series: StepSeries
    queue_delays: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    cow_copies: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_windows: int = 0


class Simulation:
    """One run. jumps: take quiet stretches at once; without, every step is scheduled by itself."""

    def __init__(
        self,
        requests: Iterable[SimRequest],
        options: PagedOptions,
        step_time: StepTime,
        *,
        jumps: bool = True,
        on_step: Callable[[Schedule, BlockCounts], None] | None = None,
    ) -> None:
        self.options = options
        self.step_time = step_time
        self._jumps = jumps
        self._on_step = on_step
        allocator = BlockAllocator(options.num_blocks, options.block_size)
        kind = QueueOnlyScheduler if options.preemption == "queue" else Scheduler
        self.scheduler = kind(
            allocator,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_prefill_seqs=options.max_prefill_seqs,
            prefix_cache=PrefixCache(allocator) if options.prefix_caching else None,
            preemption=Preemption(
                allocator,
                mode="recompute" if options.preemption == "queue" else options.preemption,
                num_host_blocks=options.host_blocks,
                costs=options.costs,
            ),
        )
        self.clock = 0.0
        self._arriving = deque(sorted(requests, key=lambda request: request.arrival))
        self._arrival_of: dict[Request, float] = {}
        self._started: set[Request] = set()
        self._series = SeriesBuilder()
        self._outcome = Outcome(self._series.build())
        self._quiet = False

    def run(self, progress: Callable[[int], None] = lambda num_ended: None) -> Outcome:
        """To the last request's end. progress: called with how many have ended, now and then."""
        outcome, scheduler = self._outcome, self.scheduler
        while self._arriving or scheduler.has_unfinished:
            if not scheduler.has_unfinished:
                self.clock = max(self.clock, self._arriving[0].arrival)
            self._arrive()
            if not scheduler.has_unfinished:
                continue  # what came can never fit
            window = self._window() if self._jumps and self._quiet else None
            if window is not None:
                self._take(window)
            else:
                self._step()
            progress(len(outcome.latencies) + len(outcome.refused))
        outcome.series = self._series.build()
        if (cache := scheduler.prefix_cache) is not None:
            outcome.prefix_queried_tokens = cache.queried_tokens
            outcome.prefix_hit_tokens = cache.hit_tokens
        return outcome

    def _arrive(self) -> None:
        """Queue what has arrived by now. Behind others nothing changes; else the next step may admit it."""
        alone = not self.scheduler.waiting
        while self._arriving and self._arriving[0].arrival <= self.clock:
            coming = self._arriving.popleft()
            request = coming.request()
            try:
                self.scheduler.add(request)
            except PoolTooSmall:
                self._outcome.refused.append(coming.name)
                continue
            self._arrival_of[request] = coming.arrival
            self._quiet = self._quiet and not alone

    def _step(self) -> None:
        """One step, as Engine.step does it."""
        scheduler = self.scheduler
        schedule = scheduler.schedule()
        assert schedule is not None, "there was something to do"
        blocks = BlockCounts.of(scheduler)
        if self._on_step is not None:
            self._on_step(schedule, blocks)
        computed = schedule.num_tokens - (self._recomputed(schedule) if self.options.free_recompute else 0)
        read = sum(s.table.num_tokens for s in schedule.decode) + sum(c.end for c in schedule.prefill)
        swapped = (len(schedule.swap_out) + len(schedule.swap_in)) * self.options.block_size
        seconds = self.step_time.seconds(computed, read, swapped)
        running = len(scheduler.queues.running_sequences)
        self._note_starts(schedule)
        if schedule:  # a lone request that the pool had no more room for ends without a step
            self._series.add(
                start=self.clock,
                seconds=seconds,
                running=running,
                waiting=len(scheduler.waiting),
                reserved=blocks.used * blocks.block_size,
                written=blocks.stored_tokens,
            )
            self.clock += seconds
        self._count(schedule)
        tokens = [_made_up_token(sequence) for sequence in schedule.decode]
        beams = any(sequence.request.beams for sequence in schedule.decode)
        scores = made_up_scores(schedule.decode) if beams else None
        found = self._may_be_found_by_others()
        update = scheduler.update(schedule, Sampled(tokens, None, scores))
        ended = list(dict.fromkeys(s.request for s in update.advanced if s.is_finished))
        self._end(ended)
        self._quiet = _is_quiet(schedule, scheduler, ended, found)

    def _may_be_found_by_others(self) -> bool:
        """Whether the step that ends may offer blocks of a prompt, which a waiting request may begin with."""
        if not self.options.prefix_caching or not self.scheduler.waiting:
            return False
        size, running = self.options.block_size, self.scheduler.queues.running_sequences
        return any(s.num_registered < len(s.request.prompt_token_ids) // size for s in running)

    def _window(self) -> DecodeWindow | None:
        """The stretch of steps from here in which nothing is to be decided."""
        scheduler = self.scheduler
        sequences = unfinished(scheduler.queues.decoding)
        alone = not scheduler.waiting
        may_end = alone and scheduler.prefix_cache is None and all(s.request.params.n == 1 for s in sequences)
        until = self._arriving[0].arrival - self.clock if self._arriving else None
        return plan_window(
            sequences,
            may_end=may_end,
            registers=scheduler.prefix_cache is not None,
            free_blocks=scheduler.allocator.num_free_blocks,
            block_size=self.options.block_size,
            until=until,
            step_time=self.step_time,
        )

    def _take(self, window: DecodeWindow) -> None:
        """Let a window's steps have happened."""
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        allocator, size = scheduler.allocator, self.options.block_size
        used = allocator.num_blocks - 1 - allocator.num_free_blocks + window.more_blocks
        starts = self.clock + np.concatenate([[0.0], np.cumsum(window.seconds)])
        self._series.add_many(
            start=starts[:-1],
            seconds=window.seconds,
            running=window.running,
            waiting=np.full(window.num_steps, len(scheduler.waiting)),
            reserved=used * size,
            written=used * size - window.empty,
        )
        sequences = unfinished(scheduler.queues.decoding)
        order = np.argsort(window.steps, kind="stable")  # who ends first gives its blocks back first
        ended = []
        for place in order.tolist():
            sequence, steps = sequences[place], int(window.steps[place])
            sequence.table.append(steps)
            sequence.token_ids.extend([_made_up_token(sequence)] * steps)
            if cache is not None:
                cache.offer(sequence)
        for place in order.tolist():
            sequence = sequences[place]
            if sequence.num_output_tokens == sequence.request.max_new_tokens:
                sequence.finish("length", 0.0)
                ended.append(sequence.request)
                self._latency(sequence.request, float(starts[window.steps[place]]))
        self._outcome.generated_tokens += int(window.steps.sum())
        self._outcome.num_windows += 1
        self.clock = float(starts[-1])
        scheduler.retire(ended)
        self._quiet = bool(scheduler.queues.decoding)

    def _note_starts(self, schedule: Schedule) -> None:
        for sequence in (*(chunk.sequence for chunk in schedule.prefill), *schedule.decode):
            request = sequence.request
            if request not in self._started:
                self._started.add(request)
                self._outcome.queue_delays.append(self.clock - self._arrival_of[request])
                self._outcome.prompt_tokens += len(request.prompt_token_ids)

    def _count(self, schedule: Schedule) -> None:
        outcome = self._outcome
        outcome.generated_tokens += len(schedule.decode)
        outcome.preemptions += len(schedule.preempted)
        outcome.cow_copies += len(schedule.copies)
        outcome.swapped_blocks += len(schedule.swap_out) + len(schedule.swap_in)
        outcome.recomputed_tokens += self._recomputed(schedule)

    def _recomputed(self, schedule: Schedule) -> int:
        """Tokens of a step that were computed before."""
        return sum(c.num_tokens for c in schedule.prefill if c.sequence.request.metrics.num_preemptions)

    def _end(self, requests: list[Request]) -> None:
        self.scheduler.retire(requests)
        for request in requests:
            if request.is_finished:
                self._latency(request, self.clock)

    def _latency(self, request: Request, now: float) -> None:
        self._outcome.latencies.append(now - self._arrival_of.pop(request))
        self._started.discard(request)


def _made_up_token(sequence: Sequence) -> int:
    """What a sequence generates: nothing that another one's prompt or answer holds."""
    return -1 - (sequence.request.arrival << 20) - sequence.index


def _is_quiet(schedule: Schedule, scheduler: Scheduler, ended: list[Request], found: bool) -> bool:
    """Whether the next step can do nothing but let every running sequence decode, each into its own block.

    Where nobody waits, and no sequence has siblings, a step without prefill can do nothing else. Otherwise
    the step that is over tells: it did nothing else, and left the next one nothing to admit. found: whether
    it offered blocks that a request which waits may begin with.
    """
    queues = scheduler.queues
    if not queues.decoding or queues.prefilling:
        return False
    if not scheduler.waiting and all(request.max_sequences == 1 for request in queues.running):
        return True
    busy = schedule.prefill or schedule.placed or schedule.copies or schedule.preempted or schedule.swap_in
    return bool(schedule.decode) and not (busy or ended or found)
