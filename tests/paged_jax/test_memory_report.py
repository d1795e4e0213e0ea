"""The ledger and the map of a pool, against a snapshot whose numbers are known."""

import pytest
from rich.console import Console

from paged_jax.capacity import KVShape
from paged_jax.memory_report import Holding, MemorySnapshot, block_map, ledger

from .scheduling import add, add_group, make_scheduler, run_step

KV = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, itemsize=4)
SNAPSHOT = MemorySnapshot(
    (Holding("x", (1, 2, 3), 10), Holding("y", (5, 7, 8, 2), 14)), num_blocks=200, block_size=4
)
EMPTY = MemorySnapshot((), num_blocks=200, block_size=4)


def printed(what):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_a_snapshot_is_what_the_running_sequences_hold():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5)
    add(scheduler, "b", 8)
    run_step(scheduler)
    snapshot = MemorySnapshot.of(scheduler)
    assert snapshot.holdings == (Holding("a", (1, 4), 5), Holding("b", (2, 3), 8))
    assert (snapshot.num_blocks, snapshot.block_size) == (33, 4)
    run_step(scheduler)
    assert snapshot.holdings[0] == Holding("a", (1, 4), 5)


def test_a_block_that_two_share_is_used_once_and_so_are_its_tokens():
    assert (SNAPSHOT.blocks_used, SNAPSHOT.tokens, SNAPSHOT.stored_tokens) == (6, 24, 22)
    assert SNAPSHOT.block_utilization == pytest.approx(22 / 24)


def test_every_sequence_of_a_group_is_in_a_snapshot():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add_group(scheduler, "a", 6, 3)
    snapshot = MemorySnapshot.of(scheduler)
    assert snapshot.holdings == (Holding("a", (1, 2), 6),) * 3
    assert (snapshot.blocks_used, snapshot.tokens, snapshot.stored_tokens) == (2, 18, 6)
    assert snapshot.block_utilization == 6 / 8


def test_expected_utilization_follows_the_mean_length():
    assert SNAPSHOT.expected_utilization == pytest.approx(1 - 4 / (2 * 12))


@pytest.mark.parametrize("snapshot", [EMPTY, MemorySnapshot((Holding("x", (), 0),), 200, 4)])
def test_a_pool_in_which_nothing_is_held_has_a_report_too(snapshot):
    assert (snapshot.block_utilization, snapshot.expected_utilization) == (1.0, 1.0)
    assert "0 blocks" in printed(ledger(snapshot, KV, max_model_len=100))
    assert "." in printed(block_map(snapshot))


def test_the_ledger_shows_its_arithmetic():
    text = printed(ledger(SNAPSHOT, KV, max_model_len=100))
    assert "2 x 2 layers x 3 KV heads x 8 x 4 bytes = 384" in text
    assert "199 blocks of 4 tokens" in text
    assert "2 sequences, 24 tokens" in text
    assert "6 blocks" in text
    assert "50 blocks" in text  # 2 sequences x 25
    assert "8.3 times as much; this pool would hold 7 sequences" in text


def test_the_map_has_a_character_a_block():
    lines = printed(block_map(SNAPSHOT, width=8)).splitlines()
    assert lines[0].split() == ["0", "0A+A.B.B"]
    assert lines[1].split() == ["8", "B......."]
    assert lines[2].split() == ["and", "184", "more", "free", "blocks"]
    assert "A request x: 10 tokens in blocks 1-3" in printed(block_map(SNAPSHOT))
    assert "B request y: 14 tokens in blocks 5 7-8 2" in printed(block_map(SNAPSHOT))


def test_the_map_of_a_full_pool_ends_with_it():
    full = MemorySnapshot((Holding("x", tuple(range(1, 10)), 36),), num_blocks=10, block_size=4)
    lines = printed(block_map(full, width=8)).splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["0AAAAAAA", "AA"]
    assert "more free" not in printed(block_map(full))


def test_more_sequences_than_letters_still_have_a_map():
    many = MemorySnapshot(tuple(Holding(str(i), (i + 1,), 1) for i in range(60)), 100, 4)
    assert "request 59: 1 tokens in blocks 60" in printed(block_map(many))
