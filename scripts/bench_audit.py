#!/usr/bin/env python
"""What the audit log costs: nanoseconds a record, and the host's time for a step with it and without.

    scripts/bench_audit.py [--steps 400] [--json]

The same made-up requests (those of bench_host.py: 64 to 319 tokens in blocks of 16, prefix caching, every
tenth step one leaves and another comes) run through three schedulers in turn, step by step: without a log,
with one in memory, and with one on disk. So the ratios are of one run, and what else the machine does falls
on all three alike. A step is scheduling, packing and taking its tokens, with a record for each token that
gets a slot; the log on disk is flushed after each. Times are of the thread on its core, medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from bench_host import NEWCOMER_EVERY, Load
from rich.console import Console
from rich.table import Table

from paged_jax.audit import AuditLog
from paged_jax.audit_file import AuditFile
from paged_jax.audit_reader import AuditReader
from paged_jax.audit_replay import Replay

RUNNING = (1, 32, 256)
BATCH, BATCHES = 1000, 50


@dataclass
class StepTimes:
    """Microseconds of a step, and records in it, for one number of running sequences."""

    running: int
    records: float
    off_us: float
    memory_us: float
    disk_us: float

    @property
    def memory_ratio(self) -> float:
        """With a log in memory / without."""
        return self.memory_us / self.off_us

    @property
    def disk_ratio(self) -> float:
        """With a log on disk / without."""
        return self.disk_us / self.off_us


class Audited:
    """A load with a log, or without one."""

    def __init__(self, running: int, log: AuditLog | None) -> None:
        self.load, self.log = Load(running, "cpu"), log
        allocator = self.load.scheduler.allocator
        if log is not None:  # what the requests hold already is unknown to it
            log.begin(allocator.num_blocks, allocator.block_size)
        allocator.audit = log

    def step(self, has_newcomer: bool) -> float:
        """Seconds of one step."""
        if has_newcomer:
            self.load.replace()
        if self.log is not None:
            self.log.step += 1
        _, cost = self.load.step()
        start = time.thread_time()
        if self.log is not None:
            self.log.flush()
        return cost.total_us / 1e6 + time.thread_time() - start


def step_times(running: int, steps: int, folder: Path) -> StepTimes:
    """Of steps in which nobody comes or goes."""
    memory = AuditLog(10_000)
    all_three = [Audited(running, log) for log in (None, memory, AuditFile(folder / "log"))]
    seconds: list[list[float]] = [[], [], []]
    records = []
    for number in range(steps):
        has_newcomer = number % NEWCOMER_EVERY == 0
        recorded = len(memory) + memory.num_dropped
        for audited, own in zip(all_three, seconds, strict=True):
            took = audited.step(has_newcomer)
            if not has_newcomer:
                own.append(took)
        records.append(len(memory) + memory.num_dropped - recorded)
    off, in_memory, on_disk = (1e6 * statistics.median(own) for own in seconds)
    return StepTimes(running, statistics.median(records), off, in_memory, on_disk)


def per_record(log: AuditLog) -> float:
    """Nanoseconds to record a write, flushes included."""
    log.begin(2, 16)
    times = []
    for _ in range(BATCHES):
        start = time.thread_time()
        for _ in range(BATCH):
            log.record("write", 1, "llm-1", 1, 1, start=3, end=4)
        log.flush()
        times.append((time.thread_time() - start) / BATCH)
    return 1e9 * statistics.median(times)


def replay_rate(path: Path) -> float:
    """Records a second that are read from disk and judged."""
    log = AuditReader(path)
    judge = Replay(log.header, log.state)
    start = time.thread_time()
    for record in log:
        judge.feed(record)
    return judge.report.num_records / (time.thread_time() - start)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Steps = Annotated[int, typer.Option(help="Steps of each load.", min=20)]


def main(steps: Steps = 400, as_json: AsJson = False) -> None:
    """Measure what the audit log costs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = {"memory": per_record(AuditLog(10_000)), "disk": per_record(AuditFile(folder / "log"))}
        rate = replay_rate(folder / "log")
        results = [step_times(running, steps, folder) for running in RUNNING]
    if as_json:
        rows = [asdict(r) | {"memory_ratio": r.memory_ratio, "disk_ratio": r.disk_ratio} for r in results]
        answer = {"steps": steps, "ns_per_record": records, "replayed_per_second": rate, "results": rows}
        print(json.dumps(answer))
        return
    title = f"host time of a decode step in microseconds, medians of {steps} steps"
    table = Table(
        "running", "records", "off", "in memory", "on disk", "memory / off", "disk / off", title=title
    )
    for column in table.columns:
        column.justify = "right"
    for r in results:
        times = (r.off_us, r.memory_us, r.disk_us)
        ratios = (r.memory_ratio, r.disk_ratio)
        table.add_row(
            *(f"{number:,.0f}" for number in (r.running, r.records, *times)), *(f"{x:.2f}" for x in ratios)
        )
    Console(width=max(100, Console().width)).print(table)
    print(f"a record: {records['memory']:,.0f} ns in memory, {records['disk']:,.0f} ns on disk")
    print(f"replay: {rate:,.0f} records a second")


if __name__ == "__main__":
    typer.run(main)
