"""The log on disk: bounded, whole after a crash, and each of its files can be replayed by itself."""

import json
import os
import subprocess
import sys

import pytest

from paged_jax import SamplingParams
from paged_jax.audit import AuditLog
from paged_jax.audit_file import AuditFile
from paged_jax.audit_reader import AuditReader
from paged_jax.audit_replay import Replay, replay
from paged_jax.block_allocator import BlockAllocator
from paged_jax.errors import AuditLogUnreadable, InvalidArgument

from .audit_logs import audited_engine, play
from .conftest import load
from .made_up_engine import run


def report_of(path):
    log = AuditReader(path)
    judge = Replay(log.header, log.state)
    for record in log:
        judge.feed(record)
    return judge.finish()


def rounded(log):
    """Its records as they are written."""
    return [record._replace(time=round(record.time, 6)) for record in log]


def files(path):
    return sorted(path.parent.glob(f"{path.name}*"), key=lambda file: file.suffix)


def test_what_is_read_is_what_was_recorded(tmp_path):
    log = AuditFile(tmp_path / "log", max_records=10**6)
    engine = play(audited_engine(log, mode="swap", caching=True), 1, fail_at=[20])
    engine.allocator.audit.close()
    read = list(AuditReader(tmp_path / "log"))
    assert read == rounded(log)
    assert len(read) > 500
    assert report_of(tmp_path / "log").num_records == len(log)


def test_an_llm_takes_a_path(tiny_path, tmp_path):
    for path in (tmp_path / "a", str(tmp_path / "b")):
        with load(tiny_path, kv_audit=path) as llm:
            outputs = llm.generate(["Hello", "World"], SamplingParams(max_tokens=9), use_tqdm=False)
        log = AuditReader(tmp_path / os.path.basename(path))
        assert {record.owner for record in log} == {output.request_id for output in outputs}
        report = report_of(log.path)
        assert (report.findings, report.running, report.num_ended) == ([], {}, 2)


def test_closing_an_llm_ends_what_still_ran_and_says_so(tiny_path, tmp_path):
    with load(tiny_path, kv_audit=tmp_path / "log") as llm:
        llm.engine.add(llm.engine.make_request("a", "Hello", SamplingParams(max_tokens=20, ignore_eos=True)))
        llm.engine.step()
        assert report_of(tmp_path / "log").running == {"a": 2}
    *_, last = AuditReader(tmp_path / "log")
    assert (last.action, last.owner, last.reason) == ("end", "a", "close")
    assert report_of(tmp_path / "log").findings == []


# -- crashes -----------------------------------------------------------------------------------------------


def test_what_a_step_has_scheduled_is_on_disk_before_the_device_computes_it(tmp_path):
    engine = audited_engine(AuditFile(tmp_path / "log"))
    seen = []
    engine.runner.amid = lambda: seen.append([r.action for r in AuditReader(tmp_path / "log")])
    play(engine, 1, count=3)
    assert seen[0][0] == "arrive"
    assert {"allocate", "write"} <= set(seen[0])
    assert seen == sorted(seen, key=len)


