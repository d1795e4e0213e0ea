"""Progress on a terminal; silent where standard error is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def _progress(*columns: ProgressColumn, enabled: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not (enabled and console.is_terminal)
    )


@contextmanager
def track_weights(enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar over the arrays of a model; yields the callback that moves it."""
    with _progress(TextColumn("loading weights"), BarColumn(), MofNCompleteColumn(), enabled=enabled) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def track_programs(enabled: bool) -> Iterator[Callable[[int, int, int], None]]:
    """A bar over the programs that are compiled; its callback takes (done, in all, found in the cache)."""
    hits = TextColumn("{task.fields[hits]} from the cache")
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), hits, TimeRemainingColumn())
    with _progress(*columns, enabled=enabled) as bar:
        task = bar.add_task("programs", total=None, hits=0)

        def update(done: int, total: int, hits: int) -> None:
            bar.update(task, completed=done, total=total, hits=hits)

        yield update


@contextmanager
def track_requests(total: int, enabled: bool) -> Iterator[Callable[[int, int, float], None]]:
    """A bar over finished requests; its callback takes (finished, tokens generated, block_utilization)."""
    text = TextColumn("{task.fields[speed]:.0f} tokens/s, blocks {task.fields[utilization]:.0%} full")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), text)
    start = monotonic()
    with _progress(*columns, enabled=enabled) as bar:
        task = bar.add_task("requests", total=total, speed=0.0, utilization=1.0)

        def update(finished: int, tokens: int, utilization: float) -> None:
            speed = tokens / max(monotonic() - start, 1e-6)
            bar.update(task, completed=finished, speed=speed, utilization=utilization)

        yield update


@contextmanager
def track_simulation(num_requests: int, enabled: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar over the requests of one run after another; its callback takes (which run, requests ended)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _progress(*columns, enabled=enabled) as bar:
        tasks: dict[str, TaskID] = {}

        def update(run: str, ended: int) -> None:
            if run not in tasks:
                tasks[run] = bar.add_task(run, total=num_requests)
            bar.update(tasks[run], completed=ended)

        yield update
