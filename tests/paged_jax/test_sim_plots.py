"""Plots of simulated runs: what is drawn, not only that a file is there."""

import builtins

import numpy as np
import pytest
from matplotlib import pyplot

from paged_jax.comparison import STRATEGIES, Setting, run_all, variants
from paged_jax.errors import InvalidArgument
from paged_jax.sim_plots import COLOURS, MAX_POINTS, plot_runs, thinned
from paged_jax.sim_series import SeriesBuilder
from paged_jax.step_time import StepTime
from paged_jax.tail_waste import TailWaste
from paged_jax.workload import make_workload

from .test_workload import trace_of

SIZES = [8, 16, 32, 64, 128]


@pytest.fixture(scope="module")
def work():
    rows = [(0.02 * number, 30 + 3 * (number % 7), 20 + number % 11) for number in range(30)]
    return make_workload(
        trace_of(*rows), slots=400, block_sizes=[8, 16], reservations=["max", "pow2", "oracle"]
    )


@pytest.fixture(scope="module")
def runs(work):
    setting = Setting(400, StepTime(fixed=0.01), max_num_seqs=50)
    return list(run_all(list(variants(STRATEGIES, [8, 16], ["recompute"])), work, setting))


@pytest.fixture
def figures(monkeypatch, tmp_path, work, runs):
    """The figures by the names of their files, kept from being closed."""
    kept = {}
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    paths = plot_runs(runs, work.final_tokens, 400, tmp_path / "new" / "folder")
    for path, number in zip(paths, pyplot.get_fignums(), strict=True):
        kept[path.name] = pyplot.figure(number)
        assert path.read_bytes().startswith(b"\x89PNG")
    yield kept
    monkeypatch.undo()
    pyplot.close("all")


def test_there_are_four_plots_and_every_axis_is_labelled(figures):
    assert list(figures) == ["memory.png", "utilization.png", "waste.png", "concurrency.png"]
    for name, figure in figures.items():
        for axes in figure.axes:
            title = axes.get_title() or axes.get_title(loc="left")
            assert title, name
    memory = figures["memory.png"]
    assert (memory.axes[-1].get_xlabel(), memory.get_supylabel()) == ("time (s)", "slots (tokens)")
    (waste,) = figures["waste.png"].axes
    assert (waste.get_xlabel(), waste.get_ylabel()) == ("block size B (tokens)", "wasted (%)")
    for name in ("utilization.png", "concurrency.png"):
        assert "sequences that hold memory" in figures[name].axes[0].get_xlabel()


def test_memory_is_drawn_by_strategy_and_the_layers_end_at_what_is_reserved(figures, runs):
    titles = [axes.get_title(loc="left") for axes in figures["memory.png"].axes]
    assert titles[0] == runs[0].summary.name
    assert [title for title in titles if title.startswith("paged 16")] == []
    assert titles[-1] == "contiguous-oracle, no holes"
    layers = figures["memory.png"].axes[0].collections
    tops = [layer.get_datalim(figures["memory.png"].axes[0].transData).y1 for layer in layers]
    assert tops[-1] == runs[0].series.reserved.max()
    legend = [text.get_text() for text in figures["memory.png"].legends[0].get_texts()]
    assert legend == ["holds a token", "reserved for later", "never written", "all of the memory"]


def test_bars_are_as_long_as_the_mean_concurrency(figures, runs):
    axes = figures["concurrency.png"].axes[0]
    assert [bar.get_width() for bar in axes.patches] == [run.summary.concurrency_mean for run in runs]
    assert [label.get_text() for label in axes.get_yticklabels()] == [run.summary.name for run in runs]


def test_waste_is_drawn_over_block_sizes_beside_both_rules(figures, work):
    lines = {line.get_label(): line for line in figures["waste.png"].axes[0].get_lines()}
    waste = [TailWaste.of(work.final_tokens, size) for size in SIZES]
    for label, values in (
        ("all slots together", [one.aggregate for one in waste]),
        ("mean over requests", [one.per_request for one in waste]),
        ("B / (2 x mean length)", [one.rule for one in waste]),
        ("(B-1) / (2 x mean + B-1)", [one.closer_rule for one in waste]),
    ):
        np.testing.assert_allclose(lines[label].get_ydata(), np.multiply(values, 100))
        assert list(lines[label].get_xdata()) == SIZES


def test_runs_are_told_apart_by_shape_as_well_as_by_colour(figures, runs):
    lines = figures["utilization.png"].axes[0].get_lines()
    costing = [run.summary.name for run in runs if not run.variant.free_recompute]
    assert [line.get_label() for line in lines] == costing != [run.summary.name for run in runs]
    looks = [(line.get_color(), line.get_marker()) for line in lines]
    assert len(set(looks)) == len(looks)
    assert len({marker for _, marker in looks}) == len(looks)
    assert {colour for colour, _ in looks} <= set(COLOURS)


def test_a_long_series_is_drawn_at_evenly_spaced_times():
    builder = SeriesBuilder()
    seconds = np.where(np.arange(10_000) < 9_000, 0.001, 1.0)
    start = np.concatenate([[0], np.cumsum(seconds)[:-1]])
    builder.add_many(start=start, seconds=seconds, running=np.arange(10_000))
    time, running = thinned(builder.build(), "running")
    assert len(time) == MAX_POINTS
    assert np.diff(time).max() <= 2.0
    np.testing.assert_array_equal(start[running], time)
    short = SeriesBuilder()
    short.add_many(start=start[:5], seconds=seconds[:5], running=np.arange(5))
    assert thinned(short.build(), "running")[1].tolist() == [0, 1, 2, 3, 4]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path, runs):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InvalidArgument, match="--plot needs matplotlib: pip install"):
        plot_runs(runs, np.array([1]), 9, tmp_path)
