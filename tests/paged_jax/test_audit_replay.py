"""What the replay makes of logs that it does not see all of, or that hold more than one run."""

import pytest

from paged_jax.audit import AuditLog
from paged_jax.audit_replay import Replay, replay

from .audit_faults import recorded
from .audit_logs import audited_engine, kinds, play


def test_a_ring_that_has_forgotten_its_oldest_records_blames_nobody_for_what_it_lacks():
    for seed in range(4):
        log = AuditLog(max_records=700)
        play(audited_engine(log, mode="swap", caching=True), seed, count=60, fail_at=[30])
        report = replay(log)
        assert log.num_dropped > 300
        assert not report.is_complete
        assert report.findings == []


def test_a_ring_still_finds_what_happened_within_it():
    log = AuditLog(max_records=700)
    engine = play(audited_engine(log, caching=True), 1, count=60, until=120)
    held = next(s.table for s in engine.scheduler.queues.running_sequences if s.table.blocks)
    engine.allocator.audit.record("free", held.blocks[0], "thief", 1, 0)
    assert kinds(replay(log)) == {"double free"}


def test_a_second_pool_in_the_same_log_starts_it_over():
    log = AuditLog()
    for _ in range(2):
        play(audited_engine(log), 3, until=12)
        assert replay(log).findings == []
    assert log.step == 12


def test_records_without_a_log_need_a_header():
    with pytest.raises(TypeError, match="header"):
        replay(list(recorded()[0][1]))


def test_a_replay_can_be_fed_record_by_record():
    header, records = recorded()[0]
    judge = Replay(header)
    for record in records:
        judge.feed(record)
    assert judge.finish() == replay(records, header)
