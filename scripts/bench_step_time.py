#!/usr/bin/env python
"""How long the engine's steps take on this machine, as one line through them, for `paged-jax simulate`.

    scripts/bench_step_time.py [--model PATH] [--requests 24] [--threads N] [--quick] [--json]

Requests of random lengths, of which no two begin alike, run through the engine once to warm it up and once to
be timed, all there from the start. Every step tells what it computed, what it read and how long it took, host
and device. A line with no negative coefficient is fitted to them by least squares:

    seconds = fixed + per_token x tokens computed + per_cached_token x cached tokens read

What is printed last is the option that gives it to the simulator. Beside it: how well the line describes the
steps, and how long the same requests take by the simulator with it, over how long they took. On a CPU a step
computes its padding too, so its time jumps where a bucket ends and the line runs between: good for sums, not
for single steps. Swapping is not timed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from bench_engine import Job, lengths_of, make_jobs
from cpu_threads import take_threads
from demo_model import demo_model
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls  # jax depends on it

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from paged_jax import LLM, SamplingParams  # noqa: E402  (after the path)
from paged_jax.sim_request import SimRequest  # noqa: E402
from paged_jax.simulator import PagedOptions, Simulation  # noqa: E402
from paged_jax.step_time import StepTime  # noqa: E402


class TimedStep(NamedTuple):
    """What a step computed and read, in tokens, and its seconds."""

    tokens: int
    kv_tokens: int
    seconds: float


class Fit(NamedTuple):
    """A line through steps: explained, share of their variance; median_error, of a step's own time."""

    time: StepTime
    explained: float
    median_error: float


def fit(steps: list[TimedStep]) -> Fit:
    """The line of least squares without negative coefficients."""
    table = np.array(steps, float)
    inputs = np.column_stack([np.ones(len(table)), table[:, :2]])
    seconds = table[:, 2]
    scale = inputs.max(axis=0).clip(1)
    coefficients = nnls(inputs / scale, seconds)[0] / scale
    missed = inputs @ coefficients - seconds
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return Fit(
        StepTime(max(float(coefficients[0]), 1e-9), float(coefficients[1]), float(coefficients[2])),
        float(1 - (missed**2).sum() / spread) if spread else 1.0,
        float(np.median(np.abs(missed) / seconds)),
    )


def timed_steps(llm: LLM, jobs: list[Job]) -> list[TimedStep]:
    """One run of all jobs, step by step."""
    engine, steps = llm.engine, []
    for index, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.num_tokens, ignore_eos=True)
        engine.add(engine.make_request(f"{index}", {"prompt_token_ids": job.prompt}, params))
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds, last = time.perf_counter() - start, engine.last_step
        assert last is not None, "a step was made"
        if last.generated_tokens or last.prefill_tokens:
            computed = last.generated_tokens + last.prefill_tokens
            steps.append(TimedStep(computed, last.blocks.stored_tokens, seconds))
    return steps


def simulated_seconds(llm: LLM, jobs: list[Job], step_time: StepTime) -> float:
    """The same jobs by the simulator."""
    scheduler = llm.engine.scheduler
    options = PagedOptions(
        num_blocks=scheduler.allocator.num_blocks,
        block_size=scheduler.allocator.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_prefill_seqs=scheduler.max_prefill_seqs,
    )
    requests = [SimRequest(f"{n}", 0.0, len(job.prompt), job.num_tokens) for n, job in enumerate(jobs)]
    return Simulation(requests, options, step_time).run().series.total_seconds


Model = Annotated[
    Path | None, typer.Option(help="A model's directory or GGUF file; default: the demo model.")
]
Requests = Annotated[int, typer.Option(help="How many.", min=2)]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all.", min=0)]
Quick = Annotated[bool, typer.Option("--quick", help="8 requests in a short context.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def main(
    model: Model = None,
    requests: Requests = 24,
    threads: Threads = 0,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time the engine's steps and fit a line to them."""
    take_threads(threads)
    count = 8 if quick else requests
    lengths = lengths_of(None, count) // (4 if quick else 1) + 1
    longest = int(lengths.sum(axis=1).max())
    with LLM(
        model or demo_model(),
        max_model_len=longest,
        max_num_seqs=count,
        kv_cache_gib=0.5,
        enable_prefix_caching=False,
    ) as llm:
        text = llm.tokenizer.encode((ROOT / "README.md").read_text())
        jobs = make_jobs(lengths, text)
        timed_steps(llm, jobs)
        steps = timed_steps(llm, jobs)
        found = fit(steps)
        measured = sum(step.seconds for step in steps)
        simulated = simulated_seconds(llm, jobs, found.time)
    line = found.time
    option = f"--step-time {line.fixed:.4g},{line.per_token:.4g},{line.per_kv_token:.4g}"
    if as_json:
        record = {"steps": len(steps), "option": option, "explained": found.explained}
        record |= {"median_error": found.median_error, "measured_s": measured, "simulated_s": simulated}
        print(json.dumps(record))
        return
    table = Table("", "value", title=f"{len(steps)} steps of {count} requests")
    table.columns[1].justify = "right"
    for name, value in (
        ("fixed, ms a step", f"{1e3 * line.fixed:.2f}"),
        ("ms a token computed", f"{1e3 * line.per_token:.3f}"),
        ("µs a cached token read", f"{1e6 * line.per_kv_token:.3f}"),
        ("variance explained", f"{found.explained:.1%}"),
        ("median error of a step", f"{found.median_error:.1%}"),
        ("measured, s", f"{measured:.2f}"),
        ("simulated / measured", f"{simulated / measured:.3f}"),
    ):
        table.add_row(name, value)
    Console().print(table)
    print(option)


if __name__ == "__main__":
    typer.run(main)
