"""What a step did to the memory and the queue, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged_jax.block_allocator import BlockAllocator
from paged_jax.scheduler import Schedule, Scheduler


@dataclass(frozen=True)
class StepStats:
    """One step.

    blocks_used, blocks_free: of the usable ones (the null block is neither). cached_tokens: tokens with a
    slot, over all sequences. block_utilization: cached_tokens / (blocks_used x block_size), near
    1 - block_size / (2 x mean length).
    """

    phase: Literal["prefill", "decode"]
    num_tokens: int
    running: int
    waiting: int
    preempted: int
    blocks_used: int
    blocks_free: int
    cached_tokens: int
    block_utilization: float


def step_stats(schedule: Schedule, scheduler: Scheduler, allocator: BlockAllocator) -> StepStats:
    """The record of a step whose blocks are given out and whose sequences are not yet finished."""
    blocks_free = allocator.num_free_blocks
    blocks_used = allocator.num_blocks - 1 - blocks_free
    cached_tokens = sum(sequence.table.num_tokens for sequence in scheduler.running)
    slots = blocks_used * allocator.block_size
    return StepStats(
        phase=schedule.phase,
        num_tokens=sum(entry.num_tokens for entry in schedule.entries),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preempted=len(schedule.preempted),
        blocks_used=blocks_used,
        blocks_free=blocks_free,
        cached_tokens=cached_tokens,
        block_utilization=cached_tokens / slots if slots else 1.0,
    )