def test_a_process_that_dies_leaves_what_was_flushed(tmp_path):
    program = (
        "import os\n"
        "from paged_jax.audit_file import AuditFile\n"
        "from paged_jax.block_allocator import BlockAllocator\n"
        f"log = AuditFile({str(tmp_path / 'log')!r})\n"
        "pool = BlockAllocator(9, 4, audit=log)\n"
        "pool.allocate(3, owner='a')\n"
        "log.flush()\n"
        "pool.allocate(2, owner='b')\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    assert [record.block for record in AuditReader(tmp_path / "log")] == [1, 2, 3]


def test_a_last_line_that_was_cut_off_is_left_out_wherever_the_cut_is(tmp_path):
    log = AuditFile(tmp_path / "log")
    pool = BlockAllocator(9, 4, audit=log)
    pool.allocate(3, owner="ä")
    log.close()
    whole = (tmp_path / "log").read_bytes()
    end = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(end, len(whole)):
        (tmp_path / "log").write_bytes(whole[:cut])
        reader = AuditReader(tmp_path / "log")
        complete = cut == len(whole) - 1
        assert len(list(reader)) == 2 + complete
        assert reader.is_cut == (end < cut and not complete)


def test_a_disk_that_fails_ends_the_log_and_nothing_else(tmp_path):
    log = AuditFile(tmp_path / "log")
    engine = play(audited_engine(log), 1, until=4)
    log._file.close()
    log._file = open(tmp_path / "log", "rb", buffering=0)  # noqa: SIM115
    with pytest.warns(UserWarning, match="the audit log .* ends here: File not open for writing"):
        engine.step()
    run(engine)
    log.close()
    assert replay(log).num_ended == replay(log).num_arrived > 0


# -- rotation ----------------------------------------------------------------------------------------------


def rotated(path, seed=1, until=None, **options):
    log = AuditFile(path, **{"max_bytes": 20_000, "max_files": 4, "max_records": 10**6} | options)
    engine = audited_engine(log, mode="swap", caching=True)
    play(engine, seed, count=60, fail_at=[50], until=until)
    log.flush()
    return log, engine


def test_files_are_bounded_in_size_and_number(tmp_path):
    log, _ = rotated(tmp_path / "log")
    log.close()
    assert [file.name for file in files(tmp_path / "log")] == ["log", "log.1", "log.2", "log.3"]
    for file in files(tmp_path / "log")[1:]:
        with file.open("rb") as lines:
            header = next(lines)
            carried = sum(len(next(lines)) for _ in range(json.loads(header)["num_carried"]))
        assert 20_000 <= file.stat().st_size - len(header) - carried < 60_000


def test_the_files_are_read_as_one_log_as_far_as_they_go_back(tmp_path):
    log, _ = rotated(tmp_path / "log", max_files=100)
    reader = AuditReader(tmp_path / "log")
    assert len(reader.parts) == len(files(tmp_path / "log")) > 5
    assert list(reader) == rounded(log)
    assert report_of(tmp_path / "log") == replay(log)
    for gone in (3, 2, 1):
        (tmp_path / f"log.{gone}").unlink()
        assert len(AuditReader(tmp_path / "log").parts) == gone


def test_each_file_is_clean_by_itself_where_the_run_was(tmp_path):
    rotated(tmp_path / "log", max_files=100)
    for file in files(tmp_path / "log"):
        report = report_of(file)
        assert report.findings == []
        assert report.is_complete


def test_a_snapshot_says_as_much_as_the_whole_log_before_it(tmp_path):
    """What the requests that still run hold is the same, told from all files or from the last one."""
    log, _ = rotated(tmp_path / "log", until=100)
    whole = replay(log)
    last = report_of(tmp_path / "log")
    assert whole.running == last.running
    assert any(last.running.values())
    for file in files(tmp_path / "log")[1:]:
        file.unlink()
    alone = report_of(tmp_path / "log")
    assert (alone.running, alone.others) == (whole.running, whole.others)


def test_a_leak_is_found_although_the_file_in_which_the_block_was_taken_is_gone(tmp_path):
    log = AuditFile(tmp_path / "log", max_bytes=5_000, max_files=2)
    pool = BlockAllocator(99, 4, audit=log)
    log.arrive("a")
    log.step = 7
    (leaked,) = pool.allocate(owner="a/1", reason="append")
    log.step = 8
    for _ in range(400):
        pool.free(pool.allocate(owner="b"), owner="b")
        log.flush()
    log.settle([])
    reader = AuditReader(tmp_path / "log")
    assert reader.header.part > 3
    assert leaked not in {record.block for record in reader}
    (finding,) = report_of(tmp_path / "log").findings
    assert (finding.kind, finding.block, finding.request, finding.step) == ("leak", leaked, "a", 8)
    assert (finding.first.owner, finding.first.step, finding.first.reason) == ("a/1", 7, "append")


def test_a_double_free_and_a_pending_swap_out_are_found_across_files(tmp_path):
    log = AuditFile(tmp_path / "log", max_bytes=5_000, max_files=2)
    pool = BlockAllocator(99, 4, audit=log)
    log.step = 3
    pool.allocate(3, owner="a")
    pool.incref([1], owner="b")
    pool.free([1], owner="b", reason="finish")
    log.record("swap-out", 2, "a", 1, 1, other=0)
    pool.free([2], owner="a", reason="swap-out")
    for _ in range(200):
        pool.incref([3], owner="c")
        pool.free([3], owner="c")
        log.flush()
    log.step = 4
    pool.free([1], owner="b", reason="finish")
    pool.allocate(owner="d")
    pool.allocate(owner="d")
    log.close()
    assert AuditReader(tmp_path / "log").header.part > 5
    reused, twice = sorted(report_of(tmp_path / "log").findings, key=lambda found: -found.block)
    assert (twice.kind, twice.block, twice.request, twice.step) == ("double free", 1, "b", 4)
    assert (twice.first.owner, twice.first.step) == ("b", 3)
    assert (reused.kind, reused.block, reused.request) == ("reused during its swap-out", 2, "d")
    assert (reused.first.owner, reused.first.step) == ("a", 3)


def test_a_log_that_is_there_already_is_moved_aside_and_not_joined(tmp_path):
    for owner in "abc":
        log = AuditFile(tmp_path / "log", max_files=2)
        BlockAllocator(9, 4, audit=log).allocate(owner=owner)
        log.close()
    assert [file.name for file in files(tmp_path / "log")] == ["log", "log.1"]
    assert [record.owner for record in AuditReader(tmp_path / "log")] == ["c"]
    assert [record.owner for record in AuditReader(tmp_path / "log.1")] == ["b"]


def test_one_file_alone_begins_anew_each_time(tmp_path):
    rotated(tmp_path / "log", max_files=1)
    assert [file.name for file in files(tmp_path / "log")] == ["log"]
    assert report_of(tmp_path / "log").findings == []


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [".", "no-such-folder/log"])
def test_a_path_that_can_not_be_written_is_refused_at_once(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"kv_audit=.*: expected a file in a folder"):
        AuditFile(path)


