"""How requests give their blocks back and get going again: on a made-up device."""

import pytest

from paged_jax import BlockAllocator
from paged_jax.audit import AuditLog
from paged_jax.preemption import Preemption, PreemptionCosts, SwapSpace, add_copies
from paged_jax.queues import missing_blocks
from paged_jax.schedule import Schedule

from .scheduling import (
    add,
    add_group,
    check,
    expected_tokens,
    finish,
    finish_step,
    give_blocks_back,
    make_scheduler,
    names,
    run_step,
    shape,
    take_blocks,
)


def set_back(scheduler, request):
    """Set a running request back, as a step that lacks blocks would; the device gets its swap-out."""
    schedule = Schedule()
    scheduler.preemption.set_back(request, schedule)
    scheduler.queues.unseat(request)
    scheduler.device.execute(schedule)
    check(scheduler)
    return schedule


# -- which way ---------------------------------------------------------------------------------------------


def test_recompute_leaves_the_swap_space_alone():
    scheduler = make_scheduler(mode="recompute", host_blocks=9)
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    assert set_back(scheduler, sequence.request).swap_out == []
    assert sequence.request.swapped is None
    assert shape(run_step(scheduler)) == ({"a": 9}, "a")


def test_swap_moves_the_blocks_out_and_back_and_computes_nothing_again():
    scheduler = make_scheduler(mode="swap", host_blocks=9)
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    old = list(sequence.table.blocks)
    out = set_back(scheduler, sequence.request).swap_out
    assert [block for block, _ in out] == old
    assert scheduler.preemption.space.num_free_blocks == 6
    take_blocks(scheduler, 1)  # so that it comes back to other blocks
    schedule = scheduler.schedule()
    assert (shape(schedule), schedule.placed) == (({}, "a"), [sequence])
    assert names(schedule.resumed) == ["a"]
    assert [host for host, _ in schedule.swap_in] == [host for _, host in out]
    assert sequence.table.blocks == [block for _, block in schedule.swap_in] != old
    assert scheduler.preemption.space.num_free_blocks == 6  # until the step has read them
    finish_step(scheduler, schedule, scheduler.device.execute(schedule))
    assert scheduler.preemption.space.num_free_blocks == 9
    give_blocks_back(scheduler)
    finish(scheduler)
    assert sequence.token_ids == expected_tokens(sequence)


@pytest.mark.parametrize(("move_block", "swaps"), [(1.9, True), (2.0, False)])
def test_auto_swaps_where_moving_takes_less_time_than_computing(move_block, swaps):
    """9 tokens in 3 blocks, moved twice: 6 moves against 12 units of computing."""
    costs = PreemptionCosts(compute_token=12 / 9, move_block=move_block)
    scheduler = make_scheduler(mode="auto", costs=costs)
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    assert bool(set_back(scheduler, sequence.request).swap_out) == swaps
    finish(scheduler)
    assert sequence.token_ids == expected_tokens(sequence)


def test_auto_swaps_a_group_whatever_it_costs():
    dear = PreemptionCosts(compute_token=1.0, move_block=1000.0)
    scheduler = make_scheduler(mode="auto", costs=dear)
    group = add_group(scheduler, "a", 9, 2)
    assert set_back(scheduler, group[0].request).swap_out


def test_auto_goes_by_the_costs_of_the_one_sequence_that_is_left_of_a_group():
    cheap = PreemptionCosts(compute_token=1.0, move_block=1.0)
    scheduler = make_scheduler(mode="auto", costs=cheap)
    a, b = add_group(scheduler, "a", 9, 2, max_new_tokens=8)
    run_step(scheduler, end=[a])
    run_step(scheduler)
    assert set_back(scheduler, b.request).swap_out
    dear = PreemptionCosts(compute_token=1.0, move_block=1000.0)
    scheduler = make_scheduler(mode="auto", costs=dear)
    a, b = add_group(scheduler, "a", 9, 2, max_new_tokens=8)
    run_step(scheduler, end=[a])
    run_step(scheduler)
    assert not set_back(scheduler, b.request).swap_out


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_what_the_swap_space_can_not_hold_is_computed_again(mode):
    scheduler = make_scheduler(mode=mode, host_blocks=4)
    a, b = add(scheduler, "a", 9), add(scheduler, "b", 9)
    run_step(scheduler)
    assert len(set_back(scheduler, b.request).swap_out) == 3
    assert set_back(scheduler, a.request).swap_out == []
    steps = finish(scheduler)
    assert names(request for schedule in steps for request in schedule.resumed) == ["b"]
    assert [a.token_ids, b.token_ids] == [expected_tokens(a), expected_tokens(b)]


