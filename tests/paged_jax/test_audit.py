import json
import time

import pytest

from paged_jax import errors
from paged_jax.audit import AuditLog, AuditRecord
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable


def audited(num_blocks=8, **options):
    log = AuditLog(**options)
    return log, BlockAllocator(num_blocks, 4, audit=log)


def told(records):
    return [(r.action, r.block, r.owner, r.ref_cnt_before, r.ref_cnt_after, r.reason) for r in records]


def test_allocate_incref_decref_and_free_are_recorded():
    log, pool = audited()
    pool.allocate(2, owner="a")
    pool.incref([2], owner="b")
    pool.free([2, 1], owner="a")
    pool.free([2], owner="b", reason="abort")
    assert told(log) == [
        ("allocate", 1, "a", 0, 1, ""),
        ("allocate", 2, "a", 0, 1, ""),
        ("incref", 2, "b", 1, 2, ""),
        ("decref", 2, "a", 2, 1, ""),
        ("free", 1, "a", 1, 0, ""),
        ("free", 2, "b", 1, 0, "abort"),
    ]


def test_a_block_named_twice_has_two_records():
    log, pool = audited()
    pool.allocate(owner="a")
    pool.incref([1, 1], owner="b")
    pool.free([1, 1, 1], owner="b")
    assert [(r.action, r.ref_cnt_before, r.ref_cnt_after) for r in log] == [
        ("allocate", 0, 1),
        ("incref", 1, 2),
        ("incref", 2, 3),
        ("decref", 3, 2),
        ("decref", 2, 1),
        ("free", 1, 0),
    ]


def test_hits_are_told_apart_from_forks_and_evictions_name_the_key():
    log, pool = audited(num_blocks=2)
    pool.allocate(owner="a")
    pool.register(1, "prefix")
    pool.incref([1], owner="b")
    pool.incref([1], owner="fetch", reason="swap-out")
    pool.free([1, 1, 1], owner="a")
    pool.incref([1], owner="c")
    pool.free([1], owner="c")
    pool.allocate(owner="d")
    told_of_interest = [t for t in told(log) if t[0] in ("hit", "incref", "evict", "allocate")]
    assert told_of_interest[1:] == [
        ("hit", 1, "b", 1, 2, ""),
        ("incref", 1, "fetch", 2, 3, "swap-out"),
        ("hit", 1, "c", 0, 1, ""),
        ("evict", 1, "d", 0, 0, "key 'prefix'"),
        ("allocate", 1, "d", 0, 1, ""),
    ]


def test_a_copy_on_write_is_an_allocation_a_copy_and_a_decref():
    log, pool = audited()
    table = BlockTable(pool, "a")
    table.append(2)
    twin = table.fork("b")
    twin.append(1)
    twin.release()
    assert told(log) == [
        ("allocate", 1, "a", 0, 1, "append"),
        ("write", 1, "a", 1, 1, ""),
        ("incref", 1, "b", 1, 2, "fork"),
        ("allocate", 2, "b", 0, 1, "append"),
        ("copy", 1, "b", 2, 2, "to block 2"),
        ("decref", 1, "b", 2, 1, "copy-on-write"),
        ("write", 2, "b", 1, 1, ""),
        ("free", 2, "b", 1, 0, "release"),
    ]


def test_a_fork_of_a_registered_block_is_no_hit():
    log, pool = audited()
    table = BlockTable(pool, "a")
    table.append(4)
    pool.register(1, "prefix")
    table.fork("b")
    assert [r.action for r in log] == ["allocate", "write", "register", "incref"]


def test_anyone_may_add_a_swap():
    log, pool = audited()
    pool.allocate(owner="a")
    log.record("swap-out", 1, "a", 1, 1, "to host block 0", other=0)
    assert told(log)[-1] == ("swap-out", 1, "a", 1, 1, "to host block 0")


def test_what_is_refused_changes_nothing_and_of_faults_there_is_a_record_that_says_so():
    log, pool = audited(num_blocks=4)
    pool.allocate(2, owner="a")
    before = told(log)
    for call in (
        lambda: pool.allocate(2, owner="b"),
        lambda: pool.free([1, 2, 2], owner="b"),
        lambda: pool.incref([1, 0], owner="b"),
        lambda: pool.incref([1, 3], owner="b"),
        lambda: BlockTable(pool, "c").adopt([3], 4),
    ):
        with pytest.raises(errors.PagedJaxError):
            call()
    assert told(log) == [
        *before,
        ("refused", 2, "b", 1, 1, "double free"),
        ("refused", 3, "b", 0, 0, "use after free"),
        ("refused", 3, "c", 0, 0, "use after free"),
    ]


def test_a_table_that_begins_with_blocks_says_how_full_they_are():
    log, pool = audited()
    pool.allocate(2, owner="a")
    BlockTable(pool, "a").adopt([1, 2], num_tokens=7)
    assert [(r.action, r.block, r.start, r.end) for r in log][2:] == [("adopt", 1, 0, 4), ("adopt", 2, 0, 3)]


def test_records_carry_the_step_and_a_monotonic_time():
    log, pool = audited()
    before = time.monotonic()
    pool.allocate(owner="a")
    log.step = 7
    pool.allocate(owner="a")
    first, second = log
    assert (first.step, second.step) == (0, 7)
    assert before <= first.time <= second.time <= time.monotonic()


def test_the_history_of_a_block_and_of_an_owner():
    log, pool = audited()
    pool.allocate(2, owner="a")
    pool.incref([1], owner="b")
    pool.free([1], owner="a")
    assert [r.action for r in log.of_block(1)] == ["allocate", "incref", "decref"]
    assert [(r.action, r.block) for r in log.of_owner("b")] == [("incref", 1)]
    assert log.of_block(5) == log.of_owner("nobody") == []


def test_a_ring_keeps_the_newest_records_and_counts_the_others():
    log, pool = audited(max_records=3)
    pool.allocate(5, owner="a")
    assert [r.block for r in log] == [3, 4, 5]
    assert (len(log), log.num_dropped) == (3, 2)


def test_without_a_bound_nothing_is_dropped():
    log, pool = audited()
    pool.allocate(5, owner="a")
    assert (len(log), log.num_dropped) == (5, 0)


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, "9"])
def test_a_ring_holds_at_least_one_record(bad):
    with pytest.raises(errors.InvalidArgument, match="max_records="):
        AuditLog(max_records=bad)


def test_jsonl_has_one_object_a_record(tmp_path):
    log, pool = audited()
    log.step = 3
    for owner in ("a", 4, ("request", 5), None):
        pool.allocate(owner=owner)
    path = tmp_path / "audit.jsonl"
    log.write_jsonl(path)
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["format"], header["num_blocks"], header["block_size"]) == ("paged_jax kv audit", 8, 4)
    assert [line["owner"] for line in lines] == ["a", 4, "('request', 5)", None]
    first = next(iter(log))
    assert AuditRecord(**lines[0]) == first._replace(time=round(first.time, 6))


def test_a_record_reads_as_a_sentence():
    log, pool = audited()
    log.step = 12
    pool.allocate(owner="request 9", reason="append")
    assert str(next(iter(log))) == "step 12  block 1  allocate  0 -> 1  request 9  append"


def test_the_log_changes_nothing_but_itself():
    """The same calls give the same ids with and without it."""

    def ids(pool):
        table = BlockTable(pool, "a")
        table.append(9)
        twin = table.fork("b")
        done = twin.append(4)
        table.release()
        return done, table.blocks, twin.blocks, pool.allocate(2, owner="c")

    assert ids(BlockAllocator(8, 4)) == ids(audited()[1])
