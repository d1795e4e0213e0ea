"""The requests of a simulation: those of a trace that every strategy to be compared can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paged_jax.capacity import blocks_for_samples
from paged_jax.contiguous import Reservation, slots_reserved
from paged_jax.demand import Demand
from paged_jax.errors import InvalidArgument
from paged_jax.request_trace import SLOWEST, Trace
from paged_jax.sim_request import SimRequest


@dataclass(frozen=True)
class Sharing:
    """n samples, or a search of beam_width beams, for a share of the requests, evenly spread."""

    samples: int = 1
    beam_width: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        """InvalidArgument for what no request can be."""
        if self.samples < 1:
            raise InvalidArgument.of("samples", self.samples, "1 or more")
        if self.beam_width < 0:
            raise InvalidArgument.of("beam_width", self.beam_width, "0 for none, or 1 or more")
        if self.samples > 1 and self.beam_width:
            raise InvalidArgument("samples and beam_width: a request is one or the other; give one.")
        if not 0 < self.share <= 1:
            raise InvalidArgument.of("share", self.share, "a number over 0, 1 at most")

    @property
    def width(self) -> int:
        """Sequences of a request that shares, at most."""
        return max(self.samples, self.beam_width)


@dataclass(frozen=True)
class Workload:
    """The requests that every strategy can run. dropped: (how many, why) of the others; reservation: tokens
    that each request gets where the maximum is reserved.
    """

    requests: list[SimRequest]
    reservation: int
    dropped: list[tuple[int, str]]

    @property
    def final_tokens(self) -> np.ndarray:
        """int64 [n]: slots that each uses when it ends; its last token is sampled but never written."""
        return np.array([request.prompt_tokens + request.output_tokens - 1 for request in self.requests])

    def most_blocks(self, block_size: int) -> int:
        """What all of them together hold if they end at once."""
        return sum(
            blocks_for_samples(
                request.prompt_tokens,
                request.output_tokens,
                max(request.samples, request.beam_width),
                block_size,
            )
            for request in self.requests
        )


def replayed(trace: Trace, *, speed: float = 1.0, first: int | None = None) -> Trace:
    """Its first requests, so many times as fast; infinity: all of them come at once."""
    if not speed >= SLOWEST:
        raise InvalidArgument.of("speed", speed, f"a number, {SLOWEST:g} or more, or inf")
    if first is not None and first < 1:
        raise InvalidArgument.of("first", first, "1 or more")
    kept = slice(first)
    return replace(
        trace,
        arrival_s=trace.arrival_s[kept] / speed,
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
        places=trace.places[kept],
        hash_ids=trace.hash_ids and trace.hash_ids[kept],
    )


def make_workload(
    trace: Trace,
    *,
    slots: int,
    block_sizes: Sequence[int],
    reservations: Sequence[Reservation] = (),
    reservation: int | None = None,
    sharing: Sharing = Sharing(),
    with_token_ids: bool = False,
) -> Workload:
    """The same accepted requests for all.

    They fit a memory of so many slots in blocks of each of these sizes, and what each of the reservations
    takes for them. reservation: tokens of "max"; None: the default. InvalidArgument where none is left.
    """
    most = Demand(trace).reservation() if reservation is None else reservation
    prompts, answers = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    fits: list[int] = []
    too_large = too_long = too_wide = 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        kinds = {kind: slots_reserved(kind, prompt, answer, most) for kind in reservations}
        if any(
            blocks_for_samples(prompt, answer, sharing.width, size) > slots // size for size in block_sizes
        ):
            too_large += 1
        elif kinds.get("max") == 0:
            too_long += 1
        elif max(kinds.values(), default=0) > slots:
            too_wide += 1
        else:
            fits.append(index)
    dropped = [
        (count, why)
        for count, why in (
            (too_large, f"they need more than the memory's {slots:,} tokens"),
            (too_long, f"they are longer than the reservation of {most:,} tokens"),
            (too_wide, f"what a strategy reserves for them is more than the memory's {slots:,} tokens"),
        )
        if count
    ]
    if not fits:
        reasons = "; ".join(f"{count:,}: {why}" for count, why in dropped)
        raise InvalidArgument(f"{trace.source}: no request is left to simulate ({reasons}).")
    return Workload(_requests(trace, fits, sharing, with_token_ids), most, dropped)


def _requests(trace: Trace, kept: list[int], sharing: Sharing, with_token_ids: bool) -> list[SimRequest]:
    found = []
    numbers: dict[int, int] = {}  # of hash ids, which may be hashes of any size
    for number, index in enumerate(kept):
        shares = int((number + 1) * sharing.share) > int(number * sharing.share)
        found.append(
            SimRequest(
                trace.places[index],
                float(trace.arrival_s[index]),
                int(trace.prompt_tokens[index]),
                int(trace.output_tokens[index]),
                token_ids=_token_ids(trace, index, numbers) if with_token_ids else None,
                samples=sharing.samples if shares else 1,
                beam_width=sharing.beam_width if shares else 0,
            )
        )
    return found


def _token_ids(trace: Trace, index: int, numbers: dict[int, int]) -> tuple[int, ...]:
    """Made-up ids: equal where hash_ids are, else of this request alone. numbers: the hash ids' so far."""
    length = int(trace.prompt_tokens[index])
    if trace.hash_ids is None or trace.hash_block_size is None:
        return tuple(range(index << 24, (index << 24) + length))
    size = trace.hash_block_size
    blocks = [numbers.setdefault(block, len(numbers)) for block in trace.hash_ids[index]]
    ids = (token for block in blocks for token in range(block * size, (block + 1) * size))
    return tuple(token for token, _ in zip(ids, range(length), strict=False))