def test_costs_follow_from_the_sizes():
    costs = PreemptionCosts.of(
        num_parameters=5, block_bytes=600, flops_per_second=100.0, bytes_per_second=200.0
    )
    assert costs == PreemptionCosts(compute_token=0.1, move_block=3.0)


# -- groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("prompt", [7, 8, 9])
def test_a_group_comes_back_with_its_sharing_and_right_tokens(mode, steps, prompt):
    scheduler = make_scheduler(mode=mode, block_size=4)
    group = add_group(scheduler, "a", prompt, 3, max_new_tokens=12)
    for _ in range(steps):
        run_step(scheduler)
    full = min(prompt, group[0].table.num_tokens) // 4
    used = 63 - scheduler.allocator.num_free_blocks
    shared = scheduler.allocator.num_shared_blocks
    swap_out = set_back(scheduler, group[0].request).swap_out
    assert len(swap_out) == (used if mode == "swap" else 0)  # each shared block once
    assert scheduler.allocator.num_free_blocks == 63
    while not all(sequence.table.num_tokens > full * 4 for sequence in group):
        run_step(scheduler)
    assert [scheduler.allocator.ref_cnt(block) for block in group[0].table.blocks[:full]] == [3] * full
    assert len({tuple(sequence.table.blocks[:full]) for sequence in group}) == 1
    if steps:  # else the step copied the partly filled block that they still shared
        assert scheduler.allocator.num_shared_blocks == shared
    finish(scheduler)
    assert [s.token_ids for s in group] == [expected_tokens(s, forked_at=prompt + 1) for s in group]


def test_a_shared_partly_filled_block_comes_back_once_for_each_that_writes_into_it():
    """The copies of a step are made before its swap-ins, so a copy would read what is not there yet."""
    scheduler = make_scheduler(mode="swap", block_size=4)
    group = add_group(scheduler, "a", 6, 3, max_new_tokens=6)
    assert len(set_back(scheduler, group[0].request).swap_out) == 2
    schedule = run_step(scheduler)
    assert schedule.copies == []
    hosts = [host for host, _ in schedule.swap_in]
    assert (len(hosts), len(set(hosts))) == (4, 2)
    finish(scheduler)
    assert [s.token_ids for s in group] == [expected_tokens(s, forked_at=7) for s in group]


def test_copies_of_blocks_that_do_not_come_back_are_copies():
    schedule = Schedule(swap_in=[(7, 1)])
    add_copies([(1, 2), (3, 4)], schedule)
    assert (schedule.copies, schedule.swap_in) == ([(3, 4)], [(7, 1), (7, 2)])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_group_that_was_set_back_amid_its_rebuilding_keeps_its_sharing(mode):
    scheduler = make_scheduler(mode="recompute", block_size=4, budget=6)
    group = add_group(scheduler, "a", 13, 3, max_new_tokens=12)
    for _ in range(3):
        run_step(scheduler)
    set_back(scheduler, group[0].request)
    run_step(scheduler)
    run_step(scheduler)
    assert [sequence.table.num_tokens for sequence in group[1:]] == [0, 0]
    scheduler.preemption.mode = mode
    set_back(scheduler, group[0].request)
    scheduler.preemption.mode = "recompute"
    while any(sequence.num_to_prefill > 0 for sequence in group):
        run_step(scheduler)
    assert [scheduler.allocator.ref_cnt(block) for block in group[0].table.blocks[:3]] == [3, 3, 3]
    finish(scheduler)
    assert [s.token_ids for s in group] == [expected_tokens(s, forked_at=14) for s in group]


def test_a_table_rebuilt_without_a_prefill_is_placed_even_if_its_next_block_has_to_wait():
    """A sibling whose tokens all lie in shared blocks begins in a step of its own and prefills nothing."""
    scheduler = make_scheduler(mode="recompute", block_size=4)
    add(scheduler, "z", 1, max_new_tokens=4)
    group = add_group(scheduler, "a", 8, 2, max_new_tokens=6)
    set_back(scheduler, group[0].request)
    assert shape(run_step(scheduler)) == ({"a": 8}, "z")
    take_blocks(scheduler, scheduler.allocator.num_free_blocks)
    schedule = run_step(scheduler)
    assert (shape(schedule), schedule.placed) == (({}, "z"), group)
    give_blocks_back(scheduler)
    assert run_step(scheduler).placed == []
    finish(scheduler)
    assert [s.token_ids for s in group] == [expected_tokens(s, forked_at=9) for s in group]


