"""What paging replaces: each request reserves one contiguous range of slots until it ends.

The same workload, budget and clock as in simulator; what differs is the memory. A request is admitted, first
come first served, once its whole reservation fits: in one arena of addresses, at the first hole that is large
enough, or, without address-space fragmentation, wherever so many slots are free in all. Nobody is ever
preempted.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paged_jax.scheduler import SMALLEST_BUDGET
from paged_jax.sim_request import SimRequest
from paged_jax.sim_series import SeriesBuilder
from paged_jax.simulator import Outcome
from paged_jax.step_time import StepTime

Reservation = Literal["max", "pow2", "oracle"]


@dataclass(frozen=True)
class ContiguousOptions:
    """reservation: what a request takes. "max": max_tokens slots, whatever its length; "pow2": its prompt,
    and its answer rounded up to a power of two; "oracle": exactly what it will need.

    slots: tokens that the memory holds. fragments: whether a reservation needs one hole.
    """

    slots: int
    reservation: Reservation
    max_tokens: int = 0
    fragments: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_seqs: int = 16

    def slots_for(self, request: SimRequest) -> int:
        """What a request reserves; 0 where it may never run."""
        reserved = slots_reserved(
            self.reservation, request.prompt_tokens, request.output_tokens, self.max_tokens
        )
        return reserved if reserved <= self.slots else 0


def slots_reserved(reservation: Reservation, prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
    """What a request of these lengths reserves: its last token needs no slot. 0: it is over the maximum."""
    needed = prompt_tokens + output_tokens - 1
    if reservation == "max":
        return max_tokens if needed < max_tokens else 0
    if reservation == "pow2":
        return prompt_tokens + (1 << (output_tokens - 1).bit_length())
    return needed


class Arena:
    """First fit in one range of addresses: holes in order, joined when a neighbour is given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # (start, length)

    @property
    def num_free(self) -> int:
        """Free slots, wherever they lie."""
        return sum(length for _, length in self._holes)

    @property
    def largest_hole(self) -> int:
        """The most that fits at once."""
        return max((length for _, length in self._holes), default=0)

    def allocate(self, size: int) -> int | None:
        """The start of the first range that is large enough, or None."""
        for place, (start, length) in enumerate(self._holes):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self._holes[place : place + 1] = rest
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Give a range back."""
        insort(self._holes, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, length in self._holes:
            if joined and joined[-1][0] + joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((begin, length))
        self._holes = joined


@dataclass(eq=False)
class _Running:
    request: SimRequest
    reserved: int
    start: int
    written: int = 0
    """Slots that hold a token, but for those that decode steps since `from_step` have written."""
    from_step: int = -1
    """The step in which it first decodes; -1 amid its prefill."""

    @property
    def to_prefill(self) -> int:
        """Tokens ahead of the prompt's last one, which decodes."""
        return self.request.prompt_tokens - 1 - self.written


