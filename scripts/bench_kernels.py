#!/usr/bin/env python
"""Measures the attention kernels and whole decode steps on a GPU, beside what else there is.

    scripts/bench_kernels.py [--seconds 240] [--json FILE] [--tiny]

The yardstick is the device's own copy bandwidth, measured first: attention to a cache reads it once, so the
best a decode kernel can do is 100 % of it. gpu_bench/timing.py tells how times are taken. The most telling
shapes come first; what the time does not suffice for is left out and counted. --tiny runs all on a CPU, with
Pallas interpreted and figures without meaning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and the subprocesses need memory too

import jax
import typer
from gpu_bench import end_to_end, plan
from gpu_bench.timing import copy_bandwidth
from gpu_bench.variants import Setting
from rich.console import Console
from rich.table import Table

NO_GPU = """\
JAX finds no GPU here (its backend is {backend}). On a machine with an NVIDIA GPU, install its CUDA support:
    {python} -m pip install 'jax[cuda13]=={version}'
and see that nvidia-smi lists the GPU. --tiny tries this script out without one."""
COMMAND_BUFFERS = {"with command buffers": "", "without": " --xla_gpu_enable_command_buffer="}

Seconds = Annotated[float, typer.Option(help="Stop starting new measurements after so many.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Tiny shapes, interpreted on a CPU.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Step = Annotated[str | None, typer.Option(hidden=True, help="num_seqs,context: one end-to-end figure.")]


def main(seconds: Seconds = 240.0, tiny: Tiny = False, json_file: JsonFile = None, step: Step = None) -> None:
    """Print tables of measurements; exits with 2 where there is no GPU."""
    if tiny:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        backend = jax.default_backend()
        print(NO_GPU.format(backend=backend, python=sys.executable, version=jax.__version__), file=sys.stderr)
        raise typer.Exit(2)
    if step is not None:
        num_seqs, context = map(int, step.split(","))
        steps = 2 if tiny else 32
        print(json.dumps(end_to_end.decode_step(tiny=tiny, num_seqs=num_seqs, context=context, steps=steps)))
        return
    start = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 120)
    device = jax.devices()[0]
    bandwidth = copy_bandwidth(1 << 20 if tiny else 1 << 30, 0.01 if tiny else 1.0)
    console.print(f"{device.device_kind}, jax {jax.__version__}: copies run at {bandwidth / 1e9:,.0f} GB/s")
    rows, left_out, steps_taken = measurements(console, bandwidth, start + seconds, tiny=tiny)
    console.print(attention_table(rows, bandwidth))
    console.print(steps_table(steps_taken, bandwidth))
    if left_out:
        console.print(f"{left_out} shapes were left out: {seconds:.0f} seconds did not suffice")
    if json_file:
        figures = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "copy_bytes_per_s": bandwidth,
            "attention": [row.as_dict(bandwidth) for row in rows],
            "steps": steps_taken,
            "left_out": left_out,
        }
        json_file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        console.print(f"figures written to {json_file}")
    if failed := sum(isinstance(row.times.get("paged"), str) for row in rows):
        console.print(f"{failed} shapes failed in our own kernels: see the table", style="red")
        raise typer.Exit(1)


def measurements(
    console: Console, bandwidth: float, until: float, *, tiny: bool
) -> tuple[list[plan.Row], int, list[dict[str, Any]]]:
    """Attention rows, how many shapes there was no time for, and end-to-end steps."""
    setting = Setting(*((0.0, 2, True, 1) if tiny else (0.3, 16, False)))
    limits = jax.devices()[0].memory_stats() or {}
    most_bytes = 0.2 * limits.get("bytes_limit", 16 << 30)
    decodes = [("decode", *entry) for entry in plan.decode_shapes(most_bytes, tiny=tiny)]
    prefills = [("prefill", *entry) for entry in plan.prefill_shapes(tiny=tiny)]
    telling = len(plan.FIRST)
    rows: list[plan.Row] = []
    steps_taken: list[dict[str, Any]] = []
    left_out = 0
    order: list[tuple[str, str, Any] | None]
    order = [*decodes[:telling], None, *prefills[:2], *decodes[telling:], *prefills[2:]]
    for entry in order:
        if entry is None:
            batches = ((2, 16),) if tiny else ((64, 2048), (1, 1024))
            steps_taken = [found for batch in batches for found in steps(batch, tiny=tiny, until=until)]
            continue
        if time.perf_counter() > until:
            left_out += 1
            continue
        row = plan.measure(*entry, setting, until)
        rows.append(row)
        speed = row.gb_per_s()
        said = f"{speed:,.0f} GB/s, {speed * 1e9 / bandwidth:.0%} of copy" if speed else row.times["paged"]
        console.print(f"[dim]{row.kind} {row.heads} {row.shape.num_seqs} x {row.shape.context}: {said}[/]")
    return rows, left_out, steps_taken


def steps(batch: tuple[int, int], *, tiny: bool, until: float) -> list[dict[str, Any]]:
    """End-to-end decode steps in processes of their own, since XLA reads its flags once."""
    num_seqs, context = batch
    found: list[dict[str, Any]] = []
    for name, flags in COMMAND_BUFFERS.items():
        left = until - time.perf_counter()
        if left < 0:
            found.append({"name": name, "error": "out of time"})
            continue
        command = [sys.executable, __file__, "--step", f"{num_seqs},{context}", *(["--tiny"] if tiny else [])]
        environment = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flags}
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=max(left, 60)
            )
        except subprocess.TimeoutExpired:
            found.append({"name": name, "error": "out of time"})
            continue
        if run.returncode:
            found.append({"name": name, "error": run.stderr.strip()[-300:]})
        else:
            found.append({"name": name, **json.loads(run.stdout.strip().splitlines()[-1])})
    return found


def attention_table(rows: list[plan.Row], bandwidth: float) -> Table:
    """One line a shape: ours in figures, the others as multiples of our time (over 1: they are slower)."""
    table = Table(title="Attention, one layer, bfloat16, head_dim 128 (others: their time / ours)")
    headings = "heads seqs context us GB/s copy TFLOP/s bundled dense torch"
    for heading in ("", *headings.split()):
        table.add_column(heading, justify="right")
    for row in rows:
        took, speed = row.microseconds("paged"), row.gb_per_s()
        cells = [row.kind, row.heads, str(row.shape.num_seqs), f"{row.shape.context:,}"]
        if took is None or speed is None:
            table.add_row(*cells, str(row.times["paged"])[:40])
            continue
        flops = f"{row.shape.flops / took / 1e6:,.0f}" if isinstance(row.shape, plan.PrefillShape) else ""
        others = (row.microseconds("bundled"), row.fastest_dense(), row.microseconds("torch"))
        ratios = [f"{other / took:.2f}" if other else "-" for other in others]
        table.add_row(
            *cells, f"{took:,.1f}", f"{speed:,.0f}", f"{speed * 1e9 / bandwidth:.0%}", flops, *ratios
        )
    return table


def steps_table(found: list[dict[str, Any]], bandwidth: float) -> Table:
    """Decode steps of a 1B-shape model against the time that reading weights and cache takes."""
    table = Table("seqs x context", "", "ms a step", "roofline ms", "of roofline", title="Decode, end to end")
    for figures in found:
        if "error" in figures:
            table.add_row("", figures["name"], figures["error"])
            continue
        least = 1e3 * (figures["weight_bytes"] + figures["kv_bytes"]) / bandwidth
        shape = f"{figures['num_seqs']} x {figures['context']:,}"
        share = f"{least / figures['ms']:.0%}"
        table.add_row(shape, figures["name"], f"{figures['ms']:.3f}", f"{least:.3f}", share)
    return table


if __name__ == "__main__":
    typer.run(main)