@pytest.mark.parametrize(("num_blocks", "fits"), [(7, True), (6, False)])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_lone_group_needs_exactly_its_blocks(num_blocks, fits, mode):
    """Two sequences of 16 slots that share 2 full blocks: 2 + 2 x 2 blocks, and never one more on the way."""
    scheduler = make_scheduler(num_blocks, block_size=4, mode=mode)
    group = add_group(scheduler, "a", 10, 2, max_new_tokens=7)
    set_back(scheduler, group[0].request)
    finish(scheduler)
    tokens = [expected_tokens(s, forked_at=11) for s in group]
    assert [s.token_ids for s in group] == [t if fits else t[:13] for t in tokens]
    assert {s.finish_reason for s in group} == {"length"}


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_missing_blocks_of_a_waiting_group_are_those_that_it_then_takes(mode):
    for prompt in range(5, 14):
        for steps in range(6):
            scheduler = make_scheduler(mode=mode, block_size=4)
            group = add_group(scheduler, "a", prompt, 3, max_new_tokens=20)
            for _ in range(steps):
                run_step(scheduler)
            request = group[0].request
            set_back(scheduler, request)
            expected = missing_blocks(request, 4)
            if mode == "swap":
                expected += len(request.swapped.host_blocks)
            while not run_step(scheduler).decode:
                pass
            assert 63 - scheduler.allocator.num_free_blocks == expected


def test_a_request_swapped_amid_its_prefill_waits_for_all_that_it_lacks():
    scheduler = make_scheduler(num_blocks=13, block_size=4, budget=8, mode="swap")
    a = add(scheduler, "a", 1, max_new_tokens=99)
    run_step(scheduler)
    b = add(scheduler, "b", 32, max_new_tokens=2)
    run_step(scheduler)
    set_back(scheduler, b.request)
    take_blocks(scheduler, 2)
    for _ in range(2):  # 9 blocks are free: it could come back to 2, but needs 6 more, and 2 must stay
        assert not run_step(scheduler).resumed
    give_blocks_back(scheduler)
    assert names(run_step(scheduler).resumed) == ["b"]
    assert a.request.metrics.num_preemptions == 0


# -- the swap space ----------------------------------------------------------------------------------------


def test_the_swap_space_gives_each_block_to_one_and_takes_it_back():
    space = SwapSpace(5)
    first, second = space.allocate(2), space.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert space.num_free_blocks == 0
    space.free(first)
    assert space.num_free_blocks == 2
    assert sorted(space.allocate(2)) == sorted(first)


def test_an_aborted_request_gives_its_swap_space_back():
    scheduler = make_scheduler(mode="swap", host_blocks=9)
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    set_back(scheduler, sequence.request)
    scheduler.abort("a")
    assert scheduler.preemption.space.num_free_blocks == 9


def test_a_request_aborted_while_it_comes_back_gives_everything_back():
    scheduler = make_scheduler(mode="swap", host_blocks=9)
    sequence = add(scheduler, "a", 9)
    run_step(scheduler)
    set_back(scheduler, sequence.request)
    schedule = scheduler.schedule()
    sampled = scheduler.device.execute(schedule)
    scheduler.abort("a")
    assert scheduler.update(schedule, sampled).advanced == []
    assert scheduler.preemption.space.num_free_blocks == 9
    assert scheduler.allocator.num_free_blocks == 63


def test_swaps_are_in_the_audit_log():
    log = AuditLog()
    scheduler = make_scheduler()
    scheduler.allocator = allocator = BlockAllocator(64, 4, audit=log)
    scheduler.preemption = Preemption(allocator, mode="swap", num_host_blocks=9)
    sequence = add(scheduler, "a", 6)
    run_step(scheduler)
    set_back(scheduler, sequence.request)
    run_step(scheduler)
    swaps = [(record.block, record.owner, record.reason) for record in log if record.action == "swap-out"]
    assert swaps == [(1, "a", "to host block 0"), (2, "a", "to host block 1")]
    assert [record.reason for record in log if record.reason == "swap-in"] == ["swap-in"] * 2
