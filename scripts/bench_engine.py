#!/usr/bin/env python
"""Requests of mixed lengths through the engine, beside transformers in the same process.

    scripts/bench_engine.py [--requests 32] [--trace FILE.csv] [--threads N] [--quick] [--json]

Every request has its own prompt and number of tokens to generate, greedily, past any end token, so that
both sides generate the same number. The lengths come from a trace (a CSV with the columns prompt_tokens and
output_tokens), scaled down so that the longest of its first N requests has a prompt of 256 tokens and an
answer of 64; without one they are random. All requests are there from the start. In a second scenario each
prompt begins with the same 192 tokens, as with a system prompt; its blocks are computed once, where
transformers computes them for every request.

Ours is one call of `LLM.generate`, text and all, with a context of 512 tokens, a pool of 1 GiB and otherwise
the default options (--quick: as many rows as requests); each run starts with an empty prefix cache.
transformers is at its best: calls of the model's forward and an argmax, no `generate()`
around them, sdpa attention, a dynamic cache, left padding, in batches of 4, 8 or 16 requests sorted by the
length of the prompt or of the answer, of which the fastest run counts; a batch runs until its longest answer
is done. Both sides use float32 and bfloat16 weights and have run once before they are timed. Runs take turns,
and the fastest of each counts. Needs `pip install -e '.[reference]'` for transformers. On a machine with
other work, give --threads 1: threads that wait for each other slow down many times over. The very first run
compiles programs for minutes, and keeps them; --quick compiles only those that it uses, and runs each side
once: its ratio varies by a quarter from one time to the next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from cpu_threads import take_threads
from demo_model import demo_model
from request_lengths import cut_prompt, read_lengths
from rich.console import Console
from rich.table import Table
from static_batches import StaticBatches, load_static_batches

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests has folders named as the packages

LONGEST_PROMPT, LONGEST_ANSWER, SHARED = 256, 64, 192
DTYPES = ("float32", "bfloat16")


class Job(NamedTuple):
    """A request: its prompt as ids, and how many tokens it generates."""

    prompt: list[int]
    num_tokens: int


class Run(NamedTuple):
    """One run of all jobs: seconds, and how the host and the device shared them, where that is known."""

    seconds: float
    note: str = ""


def lengths_of(trace: Path | None, count: int) -> np.ndarray:
    """Prompt and answer tokens of each request, int [count, 2]."""
    if trace is None:
        rng = np.random.default_rng(0)
        limits = np.array([LONGEST_PROMPT, LONGEST_ANSWER])
        return (limits * rng.beta(1.2, 2.5, (count, 2))).astype(int).clip(4, limits)
    lengths = read_lengths(trace, count)
    factors = np.array([LONGEST_PROMPT, LONGEST_ANSWER]) / lengths.max(axis=0)
    return np.rint(lengths * np.minimum(factors, 1)).astype(int).clip(1)


def make_jobs(lengths: np.ndarray, text: list[int]) -> list[Job]:
    """Prompts cut from a text at places of their own, so that no two begin alike."""
    jobs = []
    for index, (prompt, answer) in enumerate(lengths.tolist()):
        jobs.append(Job(cut_prompt(text, prompt, index), answer))
    return jobs


class Ours:
    """paged_jax, as its users call it."""

    def __init__(self, model: Path, dtype: str, rows: int, warm_up: bool) -> None:
        from paged_jax import LLM

        start = time.perf_counter()
        self.name = f"paged_jax {dtype}"
        longest = LONGEST_PROMPT + LONGEST_ANSWER + SHARED
        self.llm = LLM(
            model,
            dtype=dtype,
            max_model_len=longest,
            kv_cache_gib=1.0,
            max_num_seqs=rows,
            warm_up=warm_up,
            use_tqdm=False,
        )
        self.load_seconds = time.perf_counter() - start

    def run(self, jobs: list[Job]) -> Run:
        from paged_jax import SamplingParams

        engine = self.llm.engine
        engine.allocator.forget_cached()
        before = engine.totals.device_seconds, engine.totals.prefix_hit_tokens, engine.totals.steps
        start = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": job.prompt} for job in jobs],
            [SamplingParams(temperature=0, max_tokens=job.num_tokens, ignore_eos=True) for job in jobs],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == [job.num_tokens for job in jobs]
        device = engine.totals.device_seconds - before[0]
        hits = engine.totals.prefix_hit_tokens - before[1]
        steps = engine.totals.steps - before[2]
        return Run(
            seconds,
            f"{steps} steps, {hits} prompt tokens found; {100 * (1 - device / seconds):.1f} % on the host",
        )


def show(results: dict[str, dict[str, Run]], tokens: dict[str, tuple[int, int]]) -> None:
    """Seconds and generated tokens a second, a table for each scenario."""
    for scenario, runs in results.items():
        prompt, answer = tokens[scenario]
        table = Table(
            "", "s", "tokens/s", "", title=f"{scenario}: {prompt:,} prompt, {answer:,} generated tokens"
        )
        table.columns[1].justify = table.columns[2].justify = "right"
        for name, run in runs.items():
            table.add_row(name, f"{run.seconds:.2f}", f"{answer / run.seconds:,.1f}", run.note)
        found = ratio(runs)
        if found is not None:
            table.add_row("best against best", f"{found:.2f}x", "", style="bold")
        Console(width=max(110, Console().width)).print(table)
    print("n x: transformers takes n times as long as paged_jax.")


def ratio(runs: dict[str, Run]) -> float | None:
    """transformers' time over ours, the best of each; None without transformers."""
    ours = [run.seconds for name, run in runs.items() if name.startswith("paged_jax")]
    theirs = [run.seconds for name, run in runs.items() if not name.startswith("paged_jax")]
    return min(theirs) / min(ours) if theirs else None


