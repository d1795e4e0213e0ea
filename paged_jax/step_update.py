"""What a finished step means for the sequences: tokens taken, ends noticed, written blocks offered."""

from __future__ import annotations

from typing import NamedTuple

from paged_jax.forks import Forks
from paged_jax.prefix_cache import PrefixCache
from paged_jax.schedule import Sampled, Schedule
from paged_jax.sequence import Request, Sequence


class Latencies(NamedTuple):
    """Seconds that a step's tokens took: those of requests' first tokens, and those since a last one.

    One for each request, however many sequences it has.
    """

    first_token: list[float]
    inter_token: list[float]


class Update(NamedTuple):
    """What a step brought: the sequences that got a token or ended, and how long their tokens took."""

    advanced: list[Sequence]
    latencies: Latencies


def take_tokens(
    schedule: Schedule, sampled: Sampled, forks: Forks, cache: PrefixCache | None, now: float
) -> Update:
    """Give each sequence of a step its token, and offer the blocks that the step filled."""
    if cache is not None:
        for chunk in schedule.prefill:
            if not chunk.sequence.is_finished:
                cache.offer(chunk.sequence)
    advanced = list(schedule.exhausted)
    latencies = Latencies([], [])
    counted: Request | None = None
    beams: dict[Request, list[int]] = {}
    for place, (sequence, token) in enumerate(zip(schedule.decode, sampled.tokens, strict=True)):
        if sequence.finish_reason is not None:
            continue
        if cache is not None and sequence.table.num_tokens % cache.allocator.block_size == 0:
            cache.offer(sequence)  # before a last token gives the blocks back
        request = sequence.request
        if request is not counted:  # a request's sequences stand next to each other
            counted = request
            _note_time(request, latencies, now)
        request.metrics.num_output_tokens += 1
        if request.beams is not None:
            beams.setdefault(request, []).append(place)
            continue
        if sampled.logprobs is not None and request.params.logprobs is not None:
            sequence.logprobs.append(sampled.logprobs[place])
        sequence.append(token, now)
        advanced.append(sequence)
    for request, places in beams.items():
        assert sampled.scores is not None
        forks.advance_beams(request, sampled.scores, places, now)
        advanced += request.sequences
    return Update(advanced, latencies)


def _note_time(request: Request, latencies: Latencies, now: float) -> None:
    """A step brings a request tokens: take down when."""
    metrics = request.metrics
    if metrics.last_token_time is None:
        metrics.first_token_time = now
        latencies.first_token.append(now - metrics.arrival_time)
    else:
        latencies.inter_token.append(now - metrics.last_token_time)
    metrics.last_token_time = now
    metrics.num_token_steps += 1
