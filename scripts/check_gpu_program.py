#!/usr/bin/env python
"""Compiles this project's programs for GPUs on a machine that has none, and fails where one is not right.

    scripts/check_gpu_program.py [--quick | --full] [--json]

Attention kernels: no register spills, pipelined loads, tensor cores, no TF32 in float32. Whole steps of a
Llama-3-8B shape: the cache updated in place, nothing that CUDA graphs cannot capture, no atomics in a write.
Faults planted on purpose must be caught. No GPU is used: nothing here shows speed, or numbers, on hardware.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import jax
import typer
from gpu_gate import gate, ptx
from gpu_gate.addresses import address_cases
from gpu_gate.faults import FAULTS
from gpu_gate.kernel_cases import covering_set, every_setting, few, whole_grid
from gpu_gate.report import Report
from gpu_gate.steps import AbstractEngine
from gpu_gate.targets import A100, H200, NoGpuCompiler
from gpu_gate.updates import update_cases
from rich.console import Console
from rich.table import Table

Quick = Annotated[bool, typer.Option("--quick", help="A few of the kernels: under two minutes.")]
Full = Annotated[bool, typer.Option("--full", help="Every combination that changes a kernel's code.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines and tables.")]


def main(quick: Quick = False, full: Full = False, as_json: AsJson = False) -> None:
    """Compile for sm_80 and sm_90 and inspect. Exits with 1 where a check fails, with 2 where none ran."""
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    jax.config.update("jax_platforms", "cpu")  # else the CUDA plugin looks for a driver
    start = time.perf_counter()
    console = Console(quiet=as_json)
    report = Report(console)
    console.print(f"jax {jax.__version__}, ptxas: {ptx.find_ptxas() or 'none, so registers are not known'}")
    try:
        run(report, quick=quick, full=full)
    except NoGpuCompiler as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    roofs = gate.rooflines((A100, H200))
    if as_json:
        print(json.dumps({"jax": jax.__version__} | report.as_dict() | {"rooflines": roofs}))
    else:
        title = "Roofline: one layer's decode attention, 32/8 heads of 128, bfloat16"
        table = Table("context", "num_seqs", "bytes", "A100 us", "H200 us", title=title)
        for row in roofs:
            table.add_row(*(f"{value:,.10g}" for value in row.values()))
        console.print(table)
        console.print(report.summary())
        for failed in report.failures:
            console.print(f"[red]FAIL[/] {failed.target} {failed.section}: {failed.name}", soft_wrap=True)
        verdict = "FAIL" if report.failures else "PASS"
        console.print(f"{verdict}: {len(report.results)} programs in {time.perf_counter() - start:.0f} s")
    raise typer.Exit(bool(report.failures))


def run(report: Report, *, quick: bool, full: bool) -> None:
    """All checks of a mode, the most telling first."""
    gate.check_faults(report, FAULTS, H200)
    for target in (H200, A100):
        engine = AbstractEngine.on(target, num_layers=32)
        few_steps = quick and target is A100
        for step in (engine.decode("greedy"), *(() if few_steps else (engine.prefill(), *engine.moves()))):
            gate.check_step(report, step, engine, target)
    shallow = AbstractEngine.on(H200, num_layers=2)
    gate.check_step(report, shallow.decode("full"), shallow, H200)
    for target in (H200,) if quick else (H200, A100):
        gate.check_addresses(report, address_cases(), target)
    for target in (H200, A100):
        if not (quick and target is A100):
            gate.check_updates(report, update_cases(), target)
        cases = list(whole_grid()) if full else few() if quick else [*covering_set(), *every_setting()]
        gate.check_kernels(report, cases[:2] if quick and target is A100 else cases, target)


if __name__ == "__main__":
    typer.run(main)
