"""What a step did to the memory and the queue, as one record, and the sums over all steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paged_jax.schedule import Schedule
from paged_jax.scheduler import Scheduler
from paged_jax.step_update import Latencies


@dataclass(frozen=True)
class BlockCounts:
    """The pool at one moment; the null block is in none of the counts.

    used: held by a sequence; shared: of these, held more than once; cached: free, but holding a prefix that
    can be found again; free: allocatable, cached ones included. logical: what the sequences would hold if
    they shared none. stored_tokens: tokens that the used blocks hold, a shared one's counted once.
    """

    used: int
    logical: int
    shared: int
    cached: int
    free: int
    stored_tokens: int
    block_size: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> BlockCounts:
        """As the pool stands."""
        allocator = scheduler.allocator
        size, free = allocator.block_size, allocator.num_free_blocks
        used = allocator.num_blocks - 1 - free
        empty: dict[int, int] = {}  # slots by last block, which siblings may share
        logical = 0
        for sequence in scheduler.queues.running_sequences:
            table = sequence.table
            logical += len(table.blocks)
            rest = table.num_tokens % size
            if rest:
                empty[table.blocks[-1]] = size - rest
        return cls(
            used=used,
            logical=logical,
            shared=allocator.num_shared_blocks,
            cached=allocator.num_cached_blocks,
            free=free,
            stored_tokens=used * size - sum(empty.values()),
            block_size=size,
        )

    @property
    def utilization(self) -> float:
        """Valid tokens / (used blocks x block_size), near 1 - block_size / (2 x mean length)."""
        return self.stored_tokens / (self.used * self.block_size) if self.used else 1.0

    @property
    def saved_share(self) -> float:
        """Blocks that sharing saves / blocks that there would be without it: 1 - used / logical."""
        return 1 - self.used / self.logical if self.logical else 0.0


def count_requests_blocks(scheduler: Scheduler) -> None:
    """Have each running request's metrics count what it holds in this step."""
    for request in (*scheduler.queues.decoding, *scheduler.queues.prefilling):
        tables = [sequence.table.blocks for sequence in request.sequences]
        if len(tables) == 1:
            physical = logical = len(tables[0])
        else:
            physical, logical = len(set().union(*tables)), sum(map(len, tables))
        request.metrics.count_blocks(physical, logical)


@dataclass(frozen=True)
class StepStats:
    """One step. Counts are this step's own unless they say otherwise.

    running, waiting: requests, as the step left them to the next. blocks: the pool while the step ran.
    preempted: requests set back; resumed: requests that came back from the swap space.
    prefix_queried_tokens, prefix_hit_tokens: of the requests admitted, the tokens looked up and found.
    swapped_out_bytes, swapped_in_bytes: between the pool and the host. prefill_tokens, generated_tokens: keys
    and values computed ahead of a sequence's last token; tokens sampled. schedule_seconds: on the host
    before the device began; device_seconds: until its tokens were there; update_seconds: on the host after.
    latencies: seconds from arrival to first tokens, and between tokens.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    preempted: int
    resumed: int
    cow_copies: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    prefill_tokens: int
    generated_tokens: int
    schedule_seconds: float
    device_seconds: float
    update_seconds: float
    latencies: Latencies

    @property
    def block_utilization(self) -> float:
        """Valid tokens / (used blocks x block_size)."""
        return self.blocks.utilization


@dataclass
class Totals:
    """Sums over all steps since the engine was made; see StepStats."""

    steps: int = 0
    preempted: int = 0
    resumed: int = 0
    cow_copies: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    schedule_seconds: float = 0.0
    device_seconds: float = 0.0
    update_seconds: float = 0.0

    def add(self, step: StepStats) -> None:
        """Count a step in."""
        self.steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))


_SUMMED = [field.name for field in fields(Totals) if field.name != "steps"]


@dataclass
class StepClock:
    """What is taken down in the course of a step, until its record can be made."""

    started: float
    scheduled: float = 0.0
    executed: float = 0.0
    queried_before: int = 0
    hits_before: int = 0

    def record(
        self,
        schedule: Schedule,
        scheduler: Scheduler,
        *,
        blocks: BlockCounts,
        latencies: Latencies,
        block_bytes: int,
        now: float,
    ) -> StepStats:
        """The record of a step whose tokens are taken and whose finished requests are gone."""
        cache = scheduler.prefix_cache
        return StepStats(
            running=len(scheduler.queues.prefilling) + len(scheduler.queues.decoding),
            waiting=len(scheduler.waiting),
            blocks=blocks,
            preempted=len(schedule.preempted),
            resumed=len(schedule.resumed),
            cow_copies=len(schedule.copies),
            prefix_queried_tokens=cache.queried_tokens - self.queried_before if cache else 0,
            prefix_hit_tokens=cache.hit_tokens - self.hits_before if cache else 0,
            swapped_out_bytes=len(schedule.swap_out) * block_bytes,
            swapped_in_bytes=len(schedule.swap_in) * block_bytes,
            prefill_tokens=schedule.num_tokens - len(schedule.decode),
            generated_tokens=len(schedule.decode),
            schedule_seconds=self.scheduled - self.started,
            device_seconds=self.executed - self.scheduled,
            update_seconds=now - self.executed,
            latencies=latencies,
        )
