"""One workload under several ways to keep its memory: paged in blocks, or reserved in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, cast, get_args

from paged_jax.contiguous import ContiguousOptions, ContiguousSimulation, Reservation
from paged_jax.errors import InvalidArgument
from paged_jax.preemption import PreemptionCosts
from paged_jax.sim_request import SimRequest
from paged_jax.sim_series import StepSeries
from paged_jax.sim_summary import Summary
from paged_jax.simulator import PagedOptions, Preempts, Simulation
from paged_jax.step_time import StepTime
from paged_jax.workload import Workload

Strategy = Literal["paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PREEMPTS: tuple[Preempts, ...] = ("recompute", "swap", "auto", "queue")


@dataclass(frozen=True)
class Setting:
    """What all strategies have in common. slots: tokens that the memory holds; host_tokens: of the swap
    space; token_costs: of blocks of one token; bytes_per_token: None where no model was given.
    """

    slots: int
    step_time: StepTime
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_seqs: int = 16
    host_tokens: int = 0
    token_costs: PreemptionCosts | None = None
    prefix_caching: bool = False
    bytes_per_token: int | None = None


@dataclass(frozen=True)
class Variant:
    """One row of a comparison. block_size, preemption, free_recompute: of "paged"; fragments: whether a
    contiguous range needs one hole of the arena, or only so many free slots.
    """

    strategy: Strategy
    block_size: int | None = None
    preemption: Preempts = "recompute"
    free_recompute: bool = False
    fragments: bool = True

    @property
    def name(self) -> str:
        """For a table."""
        if self.strategy == "paged":
            return f"paged {self.block_size}, {self.preemption}" + (" free" * self.free_recompute)
        return self.strategy + ("" if self.fragments else ", no holes")


class Run(NamedTuple):
    """One variant's figures, and its steps for plots."""

    variant: Variant
    summary: Summary
    series: StepSeries


def reservation_of(strategy: Strategy) -> Reservation | None:
    """How a contiguous strategy reserves; None for "paged"."""
    return None if strategy == "paged" else cast(Reservation, strategy.removeprefix("contiguous-"))


def variants(
    strategies: Sequence[Strategy], block_sizes: Sequence[int], preempts: Sequence[Preempts]
) -> Iterator[Variant]:
    """Every strategy, paged at every block size and with each way to preempt, contiguous with and without
    holes. Equal pieces leave no holes between them, so the maximum is reserved once.
    """
    for strategy in strategies:
        if strategy == "paged":
            for size in block_sizes:
                for preemption in preempts:
                    yield Variant(strategy, size, preemption)
        else:
            yield Variant(strategy)
            if strategy != "contiguous-max":
                yield Variant(strategy, fragments=False)


def run_all(
    chosen: Sequence[Variant],
    work: Workload,
    setting: Setting,
    progress: Callable[[Variant, int], None] = lambda variant, num_ended: None,
) -> Iterator[Run]:
    """Run them one after the other. What recomputed is run once more, with recomputing for free."""
    for variant in chosen:
        run = run_variant(variant, work, setting, partial(progress, variant))
        yield run
        if run.summary.recomputed_tokens:
            free = replace(variant, free_recompute=True)
            yield run_variant(free, work, setting, partial(progress, free))


def run_variant(
    variant: Variant,
    work: Workload,
    setting: Setting,
    progress: Callable[[int], None] = lambda num_ended: None,
) -> Run:
    """One variant over the accepted requests. progress: called with how many have ended, now and then."""
    reservation = reservation_of(variant.strategy)
    if reservation is None:
        options = _paged(variant, setting, work)
        outcome = Simulation(work.requests, options, setting.step_time).run(progress)
    else:
        ranges = ContiguousOptions(
            slots=setting.slots,
            reservation=reservation,
            max_tokens=work.reservation,
            fragments=variant.fragments,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_prefill_seqs=setting.max_prefill_seqs,
        )
        alone = _each_sample_alone(work.requests)
        outcome = ContiguousSimulation(alone, ranges, setting.step_time).run(progress)
    name = variant.name + (f" {work.reservation:,}" if reservation == "max" else "")
    summary = Summary.of(
        name,
        variant.block_size,
        outcome,
        mean_length=float(work.final_tokens.mean()),
        bytes_per_token=setting.bytes_per_token,
    )
    return Run(variant, summary, outcome.series)


def _paged(variant: Variant, setting: Setting, work: Workload) -> PagedOptions:
    """Of a memory in which all requests fit at once, no more than that is modelled."""
    size = variant.block_size
    if size is None:
        raise InvalidArgument.of("block_size", size, "a number of tokens, for the paged strategy")
    costs = setting.token_costs
    most = work.most_blocks(size) + setting.max_num_seqs
    return PagedOptions(
        num_blocks=min(setting.slots // size, most) + 1,
        block_size=size,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_prefill_seqs=setting.max_prefill_seqs,
        preemption=variant.preemption,
        host_blocks=min(setting.host_tokens // size, most),
        prefix_caching=setting.prefix_caching,
        costs=costs and PreemptionCosts(costs.compute_token, size * costs.move_block),
        free_recompute=variant.free_recompute,
    )


def _each_sample_alone(requests: Sequence[SimRequest]) -> list[SimRequest]:
    """A contiguous range can not be shared: every sample, or beam, is a request that reserves for itself."""
    return [
        replace(request, name=f"{request.name}/{copy}", samples=1, beam_width=0)
        for request in requests
        for copy in range(max(request.samples, request.beam_width, 1))
    ]
