"""Tables of simulated runs, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paged_jax.capacity import format_bytes
from paged_jax.request_trace import Trace
from paged_jax.sim_dict import Compared
from paged_jax.sim_setting import Ground
from paged_jax.sim_summary import Summary
from paged_jax.tail_waste import TailWaste

Column = tuple[str, Callable[[Summary], str]]


def _count(value: int) -> str:
    return f"{value:,}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _swapped(one: Summary) -> str:
    if one.swapped_bytes:
        return format_bytes(one.swapped_bytes)
    return _count(one.swapped_blocks)


def _expected(one: Summary) -> str:
    return "-" if one.expected_utilization is None else f"{one.expected_utilization:.1%}"


RUNNING: tuple[Column, ...] = (
    ("running\nmean", lambda one: f"{one.concurrency_mean:.1f}"),
    ("running\npeak", lambda one: _count(one.concurrency_peak)),
    ("tokens/s", lambda one: f"{one.tokens_per_second:,.0f}"),
    ("waits s\np50", lambda one: _seconds(one.queue_delay_p50)),
    ("waits s\np99", lambda one: _seconds(one.queue_delay_p99)),
)
MEMORY: tuple[Column, ...] = (
    ("holds a\ntoken", lambda one: f"{one.utilization:.1%}"),
    ("1 - B/\n(2 mean)", _expected),
    ("for\nlater", lambda one: f"{one.reservation_waste:.1%}"),
    ("never\nwritten", lambda one: f"{one.internal_waste:.1%}"),
    ("holes", lambda one: f"{one.external_waste:.1%}"),
)
EVENTS: tuple[Column, ...] = (
    ("set\nback", lambda one: _count(one.preemptions)),
    ("tokens\nagain", lambda one: _count(one.recomputed_tokens)),
    ("swapped", _swapped),
    ("blocks\ncopied", lambda one: _count(one.cow_copies)),
    ("prefix\nhits", lambda one: f"{one.prefix_hit_rate:.1%}"),
)


def running_table(summaries: Sequence[Summary], title: str) -> Table:
    """Sequences that run at once, speed and waiting, a row for each strategy and block size."""
    return _table(summaries, title, RUNNING)


def memory_table(summaries: Sequence[Summary]) -> Table:
    """Where the slots went that were kept from others, as shares of them, means over time."""
    return _table(summaries, "slots that were kept from others", MEMORY)


def events_table(summaries: Sequence[Summary]) -> Table | None:
    """What preemption, copies and shared prompts came to, of the paged runs; None where there are none."""
    paged = [one for one in summaries if one.block_size is not None]
    return _table(paged, "set back, copied and shared", EVENTS) if paged else None


def _table(summaries: Sequence[Summary], title: str, columns: Sequence[Column]) -> Table:
    table = _empty(title, "strategy", *(name for name, _ in columns))
    for one in summaries:
        table.add_row(one.name, *(shown(one) for _, shown in columns))
    return table


def _empty(title: str, *columns: str) -> Table:
    """Narrow enough for 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def tail_table(lengths: np.ndarray, block_sizes: Sequence[int]) -> Table:
    """Waste of last blocks at full length, beside the two rules for it."""
    table = _empty(
        "waste of partly filled last blocks, at full length",
        "block\nsize",
        "all slots",
        "B/\n(2 mean)",
        "(B-1)/\n(2 mean + B-1)",
        "mean of\nrequests",
    )
    for size in block_sizes:
        waste = TailWaste.of(lengths, size)
        shares = (waste.aggregate, waste.rule, waste.closer_rule, waste.per_request)
        table.add_row(str(size), *(f"{share:.2%}" for share in shares))
    return table


def print_simulation(
    requests: Trace, ground: Ground, compared: Sequence[Compared], block_sizes: Sequence[int], seconds: float
) -> None:
    """All tables, and what they are of. seconds: that the runs took."""
    console = Console(highlight=False, markup=False, emoji=False)
    say = partial(console.print, soft_wrap=True)
    mean = f"{requests.prompt_tokens.mean():,.0f} + {requests.output_tokens.mean():,.0f} tokens on average"
    say(
        f"{requests.source}: {len(requests):,} requests, {mean}"
        + (f"; {requests.note}" * bool(requests.note))
    )
    if requests.skipped:
        first = requests.skipped[0]
        say(f"{len(requests.skipped):,} skipped, the first of them {first.place}: {first.reason}")
    for note in ground.notes:
        say(note)
    for one in compared:
        say("")
        for count, why in one.work.dropped:
            say(f"{count:,} requests dropped for all strategies: {why}")
        summaries = [run.summary for run in one.runs]
        console.print(running_table(summaries, f"{len(one.work.requests):,} requests, the same for all"))
        console.print(memory_table(summaries))
        if (events := events_table(summaries)) is not None:
            console.print(events)
        console.print(tail_table(one.work.final_tokens, block_sizes))
        most = ground.setting.max_num_seqs
        if any(summary.concurrency_peak >= most for summary in summaries):
            say(f"--max-num-seqs held some of them back: no more than {most:,} sequences ran at once")
    say(_speed([run.summary for one in compared for run in one.runs], seconds))


def _speed(summaries: Sequence[Summary], seconds: float) -> str:
    prompts = sum(one.prompt_tokens + one.recomputed_tokens for one in summaries)
    generated = sum(one.generated_tokens for one in summaries)
    return (
        f"simulated {prompts:,} prompt and {generated:,} generated tokens in {seconds:.1f} s:"
        f" {(prompts + generated) / max(seconds, 1e-9):,.0f} a second"
    )
