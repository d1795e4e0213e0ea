"""A plan for people, as tables, and for programs, as one dictionary. Arithmetic is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paged_jax.capacity import HEADROOM, format_bytes
from paged_jax.plan_dict import SEQUENCE_LENGTHS
from paged_jax.planner import Plan

_SOURCES = {
    "given": "its size was given, so it gets no headroom",
    "device": f"{HEADROOM:.0%} of what is left, and no more than the sequences can use",
    "demand": "what the requests need, since neither a device nor a size was given",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Everything, the verdict last."""
    console.print(_headline(plan))
    for note in _notes(plan):
        console.print(Text(f"note: {note}", "yellow"))
    for problem in plan.planned.problems:
        console.print(Text(f"the engine would refuse this: {problem}", "bold red"))
    console.print(_rows("memory", _memory(plan)))
    console.print(_block_sizes(plan))
    console.print(
        f"recommended: block_size={plan.recommended_block_size}: {plan.recommended_because}.\n"
        "reads: contiguous bytes of one KV head in a block; their class is reckoned, not timed.\n"
    )
    if plan.roofline:
        console.print(_roofline(plan))
    else:
        console.print("no roofline of decode: only a named device says how fast it is.\n")
    if plan.comparison is not None:
        console.print(_rows("at once, in this pool", _comparison(plan)))
    verdict = plan.verdict
    console.print(Text.assemble((f"{verdict.headline}: ", "bold"), f"{verdict.reason}."))


def _headline(plan: Plan) -> Text:
    shape = plan.shape
    line = f"{shape.name}: {shape.architecture}, {shape.num_parameters:,} parameters"
    if shape.experts:
        line += f", {shape.active_parameters:,} of them active for a token"
    return Text(line, "bold")


def _notes(plan: Plan) -> Iterator[str]:
    shape, trace = plan.shape, plan.options.trace
    if shape.plan_only:
        yield f"plan only: {shape.plan_only}"
    if plan.kv_dtype != plan.dtype:
        yield f"plan only: the engine keeps keys and values in the weights' dtype, not in {plan.kv_dtype}"
    yield from shape.notes
    windows = [window for window in shape.layer_windows if window is not None]
    if windows:
        yield (
            f"{len(windows)} of {shape.num_layers} layers see the last {min(windows):,} tokens alone; the"
            " cache keeps them all, decode reads those that are seen"
        )
    if trace is not None:
        if trace.note:
            yield trace.note
        skipped = plan.demand.trace.skipped if plan.demand else ()
        if skipped:
            yield f"{len(skipped):,} requests skipped, the first: {skipped[0].place}: {skipped[0].reason}"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    kv, memory, pool, options = plan.kv, plan.memory, plan.pool, plan.options
    yield "bytes per token", f"{kv.written_out} ({plan.kv_dtype})"
    yield (
        "one sequence",
        "; ".join(
            f"{length:,} tokens {format_bytes(length * kv.bytes_per_token)}" for length in SEQUENCE_LENGTHS
        ),
    )
    number = plan.concurrency.num_seqs
    longest = format_bytes(number * plan.max_model_len * kv.bytes_per_token)
    many = f"of max_model_len={plan.max_model_len:,} tokens {longest}"
    if plan.demand:
        mean = plan.demand.mean_tokens
        many += f"; of the mean {mean:,.0f} tokens {format_bytes(int(number * mean * kv.bytes_per_token))}"
    yield f"{number:,} sequences", many
    yield "", f"({plan.concurrency.source})"
    yield "weights", f"{format_bytes(memory.weight_bytes)} ({plan.dtype}, norms in float32)"
    yield (
        "activations",
        f"{format_bytes(memory.activation_bytes)}, estimated for {options.max_num_batched_tokens:,} tokens a"
        " step; the engine asks its compiled programs",
    )
    if options.device is not None:
        size = format_bytes(options.device.memory_bytes)
        if options.device.rates:
            size += f" x {options.memory_fraction:g}, the share that JAX takes, = "
            size += format_bytes(memory.limit_bytes or 0)
        yield "device", f"{options.device.name}: {size}"
        yield "left for keys, values", f"{format_bytes(memory.left_bytes or 0)}, headroom included"
    yield (
        "max_num_blocks",
        f"{plan.planned.fitting_blocks:,} of {pool.block_size} tokens and {format_bytes(pool.block_bytes)}, "
        + (f"{plan.planned.headroom:.0%} headroom left" if plan.planned.headroom else "without headroom"),
    )
    yield "pool", f"num_blocks={pool.num_blocks:,}, the null block counted: {_SOURCES[plan.planned.source]}"
    if pool.usable_blocks:
        yield "", pool.describe(memory.weight_bytes)
    if plan.demand and plan.peak_blocks is not None:
        which = "made up" if plan.demand.trace.is_made_up else "measured"
        needed = plan.recommended_blocks or 0
        yield (
            f"peak, {which}",
            f"{plan.peak_blocks:,} blocks: the most that {number:,} requests, one after the other in the"
            f" trace, hold when they end; with {1 - HEADROOM:.0%} headroom and the null block"
            f" num_blocks={needed:,}, {format_bytes(needed * pool.block_bytes)}: "
            + ("the pool holds that" if needed <= pool.num_blocks else "more than the pool has"),
        )
    yield "block tables", f"{_small(plan.table_bytes)}, int32, one row a sequence: {_l2(plan)}"


