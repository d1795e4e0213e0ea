"""`paged-jax audit`: what it prints of which log, and its exit code."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from paged_jax.audit import AuditLog
from paged_jax.audit_file import AuditFile
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable
from paged_jax.cli import app

from .audit_logs import audited_engine, play


def audit(*arguments):
    """(exit code, lines on stdout, text on stderr)."""
    done = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout.splitlines(), done.stderr


def faulty(path):
    """A log of two requests: a sibling of the one gives a block back twice, the other keeps one."""
    log = AuditFile(path)
    pool = BlockAllocator(20, 4, audit=log)
    log.arrive("a")
    log.arrive("b")
    log.step = 1
    table, other = BlockTable(pool, "a"), BlockTable(pool, "b")
    table.append(6)
    twin = table.fork("a/1")
    log.step = 2
    twin.append(1)
    table.append(1)
    other.append(1)
    twin.release("finish")
    pool.register(1, "prefix", owner="a")
    pool.incref([1], owner="b", reason="prefix hit")
    log.step = 3
    pool.free([1], owner="a/1", reason="finish")
    table.release("finish")
    log.settle([])
    log.close()
    return path


@pytest.fixture
def clean(tmp_path):
    log = AuditFile(tmp_path / "clean")
    play(audited_engine(log, mode="swap", caching=True), 1, fail_at=[20], until=40)
    log.close()
    return tmp_path / "clean"


def test_a_clean_log_gives_0_and_says_who_still_holds_blocks(clean):
    code, lines, _ = audit(clean)
    assert code == 0
    assert "records, steps 0 to 40, 14 blocks of 4 tokens" in lines[0]
    assert lines[1] == "25 requests arrived, 13 ended"
    assert lines[2] == "all blocks were reset after failed steps: 20"
    assert lines[3] == ("12 requests still run, 2 of them hold blocks, which is no leak: r9 (4), r11 (4)")
    assert lines[4:] == ["no faults"]


def test_faults_give_1_and_name_block_request_step_and_both_events(tmp_path):
    code, lines, _ = audit(faulty(tmp_path / "log"))
    assert code == 1
    assert lines[1:] == [
        "2 requests arrived, 2 ended",
        "2 faults",
        "",
        "1. double free: block 1, request a, step 3",
        "  a/1 gives back a count that a/1 gave back before",
        "    step 2  block 1  decref    2 -> 1  a/1  finish",
        "    step 3  block 1  decref    2 -> 1  a/1  finish",
        "",
        "2. leak: block 4, request b, step 3",
        "  b has ended; it never gave the block back",
        "    step 2  block 4  allocate  0 -> 1  b  append",
        "    step 3  end       b",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "empty"),
        ("hello\n", "line 1: not a KV audit log"),
    ],
)
def test_what_is_no_log_gives_2_and_says_why(content, message, tmp_path):
    if content is not None:
        (tmp_path / "log").write_text(content)
    code, lines, said = audit(tmp_path / "log")
    assert (code, lines) == (2, [])
    assert message in " ".join(said.split())


def test_a_damaged_line_gives_2_and_its_number(clean):
    lines = clean.read_bytes().splitlines(keepends=True)
    lines[99] = lines[99][:30] + b"\n"
    clean.write_bytes(b"".join(lines))
    code, shown, said = audit(clean)
    assert (code, shown) == (2, [])
    assert "clean line 100: no JSON" in said


def test_a_log_that_was_cut_off_says_so_and_is_judged_all_the_same(clean):
    clean.write_bytes(clean.read_bytes()[:-5])
    code, lines, _ = audit(clean)
    assert code == 0
    assert "its last line was cut off, and is left out" in lines


def test_what_a_ring_has_dropped_is_said_to_be_unknown(tmp_path):
    log = AuditLog(max_records=300)
    play(audited_engine(log), 1)
    log.write_jsonl(tmp_path / "log")
    code, lines, _ = audit(tmp_path / "log")
    assert code == 0
    assert any(line.startswith("older records were dropped") for line in lines)


def test_the_snapshot_of_a_log_in_several_files_is_mentioned_where_the_older_ones_are_gone(tmp_path):
    log = AuditFile(tmp_path / "log", max_bytes=20_000, max_files=2)
    play(audited_engine(log, caching=True), 1, count=60)
    log.close()
    code, lines, _ = audit(tmp_path / "log")
    assert code == 0
    assert " records in 2 files, steps " in lines[0]
    assert any(line.startswith("earlier files are gone") for line in lines)


# -- life stories ------------------------------------------------------------------------------------------


def test_the_life_of_a_block(tmp_path):
    code, lines, _ = audit(faulty(tmp_path / "log"), "--block", 2)
    assert code == 0
    assert lines == [
        "step 1  block 2  allocate  0 -> 1  a  append",
        "step 1  block 2  write     1 -> 1  a  offsets 0 to 1",
        "step 1  block 2  incref    1 -> 2  a/1  fork",
        "step 2  block 2  copy      2 -> 2  a/1  to block 3",
        "step 2  block 2  decref    2 -> 1  a/1  copy-on-write",
        "step 2  block 2  write     1 -> 1  a  offset 2",
        "step 3  block 2  free      1 -> 0  a  finish",
    ]


def test_the_life_of_a_block_that_was_copied_into_begins_with_that(tmp_path):
    _, lines, _ = audit(faulty(tmp_path / "log"), "--block", 3)
    assert lines[:2] == [
        "step 2  block 3  allocate  0 -> 1  a/1  append",
        "step 2  block 2  copy      2 -> 2  a/1  to block 3",
    ]


def test_the_life_of_a_request_has_that_of_its_sequences(tmp_path):
    code, lines, _ = audit(faulty(tmp_path / "log"), "--request", "a")
    assert code == 1
    assert lines[0] == "step 0  arrive    a"
    assert "step 2  block 3  free      1 -> 0  a/1  finish" in lines
    assert "step 3  end       a" in lines
    assert not any("  b  " in line for line in lines)


def test_a_request_that_a_failed_step_set_back_has_that_in_its_life(clean):
    _, lines, _ = audit(clean, "--request", "r9")
    assert "step 20  reset" in lines


def test_with_a_story_only_the_faults_of_that_one_are_shown_and_count(tmp_path):
    path = faulty(tmp_path / "log")
    for wanted, shown in (
        (("--block", 3), []),
        (("--block", 1), ["1. double free: block 1, request a, step 3"]),
        (("--block", 4), ["1. leak: block 4, request b, step 3"]),
        (("--request", "a"), ["1. double free: block 1, request a, step 3"]),
        (("--request", "b"), ["1. leak: block 4, request b, step 3"]),
        (("--request", "a", "--block", 3), []),
    ):
        code, lines, _ = audit(path, *wanted)
        assert code == bool(shown)
        assert [line for line in lines if line[0:1].isdigit()] == shown


@pytest.mark.parametrize("wanted", [("--block", 19), ("--request", "nobody")])
def test_a_story_of_nothing_gives_2(wanted, tmp_path):
    code, lines, said = audit(faulty(tmp_path / "log"), *wanted)
    assert (code, lines) == (2, [])
    assert f"it has no record of {wanted[0].removeprefix('--')} {wanted[1]}" in " ".join(said.split())


def test_a_story_begins_with_the_snapshot_where_older_files_are_gone(tmp_path):
    log = AuditFile(tmp_path / "log", max_bytes=5_000, max_files=1)
    pool = BlockAllocator(99, 4, audit=log)
    log.arrive("a")
    log.step = 7
    pool.allocate(2, owner="a", reason="append")
    for _ in range(100):
        pool.incref([2], owner="a", reason="more")
        pool.free([2], owner="a")
        log.flush()
    log.close()
    _, lines, _ = audit(tmp_path / "log", "--block", 1)
    assert lines == ["step 7  block 1  allocate  0 -> 1  a  append"]


# -- for programs ------------------------------------------------------------------------------------------


def test_json_has_all_of_it(tmp_path):
    code, lines, _ = audit(faulty(tmp_path / "log"), "--json", "--block", 1)
    answer = json.loads("\n".join(lines))
    assert code == 1
    assert (answer["num_blocks"], answer["block_size"], answer["requests_arrived"]) == (20, 4, 2)
    assert [event["action"] for event in answer["story"]][:3] == ["allocate", "write", "incref"]
    (finding,) = answer["findings"]
    assert (finding["kind"], finding["block"], finding["request"], finding["step"]) == (
        "double free",
        1,
        "a",
        3,
    )
    assert (finding["first"]["step"], finding["second"]["step"]) == (2, 3)
    assert finding["message"] == "a/1 gives back a count that a/1 gave back before"


def test_json_of_a_clean_log_has_no_findings(clean):
    code, lines, _ = audit(clean, "--json")
    answer = json.loads("\n".join(lines))
    assert (code, answer["findings"], answer["failed_steps"]) == (0, [], [20])
    assert answer["blocks_of_running_requests"]["r9"] == 4
    assert "story" not in answer


def test_it_needs_no_jax(clean):
    code = (
        "import sys\nfrom paged_jax.cli import app\n"
        f"try:\n    app(['audit', {str(clean)!r}])\nexcept SystemExit as end:\n"
        "    assert not end.code\nprint({'jax', 'flax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