def timed(side: StaticBatches, jobs: list[Job]) -> Run:
    return Run(side.run(jobs))


def compare(jobs: list[Job], ours: list[Ours], theirs: list[StaticBatches], rounds: int) -> dict[str, Run]:
    """The fastest run of each side."""
    sides: dict[str, Callable[[list[Job]], Run]] = {side.name: side.run for side in ours}
    sides |= {side.name: partial(timed, side) for side in theirs}
    best: dict[str, Run] = {}
    for _ in range(rounds):
        for name, run in sides.items():
            result = run(jobs)
            print(f"{result.seconds:7.2f} s  {name}", file=sys.stderr)
            if name not in best or result.seconds < best[name].seconds:
                best[name] = result
    return best


def make_scenarios(
    count: int, trace: Path | None, encode: Callable[[str], list[int]]
) -> dict[str, list[Job]]:
    """The requests of each scenario."""
    from support.golden_prompts import CODE, LETTER, REPORT

    jobs = make_jobs(lengths_of(trace, count), encode("\n\n".join((LETTER, REPORT, CODE))))
    system = encode(REPORT + LETTER)[:SHARED]
    assert len(system) == SHARED
    return {
        f"{count} requests": jobs,
        f"{count} requests after a shared prompt of {SHARED} tokens": [
            Job(system + job.prompt, job.num_tokens) for job in jobs
        ],
    }


def warm_up(ours: list[Ours], theirs: list[StaticBatches], scenarios: dict[str, list[Job]]) -> str:
    """A first run of everything, which may compile; what was done before the timing, and how long it took."""
    told = []
    for side in ours:
        runs = [side.run(jobs) for jobs in scenarios.values()]
        told.append(f"{side.name} {side.load_seconds + sum(run.seconds for run in runs):.1f} s")
    some = next(iter(scenarios.values()))[:4]
    for own in {id(own.model): own for own in theirs}.values():
        told.append(f"{own.name.split(',')[0]} {own.run(some):.1f} s and loading")
    return "ready after " + ", ".join(told)


Requests = Annotated[int | None, typer.Option(help="How many (32; 12 with --quick).", min=2)]
Trace = Annotated[Path | None, typer.Option(help="CSV of request lengths.", exists=True, dir_okay=False)]
Threads = Annotated[int | None, typer.Option(help="CPU cores that either side may use (all).", min=1)]
Quick = Annotated[bool, typer.Option(help="Fewer requests and static batches, each run once.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def main(
    requests: Requests = None,
    trace: Trace = None,
    threads: Threads = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare whole workloads with transformers."""
    threads = take_threads(threads)
    count = requests or (12 if quick else 32)
    path = demo_model()
    ours = [Ours(path, dtype, rows=count if quick else 64, warm_up=not quick) for dtype in DTYPES]
    theirs = load_static_batches(path, threads, ("answers",) if quick else ("prompts", "answers"))
    scenarios = make_scenarios(count, trace, ours[0].llm.tokenizer.encode)
    source = "random" if trace is None else f"the first of {trace.name}, scaled"
    told = [f"lengths: {source}; {threads} CPU threads", warm_up(ours, theirs, scenarios)]
    if not theirs:
        told.append("transformers is not installed: pip install -e '.[reference]' to compare.")
    results = {name: compare(jobs, ours, theirs, 1 if quick else 2) for name, jobs in scenarios.items()}
    if as_json:
        data = {
            name: {
                "seconds": {side: run.seconds for side, run in runs.items()},
                "generated_tokens": sum(job.num_tokens for job in scenarios[name]),
                "ratio": ratio(runs),
            }
            for name, runs in results.items()
        }
        print(json.dumps({"about": told, "scenarios": data}))
        return
    tokens = {
        name: (sum(len(job.prompt) for job in jobs), sum(job.num_tokens for job in jobs))
        for name, jobs in scenarios.items()
    }
    print("\n".join(told))
    show(results, tokens)


if __name__ == "__main__":
    typer.run(main)