def _l2(plan: Plan) -> str:
    device = plan.options.device
    if device is None or device.rates is None:
        return "whether they sit in the L2 cache is not known without a named device"
    size = device.rates.l2_bytes
    where = "they sit in" if plan.table_bytes <= size else "they do NOT sit in"
    return f"{where} the {format_bytes(size)} L2 ({plan.table_bytes / size:.2%} of it)"


def _block_sizes(plan: Plan) -> Table:
    measured = plan.demand is not None and not plan.demand.trace.is_made_up
    title = f"block sizes, requests of {plan.mean_tokens:,.0f} tokens on average"
    if plan.demand is None:
        title += " (assumed: --trace or --mean-tokens tells)"
    table = Table(title=title, title_justify="left")
    for name in ("block_size", "expected waste", "B/(2 x mean)", "in the trace", "reads", "tables"):
        if name != "in the trace" or measured:
            table.add_column(name, justify="right")
    for one in plan.block_sizes:
        cells = [str(one.block_size), _percent(one.expected_waste), _percent(one.rule_of_thumb)]
        if measured:
            cells.append(_percent(one.measured_waste))
        cells += [f"{_small(one.run_bytes)}, {one.efficiency}", _small(one.table_bytes)]
        table.add_row(*cells, style="bold" if one.block_size == plan.recommended_block_size else None)
    return table


def _roofline(plan: Plan) -> Table:
    device = plan.options.device
    title = f"decode at {plan.roofline_context:,} tokens a sequence: lower bounds on {device and device.name}"
    table = Table(title=title, title_justify="left")
    for name in ("batch", "GB a step", "ms per token", "tokens/s at most", "bound by", "has room"):
        table.add_column(name, justify="right")
    for step, fits in zip(plan.roofline, plan.fits, strict=True):
        table.add_row(
            str(step.batch),
            f"{step.num_bytes / 1e9:,.2f}",
            f"{step.seconds * 1e3:,.2f}",
            f"{step.tokens_per_second:,.0f}",
            step.bound,
            "yes" if fits else "no",
        )
    return table


def _comparison(plan: Plan) -> Iterator[tuple[str, str]]:
    found = plan.comparison
    assert found is not None
    yield "paging", f"{found.paged:,.1f} requests by what they hold on average, {found.paged_full:,.1f} full"
    for tokens, number, ratio, which in (
        (found.max_model_len, found.reserved, found.ratio, "max_model_len"),
        (found.reservation_99, found.reserved_99, found.ratio_99, "enough for 99 % of the requests"),
    ):
        times = "not even one" if ratio is None else f"paging holds {ratio:.1f} times as many"
        yield f"reserving {tokens:,}", f"{number:,} requests ({which}): {times}"
    yield "", "averages, contiguous memory without its holes; a simulation tells what really runs at once"


def _rows(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _small(num_bytes: int) -> str:
    """In KiB below one MiB."""
    return format_bytes(num_bytes) if num_bytes >= 1 << 20 else f"{num_bytes / 1024:,.4g} KiB"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
