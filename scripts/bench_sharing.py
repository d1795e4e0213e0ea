#!/usr/bin/env python
"""What sharing saves: blocks of samples and beams, and the time of beam searches beside transformers'.

    scripts/bench_sharing.py [--only memory|model|speed] [--requests 100] [--trace FILE.csv] [--threads N]
                             [--quick] [--json]

memory, without a model: samples of a prompt and beam searches run through the engine with made-up scores, two
to six sequences each, in blocks of 16, without prefix caching. The blocks that sharing saves divided by those
that there would be without it, summed over the steps, stand beside what the vLLM paper (arXiv:2309.06180,
section 6.3) has measured on OPT-13B. Its data are stood in for by log-normal lengths with the means of the
Alpaca prompts and answers (19 and 58 tokens) and of ShareGPT's (161 and 338) that the paper gives; the
deviations of their logarithms (0.7 and 0.85, 1.3 and 0.9) are our choice. --trace adds the lengths of a CSV
with the columns prompt_tokens and output_tokens.

model: the same measure for real searches of the demo model, beside made-up ones of the same lengths.

speed: prefill and 32 tokens of 1 to 8 prompts, with 4 or 8 beams each, on the demo model, beside
generate(num_beams=...) in the same process. transformers is at its best: prompts of one length, so that
nothing is padded; sdpa attention, inference mode, a dynamic cache; all prompts in one call or one after the
other, of which the faster counts. Both sides use float32 and bfloat16 weights and take turns; the fastest
run of each counts. In float32 their hypotheses are compared. Without transformers (`pip install -e
'.[reference]'`) ours is shown alone. It takes most of an hour; every figure is printed when it is known.
--quick is a small part of it, each run once, and compiles only what it uses: its ratios vary. On a machine
with other work, give --threads 1: threads that wait for each other slow down many times over, transformers'
most of all (forty times were seen). Beside each time stands how many cores it had.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from beam_speed import NEW_TOKENS, Case, Comparison, OurSearches, TheirSearches, compare
from cpu_threads import take_threads
from demo_model import demo_model
from reference_models import load_reference_models
from request_lengths import cut_prompt
from rich.console import Console
from rich.table import Table
from shared_blocks import WIDTHS, measure_memory, measure_model, memory_table, model_table

if TYPE_CHECKING:
    from paged_jax import LLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests has folders named as the packages

DTYPES = ("float32", "bfloat16")
SHORT, LONG = 80, 1004
GRID = [Case(p, tokens, width) for tokens in (SHORT, LONG) for width in (4, 8) for p in (1, 4, 8)]
QUICK_GRID = [Case(1, SHORT, 4), Case(4, SHORT, 4), Case(1, LONG, 4), Case(1, LONG, 8)]
GOALS = {(SHORT, 4): 1.0, (SHORT, 8): 1.0, (LONG, 4): 2.0, (LONG, 8): 3.0}
"""transformers' time over ours, best against best, by tokens of the prompts and width."""


def demo_text(encode: Callable[[str], list[int]]) -> list[int]:
    """Ids to cut prompts from."""
    from support.golden_prompts import CODE, LETTER, REPORT

    return encode("\n\n".join((LETTER, REPORT, CODE)))


def measure_speed(ours: list[OurSearches], theirs: list[TheirSearches], quick: bool) -> list[Comparison]:
    """All cases; what is known of each is told on the way."""
    text = demo_text(ours[0].llm.tokenizer.encode)
    warm = cut_prompt(text, SHORT, 0)
    for side in theirs:
        side.run([warm], 2)
    grid = QUICK_GRID if quick else GRID
    cases = [(case, [cut_prompt(text, case.tokens, at) for at in range(case.prompts)]) for case in grid]
    found = []
    for comparison in compare(cases, ours, theirs, rounds=1 if quick else 2):
        print(" | ".join(cells_of(comparison)), file=sys.stderr, flush=True)
        found.append(comparison)
    return found


