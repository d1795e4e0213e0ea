"""What a finished step means for the sequences: tokens taken, ends noticed, written blocks offered."""

from __future__ import annotations

from typing import NamedTuple

from paged_jax.prefix_cache import PrefixCache
from paged_jax.schedule import Sampled, Schedule
from paged_jax.sequence import Sequence


class Latencies(NamedTuple):
    """Seconds that a step's tokens took: those of requests' first tokens, and those since a last one."""

    first_token: list[float]
    inter_token: list[float]


class Update(NamedTuple):
    """What a step brought: the sequences that got a token or ended, and how long their tokens took."""

    advanced: list[Sequence]
    latencies: Latencies


def take_tokens(
    schedule: Schedule, sampled: Sampled, cache: PrefixCache | None, block_size: int, now: float
) -> Update:
    """Give each sequence of a step its token, and offer the blocks that the step filled."""
    if cache is not None:
        for chunk in schedule.prefill:
            if not chunk.sequence.is_finished:
                cache.offer(chunk.sequence)
    first: list[float] = []
    inter: list[float] = []
    advanced = list(schedule.exhausted)
    for place, (sequence, token) in enumerate(zip(schedule.decode, sampled.tokens, strict=True)):
        if sequence.finish_reason is not None:
            continue
        if cache is not None and sequence.table.num_tokens % block_size == 0:
            cache.offer(sequence)  # before a last token gives the blocks back
        metrics = sequence.request.metrics
        last = metrics.last_token_time
        if last is None:
            first.append(now - metrics.arrival_time)
        else:
            inter.append(now - last)
        if sampled.logprobs is not None and sequence.request.params.logprobs is not None:
            sequence.logprobs.append(sampled.logprobs[place])
        sequence.append(token, now)
        advanced.append(sequence)
    return Update(advanced, Latencies(first, inter))