@pytest.mark.parametrize(
    "bounds", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"max_files": 0}, {"max_files": True}]
)
def test_bounds_are_whole_numbers(bounds, tmp_path):
    with pytest.raises(InvalidArgument, match="expected an int of at least 1"):
        AuditFile(tmp_path / "log", **bounds)


def test_nothing_is_written_before_there_is_a_pool(tmp_path):
    AuditFile(tmp_path / "log")
    assert files(tmp_path / "log") == []


# -- what is no log ----------------------------------------------------------------------------------------


def test_a_log_of_memory_that_was_written_out_can_be_read(tmp_path):
    for options in ({}, {"max_records": 500}):
        log = AuditLog(**options)
        play(audited_engine(log, caching=True), 1)
        log.write_jsonl(tmp_path / "log")
        reader = AuditReader(tmp_path / "log")
        assert list(reader) == rounded(log)
        assert reader.header.is_complete == (not options)
        assert report_of(tmp_path / "log") == replay(log)


def damaged(tmp_path, number, line):
    """A log whose line of that number is another."""
    log = AuditFile(tmp_path / "log")
    BlockAllocator(9, 4, audit=log).allocate(4, owner="a")
    log.close()
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    (tmp_path / "log").write_bytes(b"".join(lines))
    return tmp_path / "log"


GOOD = {
    "time": 1.0,
    "step": 1,
    "action": "free",
    "block": 1,
    "owner": "a",
    "ref_cnt_before": 1,
    "ref_cnt_after": 0,
    "reason": "",
}