def cells_of(comparison: Comparison) -> list[str]:
    """A row of the table."""
    case, cells = comparison.case, []
    for side in ("paged_jax", "transformers"):
        for dtype in DTYPES:
            run = comparison.fastest(side, dtype)
            cells.append("" if run is None else f"{run.seconds:.2f}")
    for dtype in ("", "float32"):
        ratio = comparison.ratio(dtype)
        cells.append("" if ratio is None else f"{ratio:.2f}x")
    same = comparison.same
    cells.append("" if same is None else "all" if same[0] == same[1] else f"{same[0]} of {same[1]}")
    best = comparison.fastest("paged_jax")
    assert best is not None
    assert best.parts is not None
    prefill, decode, host, saved = best.parts
    cells += [f"{prefill:.2f}", f"{decode:.2f}", f"{host:.3f}", f"{100 * saved:.0f} %"]
    return [f"{case.prompts} x {case.tokens:,}", f"{case.width}", *cells]


def show_speed(found: list[Comparison], threads: int) -> None:
    """A row for each case, and which goals are met."""
    names = ("ours f32", "bf16", "transf. f32", "bf16", "best", "f32", "same in f32")
    parts = ("prefill s", "decode s", "host s", "saved")
    title = f"prefill and {NEW_TOKENS} tokens: seconds, on {threads} CPU threads; right: of our fastest run"
    table = Table("prompts", "beams", *names, *parts, title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for comparison in found:
        table.add_row(*cells_of(comparison))
    print_table(table)
    for goal, is_met in goals(found).items():
        print(f"{'met    ' if is_met else 'NOT MET'}  {goal}")


def goals(found: list[Comparison]) -> dict[str, bool]:
    """What was meant to come out, and whether it did in the worst case; nothing without transformers."""
    met = {}
    for (tokens, width), least in GOALS.items():
        ratios = [c.ratio() for c in found if (c.case.tokens, c.case.width) == (tokens, width)]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            name = f"{tokens:,} tokens, width {width}: {least:.0f}x at least: {min(known):.2f}x"
            met[name] = min(known) >= least
    return met


def print_table(table: Table) -> None:
    Console(width=max(124, Console().width)).print(table)


def load(dtype: str, quick: bool) -> LLM:
    """The demo model, with room for every case."""
    from paged_jax import LLM

    longest = max(LONG + NEW_TOKENS, 640)
    return LLM(
        demo_model(), dtype=dtype, max_model_len=longest, kv_cache_gib=1.0, warm_up=not quick, use_tqdm=False
    )


Part = Literal["memory", "model", "speed"]
Only = Annotated[Part | None, typer.Option(help="One of the three parts (all).")]
Requests = Annotated[int | None, typer.Option(help="Of each made-up workload (100; --quick: 24).", min=1)]
Trace = Annotated[Path | None, typer.Option(help="CSV of request lengths.", exists=True, dir_okay=False)]
Threads = Annotated[int | None, typer.Option(help="CPU cores that either side may use (all).", min=1)]
Quick = Annotated[bool, typer.Option(help="Few requests, and few searches, each run once.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def main(
    only: Only = None,
    requests: Requests = None,
    trace: Trace = None,
    threads: Threads = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure what sharing saves."""
    threads = take_threads(threads)
    data: dict[str, object] = {}
    if only in (None, "memory"):
        count = requests or (24 if quick else 100)
        saved = measure_memory(count, trace)
        data["memory"] = {
            f"{row.lengths.name}, {row.kind}": {
                f"{width}": saving.share for width, saving in zip(WIDTHS, row.savings, strict=True)
            }
            for row in saved
        }
        if not as_json:
            print_table(memory_table(saved, count))
    if only != "memory":
        llm = load("float32", quick)
        if only in (None, "model"):
            shares = measure_model(llm, demo_text(llm.tokenizer.encode), quick)
            data["model"] = shares
            if not as_json:
                print_table(model_table(shares))
        if only in (None, "speed"):
            ours = [OurSearches(llm, "float32"), OurSearches(load("bfloat16", quick), "bfloat16")]
            theirs = [
                TheirSearches(model, dtype, at_once)
                for dtype, model in load_reference_models(demo_model(), threads).items()
                for at_once in ((None,) if quick else (None, 1))
            ]
            found = measure_speed(ours, theirs, quick)
            data["speed"] = [
                {
                    "case": comparison.case._asdict(),
                    "seconds": {name: run.seconds for name, run in comparison.runs.items()},
                    "same": comparison.same,
                    "parts": {
                        name: run.parts._asdict() for name, run in comparison.runs.items() if run.parts
                    },
                }
                for comparison in found
            ]
            if not as_json:
                show_speed(found, threads)
                print("n x: transformers takes n times as long as paged_jax.")
    if as_json:
        print(json.dumps({"threads": threads, **data}))


if __name__ == "__main__":
    typer.run(main)
