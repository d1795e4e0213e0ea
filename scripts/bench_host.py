#!/usr/bin/env python
"""What the host does in a step, without a model: microseconds, and bytes for the device.

    scripts/bench_host.py [--steps 400] [--json]

Made-up requests run through a scheduler and the packing of steps, and get made-up tokens. A scheduler of
1,024 rows has 1, 32, 256 or 1,024 sequences that decode, of 64 to 319 tokens in blocks of 16; prefix caching
is on. Prompts are of many lengths, so that in each step about one sequence in 16 begins a block. Every tenth
step one sequence has ended and another takes its place: a prompt is packed then, and a row for the device;
those steps are shown by themselves, the others are "decode". Shown are medians of many steps, for each of
the two sets of batch sizes that programs are compiled for, a CPU's and a GPU's. The time is that of the
thread on its core, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from paged_jax.block_allocator import BlockAllocator
from paged_jax.buckets import Buckets
from paged_jax.packed_step import PackedStep, Packer
from paged_jax.prefix_cache import PrefixCache
from paged_jax.sampling_params import SamplingParams
from paged_jax.schedule import Sampled, Schedule
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, RequestMetrics

RUNNING = (1, 32, 256, 1024)
PLATFORMS: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
BLOCK_SIZE, MAX_LEN = 16, 2048
SHORTEST, LONGEST = 64, 319
NEWCOMER_EVERY = 10
GOAL_US, GOAL_BYTES, GOAL_GROWTH = 1000, 64, 1.5
"""schedule + packing at 256 sequences; bytes a sequence and decode step; the cost of a sequence among 1,024
against that among 256."""


@dataclass
class StepCost:
    """One step, or the medians of many: microseconds of each part, and bytes that cross to the device."""

    schedule_us: float
    pack_us: float
    update_us: float
    num_bytes: float

    @property
    def total_us(self) -> float:
        """All three parts."""
        return self.schedule_us + self.pack_us + self.update_us

    @classmethod
    def median(cls, steps: list[StepCost]) -> StepCost:
        """Each number's own median."""
        rows = zip(*(asdict(step).values() for step in steps), strict=True)
        return cls(*(statistics.median(values) for values in rows))


@dataclass
class Result:
    """What one number of running sequences costs: steps that only decode, and those that place a row too."""

    platform: str
    running: int
    decode: StepCost
    placing: StepCost


def buckets_of(platform: Literal["cpu", "cuda"]) -> Buckets:
    """The shapes of a platform's programs."""
    return Buckets(
        max_num_seqs=max(RUNNING),
        max_num_batched_tokens=2048,
        max_prefill_seqs=16,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        platform=platform,
    )


class Load:
    """A scheduler with made-up requests that never end by themselves."""

    def __init__(self, running: int, platform: Literal["cpu", "cuda"]) -> None:
        rows, blocks = max(RUNNING), MAX_LEN // BLOCK_SIZE
        allocator = BlockAllocator(running * blocks + 1, BLOCK_SIZE)
        self.buckets = buckets_of(platform)
        self.scheduler = Scheduler(
            allocator,
            max_num_seqs=rows,
            max_num_batched_tokens=2048,
            max_prefill_seqs=16,
            prefix_cache=PrefixCache(allocator),
        )
        self.packer = Packer(
            self.buckets, num_blocks=allocator.num_blocks, swap_blocks=blocks, host_pool=None
        )
        self.rng = random.Random(0)
        self.names = iter(range(10**9))
        for _ in range(running):
            self.arrive()
        while self.scheduler.waiting or self.scheduler.queues.prefilling:
            self.step()

    def arrive(self) -> None:
        """Queue a request of a random prompt."""
        length = self.rng.randint(SHORTEST, LONGEST)
        request = Request(
            request_id=f"{next(self.names)}",
            prompt=None,
            prompt_token_ids=self.rng.choices(range(32_000), k=length),
            params=SamplingParams(temperature=0, max_tokens=None),
            max_new_tokens=MAX_LEN - length,
            stop_token_ids=frozenset([32_000]),
            seed=0,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )
        self.scheduler.add(request)

    def replace(self) -> None:
        """Take the oldest request back, and queue another one."""
        self.scheduler.abort(self.scheduler.running[0].request_id)
        self.arrive()

    def step(self) -> tuple[Schedule, StepCost]:
        """Run one step."""
        clock = [time.thread_time()]
        schedule = self.scheduler.schedule()
        clock.append(time.thread_time())
        assert schedule is not None, "the requests never end"
        packed = self.packer.pack(schedule)
        clock.append(time.thread_time())
        sampled = Sampled([self.rng.randrange(32_000) for _ in schedule.decode])
        made = time.thread_time() - clock[-1]
        self.scheduler.update(schedule, sampled)
        clock.append(time.thread_time() - made)
        scheduling, packing, updating = (1e6 * (end - start) for start, end in pairwise(clock))
        return schedule, StepCost(scheduling, packing, updating, sent(packed))


