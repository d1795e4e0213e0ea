"""A step's record against tables whose numbers are known."""

import pytest

from paged_jax.stats import step_stats

from .test_scheduler import add, make_scheduler, run_step


def stats_of(scheduler):
    schedule = scheduler.schedule()
    return step_stats(schedule, scheduler, scheduler.allocator)


def test_a_prefill_step_in_numbers():
    scheduler = make_scheduler(num_blocks=33, block_size=4, seqs=2)
    for name, length in (("a", 5), ("b", 8), ("c", 3)):
        add(scheduler, name, length)
    stats = stats_of(scheduler)
    assert (stats.phase, stats.num_tokens) == ("prefill", 13)
    assert (stats.running, stats.waiting, stats.preempted) == (2, 1, 0)
    assert (stats.blocks_used, stats.blocks_free, stats.cached_tokens) == (4, 28, 13)
    assert stats.block_utilization == pytest.approx(13 / 16)


def test_a_decode_step_counts_the_tokens_that_have_a_slot():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5)
    add(scheduler, "b", 8)
    run_step(scheduler)
    stats = stats_of(scheduler)
    assert (stats.phase, stats.num_tokens, stats.cached_tokens, stats.blocks_used) == ("decode", 2, 15, 5)


def test_the_null_block_is_neither_used_nor_free():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5)
    stats = stats_of(scheduler)
    assert stats.blocks_used + stats.blocks_free == 32


def test_a_step_that_sets_someone_back_says_so():
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32)
    for name in "abc":
        add(scheduler, name, 4, max_new_tokens=12)
    preempted = 0
    while scheduler.has_unfinished:
        schedule = scheduler.schedule()
        stats = step_stats(schedule, scheduler, scheduler.allocator)
        assert stats.preempted == len(schedule.preempted)
        assert stats.cached_tokens <= stats.blocks_used * 4
        preempted += stats.preempted
        scheduler.update(schedule, [1] * len(schedule.entries))
    assert preempted > 0
