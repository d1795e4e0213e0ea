"""Plots of simulated runs, for a results page: readable in print, and by those who see fewer colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_jax.comparison import Run, Variant
from paged_jax.errors import InvalidArgument
from paged_jax.sim_series import StepSeries
from paged_jax.tail_waste import TailWaste

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most kinds of colour vision tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, "#D55E00", "#56B4E9", "#CC79A7", GREY)
MAX_POINTS = 1500


def check_can_plot(folder: Path) -> None:
    """Make the folder. InvalidArgument, before there is anything to draw, without it or matplotlib."""
    _pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument.of(
            "--plot", str(folder), f"a directory to draw into ({error.strerror})"
        ) from error


def plot_runs(runs: Sequence[Run], lengths: np.ndarray, slots: int, folder: Path) -> list[Path]:
    """Memory over time by strategy, utilization, waste of last blocks, concurrency. Returns the files.

    Runs that recompute for free are in the last one alone: what they hold is hardly another.
    """
    pyplot = _pyplot()
    check_can_plot(folder)
    costing = [run for run in runs if not run.variant.free_recompute]
    first: dict[Variant, Run] = {}
    for run in costing:
        first.setdefault(_kind(run), run)
    shown = list(first.values())
    written = []
    for name, rows, draw in (
        ("memory", len(shown), lambda figure: _memory(figure, shown, slots)),
        ("utilization", 1, lambda figure: _utilization(figure.subplots(), costing)),
        ("waste", 1, lambda figure: _waste(figure.subplots(), lengths)),
        ("concurrency", 1, lambda figure: _concurrency(figure.subplots(), runs)),
    ):
        figure = pyplot.figure(figsize=(8, 4.5 if rows == 1 else 1.6 * rows + 1.2), layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidArgument(
            "--plot needs matplotlib: pip install matplotlib, or this package as '.[plot]'."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def thinned(series: StepSeries, *names: str) -> list[np.ndarray]:
    """Columns at as many evenly spaced times as a plot has room for; the first is the time in seconds."""
    if len(series) <= MAX_POINTS:
        at = np.arange(len(series))
    else:
        times = np.linspace(series.start[0], series.start[-1], MAX_POINTS)
        at = np.searchsorted(series.start, times, side="right") - 1
    return [series.start[at], *(getattr(series, name)[at] for name in names)]


def _memory(figure: Figure, runs: Sequence[Run], slots: int) -> None:
    """One above the other, over the same time."""
    all_axes = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    for run, axes in zip(runs, all_axes, strict=True):
        time, reserved, written, ahead = thinned(run.series, "reserved", "written", "ahead")
        axes.stackplot(
            time,
            written,
            ahead,
            reserved - written - ahead,
            labels=["holds a token", "reserved for later", "never written"],
            colors=[BLUE, ORANGE, GREY],
        )
        axes.axhline(slots, color="black", linewidth=1, linestyle="--", label="all of the memory")
        axes.set_title(run.summary.name, loc="left", fontsize="medium")
    all_axes[-1].set_xlabel("time (s)")
    figure.supylabel("slots (tokens)")
    figure.legend(
        *all_axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False
    )


def _utilization(axes: Axes, runs: Sequence[Run]) -> None:
    for place, run in enumerate(runs):
        running, reserved, written = thinned(run.series, "running", "reserved", "written")[1:]
        busy = reserved > 0
        axes.plot(
            running[busy],
            written[busy] / reserved[busy],
            "osv^D<>pX*hP"[place % 12],
            color=COLOURS[place % len(COLOURS)],
            markersize=3,
            alpha=0.4,
            label=run.summary.name,
        )
    axes.set(
        xlabel="sequences that hold memory",
        ylabel="share of their slots that hold a token",
        ylim=(0, 1.02),
        title="Utilization and concurrency",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=2)


def _waste(axes: Axes, lengths: np.ndarray) -> None:
    sizes = [8, 16, 32, 64, 128]
    waste = [TailWaste.of(lengths, size) for size in sizes]
    curves: list[tuple[list[float], dict[str, Any], str]] = [
        ([w.aggregate for w in waste], {"color": BLUE, "marker": "o"}, "all slots together"),
        ([w.per_request for w in waste], {"color": ORANGE, "marker": "s"}, "mean over requests"),
        ([w.rule for w in waste], {"color": GREY, "linestyle": "--"}, "B / (2 x mean length)"),
        ([w.closer_rule for w in waste], {"color": GREEN, "linestyle": ":"}, "(B-1) / (2 x mean + B-1)"),
    ]
    for values, style, label in curves:
        axes.plot(sizes, [100 * value for value in values], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(
        xlabel="block size B (tokens)", ylabel="wasted (%)", ylim=(0, None), title="Waste of last blocks"
    )
    axes.legend(frameon=False)


def _concurrency(axes: Axes, runs: Sequence[Run]) -> None:
    names = [run.summary.name for run in runs]
    means = [run.summary.concurrency_mean for run in runs]
    colors = [BLUE if run.summary.block_size else ORANGE for run in runs]
    bars = axes.barh(names, means, color=colors)
    axes.bar_label(bars, [f"{mean:.1f}" for mean in means], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="sequences that hold memory, mean over time", title="Concurrency by strategy")


def _kind(run: Run) -> Variant:
    """What it is but for its block size, which a picture of memory hardly shows."""
    return replace(run.variant, block_size=None)