DEEP = b"[" * 100_000 + b"\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": None}, "expected integers: step"),
        ({"block": "1"}, "expected integers: .*block"),
        ({"action": "fly"}, "action='fly': none that this program knows"),
        ({"colour": "red"}, "has unknown colour"),
        ({"owner": [1]}, "owner="),
        ({"reason": 5}, "reason"),
        ({"start": "x"}, "expected integers: start"),
        ({"action": "write"}, "write that lacks start"),
        ({"action": "copy"}, "copy that lacks other"),
        ({"ref_cnt_before": 10**12}, "ref_cnt from 1000000000000 to 0: none is over 1,048,576"),
        ({"ref_cnt_after": 10**12}, "ref_cnt from 1 to 1000000000000: none is over"),
        ({"ref_cnt_after": -(10**12)}, "none is over"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_its_number(fields, message, tmp_path):
    path = damaged(tmp_path, 4, json.dumps(GOOD | fields).encode() + b"\n")
    with pytest.raises(AuditLogUnreadable, match=rf"log line 4: .*{message}"):
        list(AuditReader(path))


@pytest.mark.parametrize(
    "line", [b"\n", b"{\n", b'{"time": 1.0}\n', b"\xff\xfe\n", b"[1, 2]\n", b"nonsense\n", DEEP]
)
def test_a_damaged_line_in_the_middle_is_named_by_its_number(line, tmp_path):
    path = damaged(tmp_path, 3, line)
    with pytest.raises(AuditLogUnreadable, match="log line 3: "):
        list(AuditReader(path))


def test_a_damaged_last_line_that_has_its_end_was_not_cut_off(tmp_path):
    path = damaged(tmp_path, 6, b"{\n")
    with pytest.raises(AuditLogUnreadable, match="line 6: no JSON"):
        list(AuditReader(path))


HEADER = b'{"format": "paged_jax kv audit", "version": 1, "num_blocks": 9, "block_size": 4, "live": %s}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello\nworld\n", "line 1: not a KV audit log"),
        (b'{"a": 1}\n', "line 1: not a KV audit log"),
        (b"\x00\x01\x02\xff" * 9, "line 1: not a KV audit log"),
        (b'{"format": "paged_jax kv audit", "version": 9}\n', "line 1: version 9 .*reads 1"),
        (b'{"format": "paged_jax kv audit", "version": 1}\n', "line 1: .*lacks num_blocks"),
        (DEEP, "line 1: not a KV audit log"),
        (HEADER % b"[[1]]", "line 1: .*expected a list of texts or integers"),
        (HEADER % b'[{"a": 1}]', "line 1: .*expected a list of texts or integers"),
        (HEADER % b'"name"', "line 1: .*expected a list of texts or integers"),
    ],
)
def test_a_file_that_is_no_log_is_refused(content, message, tmp_path):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(AuditLogUnreadable, match=message):
        AuditReader(tmp_path / "log")


def test_a_file_that_is_not_there_is_named_with_its_older_part(tmp_path):
    with pytest.raises(AuditLogUnreadable, match="log: No such file"):
        AuditReader(tmp_path / "log")
    (tmp_path / "log.1").touch()
    with pytest.raises(AuditLogUnreadable, match=r"older part is there as .*log\.1"):
        AuditReader(tmp_path / "log")


def test_a_snapshot_that_is_damaged_is_named_by_its_line(tmp_path):
    rotated(tmp_path / "log", until=60)
    lines = (tmp_path / "log.1").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"block": 5}\n'
    (tmp_path / "log.1").write_bytes(b"".join(lines))
    with pytest.raises(AuditLogUnreadable, match=r"log\.1 line 3: .*lacks something"):
        AuditReader(tmp_path / "log.1")
    (tmp_path / "log.1").write_bytes(b"".join(lines[:2]))
    with pytest.raises(AuditLogUnreadable, match="cut off in what was held"):
        AuditReader(tmp_path / "log.1")


def test_a_count_that_others_must_have_made_has_unknown_takers(tmp_path):
    """As many as a log may say, at once."""
    path = damaged(tmp_path, 4, json.dumps(GOOD | {"ref_cnt_after": 1 << 20}).encode() + b"\n")
    assert [finding.kind for finding in report_of(path).findings]