def sent(step: PackedStep) -> int:
    """Bytes of everything that a step hands to the device."""
    calls = [*step.place, *step.prefill, *step.copies] + ([step.decode] if step.decode else [])
    return sum(call.packed.nbytes for call in calls)


def measure(running: int, platform: Literal["cpu", "cuda"], steps: int) -> Result:
    load = Load(running, platform)
    decode, placing = [], []
    for number in range(steps):
        if number % NEWCOMER_EVERY == 0:
            load.replace()
        schedule, cost = load.step()
        if not schedule.placed and not schedule.prefill and len(schedule.decode) == running:
            decode.append(cost)
        elif schedule.placed:
            placing.append(cost)
    return Result(platform, running, StepCost.median(decode), StepCost.median(placing))


def goals(results: list[Result]) -> dict[str, bool]:
    """What a step is meant to cost, and whether it costs no more here."""
    by_size = {(r.platform, r.running): r.decode for r in results}
    met = {}
    for platform in PLATFORMS:
        some, many = by_size[platform, 256], by_size[platform, 1024]
        now = some.schedule_us + some.pack_us
        met[f"{platform}: schedule + packing of 256 sequences under {GOAL_US:,} us: {now:,.0f}"] = (
            now < GOAL_US
        )
        growth = (many.total_us / 1024) / (some.total_us / 256)
        met[
            f"{platform}: a sequence among 1,024 costs under {GOAL_GROWTH} times one among 256: {growth:.2f}"
        ] = growth < GOAL_GROWTH
        rows, most = worst_bytes(results, platform)
        met[
            f"{platform}: a decode step sends under {GOAL_BYTES} bytes a sequence: {most:.0f} at most, with"
            f" {rows:,} of them"
        ] = most < GOAL_BYTES
    return met


def worst_bytes(results: list[Result], platform: Literal["cpu", "cuda"]) -> tuple[int, float]:
    """The number of sequences that a decode step is padded most for, and the bytes for each of them then."""
    sizes = buckets_of(platform).decode
    a_row = max(
        r.decode.num_bytes / next(size for size in sizes if size >= r.running)
        for r in results
        if r.platform == platform
    )
    rows, size = max(
        ((fewer + 1, size) for fewer, size in pairwise([0, *sizes])), key=lambda pair: pair[1] / pair[0]
    )
    return rows, a_row * size / rows


def show(results: list[Result], steps: int) -> None:
    """A row for each platform and number of sequences."""
    names = ("running", "schedule", "pack", "update", "sum", "sum / sequence", "bytes", "bytes / sequence")
    title = f"microseconds and bytes of a step: medians of {steps} steps"
    table = Table("batch sizes", "step", *names, title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for result in results:
        for kind, cost in (("decode", result.decode), ("+ newcomer", result.placing)):
            cells = (cost.schedule_us, cost.pack_us, cost.update_us, cost.total_us)
            table.add_row(
                result.platform,
                kind,
                f"{result.running:,}",
                *(f"{cell:,.0f}" for cell in cells),
                f"{cost.total_us / result.running:,.2f}",
                f"{cost.num_bytes:,.0f}",
                f"{cost.num_bytes / result.running:,.0f}",
                end_section=kind != "decode" and result.running == RUNNING[-1],
            )
    Console(width=max(110, Console().width)).print(table)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Steps = Annotated[int, typer.Option(help="Steps of each load.", min=20)]


def main(steps: Steps = 400, as_json: AsJson = False) -> None:
    """Measure the host's part of a step."""
    results = [measure(running, platform, steps) for platform in PLATFORMS for running in RUNNING]
    met = goals(results)
    if as_json:
        print(json.dumps({"steps": steps, "results": [asdict(r) for r in results], "goals": met}))
        return
    show(results, steps)
    for goal, is_met in met.items():
        print(f"{'met    ' if is_met else 'NOT MET'}  {goal}")


if __name__ == "__main__":
    typer.run(main)