class ContiguousSimulation:
    """One run of a workload over reservations."""

    def __init__(
        self, requests: Iterable[SimRequest], options: ContiguousOptions, step_time: StepTime
    ) -> None:
        self.options = options
        self.step_time = step_time
        self._arriving = deque(sorted(requests, key=lambda request: request.arrival))
        self._waiting: deque[SimRequest] = deque()
        self._prefilling: list[_Running] = []
        self._ends: list[tuple[int, int, _Running]] = []  # (step after the last one, tie, who)
        self._arena = Arena(options.slots)
        self._reserved = self._needed = self._decode_slots = 0
        self._num_running = self._steps = self._stranded = 0
        self.clock = 0.0
        self._series = SeriesBuilder()
        self._outcome = Outcome(self._series.build())

    def run(self, progress: Callable[[int], None] = lambda num_ended: None) -> Outcome:
        """To the last request's end. progress: called with how many have ended, now and then."""
        outcome = self._outcome
        while self._arriving or self._waiting or self._num_running:
            if not (self._waiting or self._num_running):
                self.clock = max(self.clock, self._arriving[0].arrival)
            self._arrive()
            self._admit()
            if self._num_running:
                self._run_steps()
                self._retire()
            progress(len(outcome.latencies) + len(outcome.refused))
        outcome.series = self._series.build()
        return outcome

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0].arrival <= self.clock:
            request = self._arriving.popleft()
            if self.options.slots_for(request):
                self._waiting.append(request)
            else:
                self._outcome.refused.append(request.name)

    def _fits(self, reserved: int) -> int | None:
        """Where a reservation may begin; without fragmentation, nowhere in particular."""
        if self.options.fragments:
            return self._arena.allocate(reserved)
        return 0 if self._reserved + reserved <= self.options.slots else None

    def _admit(self) -> None:
        """Newcomers, in order, as long as rows, budget and memory take them, as in the engine."""
        options, self._stranded = self.options, 0
        budget = self._budget() - sum(one.to_prefill for one in self._prefilling)
        while self._waiting and self._num_running < options.max_num_seqs:
            if len(self._prefilling) == options.max_prefill_seqs or budget <= 0:
                return
            request = self._waiting[0]
            reserved = options.slots_for(request)
            start = self._fits(reserved)
            if start is None:
                free = options.slots - self._reserved
                self._stranded = free if reserved <= free else 0
                return
            budget -= request.prompt_tokens - 1
            self._waiting.popleft()
            self._prefilling.append(_Running(request, reserved, start))
            self._reserved += reserved
            self._needed += request.prompt_tokens + request.output_tokens - 1
            self._num_running += 1
            self._outcome.queue_delays.append(self.clock - request.arrival)
            self._outcome.prompt_tokens += request.prompt_tokens

    def _run_steps(self) -> None:
        """One step that has a prefill in it, or as many decode steps as nothing is to be decided in."""
        prefilled = read = 0
        budget = self._budget()
        joining: list[_Running] = []
        for one in self._prefilling:
            tokens = min(one.to_prefill, budget - prefilled)
            one.written += tokens
            prefilled += tokens
            read += one.written if tokens else 0
            if not one.to_prefill:
                joining.append(one)
        for one in joining:
            self._prefilling.remove(one)
            one.from_step = self._steps
            self._decode_slots += one.written
            heapq.heappush(self._ends, (self._steps + one.request.output_tokens, id(one), one))
        rows = len(self._ends)
        num_steps = 1 if self._prefilling or prefilled or joining else self._quiet_steps(rows)
        at = np.arange(num_steps)
        slots = self._decode_slots + rows * (at + 1)
        computing = self.step_time.seconds(rows + prefilled, 0)
        seconds = computing + self.step_time.per_kv_token * (slots + read)
        written = slots + sum(one.written for one in self._prefilling)
        starts = self.clock + np.concatenate([[0.0], np.cumsum(seconds)])
        if self._arriving:
            seen = int(np.searchsorted(starts, self._arriving[0].arrival))
            num_steps = min(num_steps, max(seen, 1))
        self._series.add_many(
            start=starts[:num_steps],
            seconds=seconds[:num_steps],
            running=np.full(num_steps, self._num_running),
            waiting=np.full(num_steps, len(self._waiting)),
            reserved=np.full(num_steps, self._reserved),
            written=written[:num_steps],
            ahead=self._needed - written[:num_steps],
            stranded=np.full(num_steps, self._stranded),
        )
        self._decode_slots += rows * num_steps
        self._steps += num_steps
        self._outcome.generated_tokens += rows * num_steps
        self.clock = float(starts[num_steps])

    def _budget(self) -> int:
        """Tokens of prompts in one step."""
        most = self.options.max_num_batched_tokens
        return min(max(most - len(self._ends), SMALLEST_BUDGET), most)

    def _quiet_steps(self, rows: int) -> int:
        """Until the first of the running ones ends."""
        return min(self._ends[0][0] - self._steps, max((1 << 18) // rows, 1))

    def _retire(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, one = heapq.heappop(self._ends)
            self._decode_slots -= one.written + self._steps - one.from_step
            if self.options.fragments:
                self._arena.free(one.start, one.reserved)
            self._reserved -= one.reserved
            self._needed -= one.request.prompt_tokens + one.request.output_tokens - 1
            self._num_running -= 1
            self._outcome.latencies.append(self.clock - one.request.arrival)
