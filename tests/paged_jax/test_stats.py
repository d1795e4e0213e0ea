"""A step's record against tables whose numbers are known."""

import pytest

from paged_jax.schedule import Schedule
from paged_jax.stats import BlockCounts, StepClock, StepStats, Totals
from paged_jax.step_update import Latencies

from .scheduling import add, add_group, finish, make_scheduler, run_step
from .test_preemption import set_back

BLOCK_BYTES = 1000


def step_of(scheduler):
    """One step and its record; the times are 1 second, 2 seconds and 4 seconds long."""
    clock = StepClock(started=10.0)
    cache = scheduler.prefix_cache
    if cache is not None:
        clock.queried_before, clock.hits_before = cache.queried_tokens, cache.hit_tokens
    schedule = scheduler.schedule()
    clock.scheduled, clock.executed = 11.0, 13.0
    blocks = BlockCounts.of(scheduler)
    update = scheduler.update(schedule, scheduler.device.execute(schedule))
    scheduler.retire([sequence.request for sequence in update.advanced])
    return clock.record(
        schedule,
        scheduler,
        blocks=blocks,
        latencies=update.latencies,
        block_bytes=BLOCK_BYTES,
        now=17.0,
    )


def test_a_prefill_step_in_numbers():
    scheduler = make_scheduler(num_blocks=33, block_size=4, seqs=2)
    for name, length in (("a", 5), ("b", 8), ("c", 3)):
        add(scheduler, name, length)
    stats = step_of(scheduler)
    assert (stats.prefill_tokens, stats.generated_tokens) == (11, 2)
    assert (stats.running, stats.waiting, stats.preempted, stats.resumed) == (2, 1, 0, 0)
    blocks = stats.blocks
    assert (blocks.used, blocks.free, blocks.shared, blocks.cached, blocks.stored_tokens) == (4, 28, 0, 0, 13)
    assert stats.block_utilization == blocks.utilization == pytest.approx(13 / 16)
    assert (stats.schedule_seconds, stats.device_seconds, stats.update_seconds) == (1.0, 2.0, 4.0)
    assert len(stats.latencies.first_token) == 2


def test_a_decode_step_counts_the_tokens_that_have_a_slot():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5)
    add(scheduler, "b", 8)
    run_step(scheduler)
    stats = step_of(scheduler)
    assert (stats.prefill_tokens, stats.generated_tokens) == (0, 2)
    assert (stats.blocks.stored_tokens, stats.blocks.used) == (15, 5)
    assert len(stats.latencies.inter_token) == 2


def test_blocks_are_counted_while_the_step_runs_and_requests_as_it_left_them():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5, max_new_tokens=1)
    stats = step_of(scheduler)
    assert (stats.running, stats.blocks.used, scheduler.allocator.num_free_blocks) == (0, 2, 32)


def test_the_null_block_is_neither_used_nor_free():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add(scheduler, "a", 5)
    blocks = step_of(scheduler).blocks
    assert blocks.used + blocks.free == 32


def test_shared_tokens_are_stored_once():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    add_group(scheduler, "a", 6, 3)  # a full block and one of 2 tokens, both shared by three
    assert BlockCounts.of(scheduler) == BlockCounts(
        used=2, logical=6, shared=2, cached=0, free=30, stored_tokens=6, block_size=4
    )
    assert BlockCounts.of(scheduler).saved_share == 1 - 2 / 6
    stats = step_of(scheduler)  # each writes into its own copy
    assert (stats.cow_copies, stats.generated_tokens) == (2, 3)
    assert stats.blocks == BlockCounts(
        used=4, logical=6, shared=1, cached=0, free=28, stored_tokens=4 + 3 * 3, block_size=4
    )


def test_an_empty_pool_is_used_to_the_full():
    blocks = BlockCounts.of(make_scheduler())
    assert (blocks.used, blocks.stored_tokens, blocks.utilization) == (0, 0, 1.0)


def test_the_prefix_cache_in_tokens():
    scheduler = make_scheduler(num_blocks=33, block_size=4, caching=True)
    add(scheduler, "a", range(10), max_new_tokens=1)
    assert (step_of(scheduler).prefix_queried_tokens, BlockCounts.of(scheduler).cached) == (10, 2)
    assert BlockCounts.of(scheduler).free == 32
    add(scheduler, "b", range(9), max_new_tokens=9)
    stats = step_of(scheduler)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens, stats.prefill_tokens) == (9, 8, 0)
    assert stats.blocks.cached == 0
    assert step_of(scheduler).prefix_queried_tokens == 0


def test_swaps_in_bytes_and_who_came_back():
    scheduler = make_scheduler(num_blocks=33, block_size=4, mode="swap")
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    set_back(scheduler, sequence.request)
    stats = step_of(scheduler)
    assert (stats.resumed, stats.swapped_in_bytes, stats.swapped_out_bytes) == (1, 3000, 0)


def test_a_step_that_sets_someone_back_says_so():
    scheduler = make_scheduler(num_blocks=9, block_size=4, mode="swap")
    for name in "abc":
        add(scheduler, name, 4, max_new_tokens=12)
    records = []
    while scheduler.has_unfinished:
        records.append(step_of(scheduler))
        assert records[-1].blocks.stored_tokens <= records[-1].blocks.used * 4
    (back,) = [stats for stats in records if stats.preempted]
    assert (back.preempted, back.swapped_out_bytes, back.waiting) == (1, 2000, 1)
    assert sum(stats.resumed for stats in records) == 1


def test_totals_are_sums_over_the_steps():
    totals = Totals()
    for factor in (1, 10):
        totals.add(
            StepStats(
                running=99,
                waiting=99,
                blocks=BlockCounts(1, 1, 1, 1, 1, 1, 4),
                preempted=factor,
                resumed=2 * factor,
                cow_copies=3 * factor,
                prefix_queried_tokens=4 * factor,
                prefix_hit_tokens=5 * factor,
                swapped_out_bytes=6 * factor,
                swapped_in_bytes=7 * factor,
                prefill_tokens=8 * factor,
                generated_tokens=9 * factor,
                schedule_seconds=0.5 * factor,
                device_seconds=0.25 * factor,
                update_seconds=0.125 * factor,
                latencies=Latencies([], []),
            )
        )
    assert totals == Totals(2, 11, 22, 33, 44, 55, 66, 77, 88, 99, 5.5, 2.75, 1.375)


def test_the_sums_of_a_whole_run_agree_with_what_ran():
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    for name, length in (("a", 5), ("b", 8)):
        add(scheduler, name, length, max_new_tokens=3)
    totals = Totals()
    while scheduler.has_unfinished:
        totals.add(step_of(scheduler))
    assert (totals.steps, totals.prefill_tokens, totals.generated_tokens) == (3, 4 + 7, 6)
    finish(scheduler)


def test_a_step_that_only_ended_someone_has_a_record_too():
    scheduler = make_scheduler()
    stats = StepClock(1.0, 2.0, 3.0).record(
        Schedule(),
        scheduler,
        blocks=BlockCounts.of(scheduler),
        latencies=Latencies([], []),
        block_bytes=BLOCK_BYTES,
        now=4.0,
    )
    assert (stats.generated_tokens, stats.blocks.used) == (0, 0)
