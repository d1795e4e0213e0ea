#!/usr/bin/env python
"""How fast the simulator is: tokens that it accounts for in a second of one core.

    scripts/bench_simulate.py [--trace FILE ...] [--pool-tokens 400000] [--quick] [--json]

First the allocator's side alone: 256 tables that grow by one call up to each next block border and are freed,
beside the same one token at a time. Then whole runs of the paged strategy in blocks of 16, over requests of
600 + 300 tokens on average that come at a pace that keeps so many of them running, and over the traces, at
their own pace: with quiet stretches taken at once, and every step by itself. Generated tokens are each a
step of a sequence; prompt tokens come on top, since they are given slots as well. Times are of the thread on
its core, the best of three (a trace: once).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from paged_jax.block_allocator import BlockAllocator  # noqa: E402  (after the path)
from paged_jax.block_table import BlockTable  # noqa: E402
from paged_jax.request_trace import Lengths, Trace, made_up_trace, read_trace  # noqa: E402
from paged_jax.simulator import PagedOptions, Simulation  # noqa: E402
from paged_jax.step_time import StepTime  # noqa: E402
from paged_jax.workload import make_workload  # noqa: E402

BLOCK_SIZES = (8, 16, 32, 128)
TABLES, LENGTH, BLOCK_SIZE = 256, 1024, 16
STEP = StepTime(fixed=0.01)
MEAN_PROMPT, MEAN_ANSWER = 600, 300


@dataclass
class Growth:
    """Tokens a second that tables of blocks of this size append and give back."""

    block_size: int
    by_block: float
    by_token: float


@dataclass
class Speed:
    """One simulation. jumping, stepping: seconds with quiet stretches taken at once, and without."""

    name: str
    mean_running: float
    generated_tokens: int
    prompt_tokens: int
    jumping: float
    stepping: float | None


def best(task: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of so many runs."""
    found = []
    for _ in range(times):
        start = time.thread_time()
        task()
        found.append(time.thread_time() - start)
    return min(found)


def grow(num_tables: int, block_size: int, tokens_at_once: int) -> None:
    """Fill all tables in turn, then free them."""
    allocator = BlockAllocator(num_tables * LENGTH // block_size + 1, block_size)
    tables = [BlockTable(allocator, f"{number}") for number in range(num_tables)]
    for _ in range(LENGTH // tokens_at_once):
        for table in tables:
            table.append(tokens_at_once)
    for table in tables:
        table.release()
    assert allocator.num_free_blocks == allocator.num_blocks - 1


def growth(block_size: int, num_tables: int = TABLES) -> Growth:
    """Both ways to append."""
    tokens = num_tables * LENGTH
    by_block, by_token = (best(partial(grow, num_tables, block_size, size)) for size in (block_size, 1))
    return Growth(block_size, tokens / by_block, tokens / by_token)


def simulated(name: str, trace: Trace, slots: int, *, steps_too: bool, times: int) -> Speed:
    """A trace with jumps, and without where that is asked for."""
    work = make_workload(trace, slots=slots, block_sizes=[BLOCK_SIZE])
    options = PagedOptions(num_blocks=slots // BLOCK_SIZE + 1, block_size=BLOCK_SIZE, max_num_seqs=1024)
    outcome = Simulation(work.requests, options, STEP).run()  # and what follows is warm
    return Speed(
        name,
        outcome.series.mean("running"),
        outcome.generated_tokens,
        outcome.prompt_tokens + outcome.recomputed_tokens,
        best(lambda: Simulation(work.requests, options, STEP).run(), times),
        best(lambda: Simulation(work.requests, options, STEP, jumps=False).run(), 1) if steps_too else None,
    )


Traces = Annotated[list[Path] | None, typer.Option("--trace", help="Real lengths; may be given again.")]
PoolTokens = Annotated[int, typer.Option(help="Tokens that the memory holds.", min=10_000)]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer tables and requests, each run once.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def main(
    trace: Traces = None, pool_tokens: PoolTokens = 400_000, quick: Quick = False, as_json: AsJson = False
) -> None:
    """Time the simulator."""
    grown = [growth(size, TABLES // (16 if quick else 1)) for size in BLOCK_SIZES]
    runs = []
    for running in (4, 64) if quick else (4, 16, 64, 256):
        rate = running / (MEAN_ANSWER * STEP.fixed)
        made_up = made_up_trace(
            100 if quick else 2000,
            prompt=Lengths(MEAN_PROMPT, 300),
            output=Lengths(MEAN_ANSWER, 200),
            requests_per_second=rate,
            seed=0,
        ).within(pool_tokens, "the memory", skip_invalid=True)
        runs.append(
            simulated(
                f"{running} at once",
                made_up,
                pool_tokens,
                steps_too=True,
                times=1 if quick else 3,
            )
        )
    for path in trace or ():
        real = read_trace(path).within(pool_tokens, "the memory", skip_invalid=True)
        runs.append(simulated(path.stem, real, pool_tokens, steps_too=False, times=1))
    if as_json:
        print(json.dumps({"growth": list(map(asdict, grown)), "runs": list(map(asdict, runs))}))
        return
    width = max(100, Console().width)
    Console(width=width).print(_growth_table(grown))
    Console(width=width).print(_runs_table(runs))


def _growth_table(grown: list[Growth]) -> Table:
    table = Table("block size", "a block a call", "a token a call", title="tokens a second, taken and freed")
    for one in grown:
        table.add_row(f"{one.block_size}", f"{one.by_block:,.0f}", f"{one.by_token:,.0f}")
    return table


def _runs_table(runs: list[Speed]) -> Table:
    table = Table(
        "requests",
        "running, mean",
        "generated",
        "prompt",
        "seconds",
        "generated/s",
        "all/s",
        "step by step, s",
        title=f"whole simulations, paged in blocks of {BLOCK_SIZE}",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for one in runs:
        whole = one.generated_tokens + one.prompt_tokens
        table.add_row(
            one.name,
            f"{one.mean_running:.1f}",
            f"{one.generated_tokens:,}",
            f"{one.prompt_tokens:,}",
            f"{one.jumping:.2f}",
            f"{one.generated_tokens / one.jumping:,.0f}",
            f"{whole / one.jumping:,.0f}",
            "-" if one.stepping is None else f"{one.stepping:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
