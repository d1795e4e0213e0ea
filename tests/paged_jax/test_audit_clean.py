"""A log of an engine that does everything right has no findings, whatever happened to its requests."""

import random

import pytest

from paged_jax.audit import AuditLog
from paged_jax.audit_file import AuditFile
from paged_jax.audit_reader import AuditReader
from paged_jax.audit_replay import Replay, replay

from .allocator_model import REAL, operations, world_of
from .audit_logs import assert_clean, audited_engine, play
from .test_chaos import CONTEXT, make_engine, random_requests, run_with_arrivals


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_clean_run_has_no_findings(mode, caching, seed):
    log = AuditLog()
    engine = audited_engine(log, mode=mode, caching=caching)
    play(engine, seed, fail_at=[17, 40] if seed % 2 else [])
    report = assert_clean(log)
    assert report.running == report.others == {}
    assert report.num_arrived == report.num_ended == 25
    assert len(report.failed_steps) == (2 if seed % 2 else 0)


def test_a_clean_log_of_the_allocator_alone_has_no_findings_but_what_was_refused():
    """The random programs of the allocator's tests, which misuse it on purpose."""
    refused = 0
    for seed in range(40):
        program = random.Random(seed).randbytes(1600)
        world = world_of(program, REAL)
        world.audit = world.pool.audit = AuditLog()
        world.audit.begin(world.num_blocks, world.block_size)
        for operation, numbers in operations(program):
            operation(world, *numbers)
        report = replay(world.audit)
        assert all(finding.second.action == "refused" for finding in report.findings)
        refused += len(report.findings)
    assert refused > 100


@pytest.mark.full
@pytest.mark.parametrize(("mode", "seed"), [("recompute", 6), ("swap", 7)])
def test_a_real_models_chaos_has_no_findings(mode, seed, glass_path, tmp_path):
    log = AuditFile(tmp_path / "log", max_bytes=200_000)
    engine = make_engine(glass_path, num_blocks=41, max_model_len=CONTEXT, preemption_mode=mode, kv_audit=log)
    run_with_arrivals(engine, random_requests(seed, 260), seed)
    engine.close()
    reader = AuditReader(tmp_path / "log")
    judge = Replay(reader.header, reader.state)
    for record in reader:
        judge.feed(record)
    report = judge.finish()
    assert report.findings == []
    assert report.running == report.others == {}
    assert (engine.totals.swapped_in_bytes > 0) == (mode == "swap")
    assert engine.totals.preempted > 10
    assert len(reader.parts) == 4
