"""After a step that failed at any place: the books are right, and all tokens come out as if it had not."""

import pytest

from paged_jax.errors import NoFreeBlocks

from .scheduling import (
    add,
    add_group,
    check,
    check_all_free,
    expected_tokens,
    finish,
    finish_step,
    make_scheduler,
    names,
    run_step,
    take_blocks,
)


def failing(function, at, error):
    """The function, but its call number `at` raises."""
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return function(*args, **kwargs)

    return call


def crowd(mode, caching):
    """Groups and single ones in a pool that is too small for them, a few steps on."""
    scheduler = make_scheduler(
        num_blocks=18, block_size=4, seqs=7, budget=9, mode=mode, caching=caching, host_blocks=20
    )
    group = add_group(scheduler, "g", 7, 3, max_new_tokens=12)
    singles = [add(scheduler, name, 6, max_new_tokens=14) for name in "ab"]
    singles += [
        add(scheduler, name, range(length), max_new_tokens=9) for name, length in (("c", 18), ("d", 17))
    ]
    wanted = {s: expected_tokens(s, forked_at=8) for s in group} | {s: expected_tokens(s) for s in singles}
    return scheduler, wanted


def play(scheduler, *, fail_at_step=None, fail=None):
    """Run to the end; returns the number of steps, and whether `fail` did fail."""
    steps, failed = 0, False
    while scheduler.has_unfinished:
        if steps == fail_at_step:
            failed = fail(scheduler)
            check(scheduler)
        run_step(scheduler)
        steps += 1
        assert steps < 1000
    return steps, failed


def set_back_all(scheduler):
    swapped = {r: r.swapped for r in scheduler.waiting if r.swapped is not None}
    swapped |= {r: r.swapped for r in scheduler.running if r.swapped is not None}
    preempted = list(scheduler._in_flight.preempted) if scheduler._in_flight else []
    finished = [r for r in scheduler.queues.by_id.values() if r.is_finished]
    scheduler.device.fail()
    scheduler.set_back_all()
    assert scheduler.running == []
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks - 1
    assert scheduler.allocator.num_cached_blocks == 0
    for request, blocks in swapped.items():
        assert request.swapped is (None if request in preempted or request in finished else blocks)
    check(scheduler)


def fail_in_schedule(method, at, error):
    def fail(scheduler):
        allocator = scheduler.allocator
        patched = failing(getattr(allocator, method), at, error)
        original = type(allocator)
        scheduler.allocator.__class__ = type(
            "Failing", (original,), {"__slots__": (), method: staticmethod(patched)}
        )
        try:
            schedule = scheduler.schedule()
        except type(error):
            scheduler.allocator.__class__ = original
            set_back_all(scheduler)
            return True
        scheduler.allocator.__class__ = original
        finish_step(scheduler, schedule, scheduler.device.execute(schedule))
        return False

    return fail


def fail_before_the_device(scheduler):
    scheduler.schedule()
    set_back_all(scheduler)
    return True


def fail_on_the_device(scheduler):
    schedule = scheduler.schedule()
    scheduler.device.execute(schedule)
    set_back_all(scheduler)
    return True


def fail_after_update(scheduler):
    schedule = scheduler.schedule()
    scheduler.update(schedule, scheduler.device.execute(schedule))
    set_back_all(scheduler)
    return True


MODES = pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
CACHING = pytest.mark.parametrize("caching", [False, True])


def check_tokens(wanted):
    assert {s: s.token_ids for s in wanted} == wanted


@MODES
@CACHING
@pytest.mark.parametrize("fail", [fail_before_the_device, fail_on_the_device, fail_after_update])
def test_a_step_that_fails_costs_no_token(mode, caching, fail):
    steps, _ = play(crowd(mode, caching)[0])
    for step in range(steps):
        scheduler, wanted = crowd(mode, caching)
        play(scheduler, fail_at_step=step, fail=fail)
        check_all_free(scheduler)
        check_tokens(wanted)


@MODES
@CACHING
@pytest.mark.parametrize("error", [NoFreeBlocks("none"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_schedule_that_is_left_at_any_allocation_costs_no_token(mode, caching, error):
    steps, _ = play(crowd(mode, caching)[0])
    failures = 0
    for step in range(steps):
        at, failed = 0, True
        while failed:
            at += 1
            scheduler, wanted = crowd(mode, caching)
            _, failed = play(scheduler, fail_at_step=step, fail=fail_in_schedule("allocate", at, error))
            failures += failed
            check_all_free(scheduler)
            check_tokens(wanted)
    assert failures > steps


@MODES
def test_a_set_back_that_fails_half_way_leaves_no_swapped_blocks_that_were_never_written(mode):
    steps, _ = play(crowd(mode, caching=False)[0])
    failures = 0
    for step in range(steps):
        for at in (1, 2):
            scheduler, wanted = crowd(mode, caching=False)

            def fail(scheduler, at=at):
                preemption = scheduler.preemption
                original = preemption.drop_tables
                preemption.drop_tables = failing(original, at, KeyboardInterrupt())
                try:
                    schedule = scheduler.schedule()
                except KeyboardInterrupt:
                    preemption.drop_tables = original
                    set_back_all(scheduler)
                    return True
                preemption.drop_tables = original
                finish_step(scheduler, schedule, scheduler.device.execute(schedule))
                return False

            failures += play(scheduler, fail_at_step=step, fail=fail)[1]
            check_all_free(scheduler)
            check_tokens(wanted)
    assert failures


def test_all_are_computed_again_in_their_order():
    scheduler = make_scheduler()
    for name in "ab":
        add(scheduler, name, 5)
    run_step(scheduler)
    add(scheduler, "c", 25)
    scheduler.schedule()  # and its tokens never come
    set_back_all(scheduler)
    assert names(scheduler.waiting) == ["a", "b", "c"]
    assert [r.metrics.num_preemptions for r in scheduler.waiting] == [1, 1, 1]


def until(scheduler, happens):
    """Run up to a step in which something happens, and schedule that one; its schedule."""
    while not happens(schedule := scheduler.schedule()):
        finish_step(scheduler, schedule, scheduler.device.execute(schedule))
    return schedule


def three_that_swap():
    scheduler = make_scheduler(num_blocks=9, block_size=4, mode="swap")
    return scheduler, [add(scheduler, name, 4, max_new_tokens=12) for name in "abc"]


def test_who_went_to_the_swap_space_in_the_failed_step_is_computed_again():
    scheduler, sequences = three_that_swap()
    (request,) = until(scheduler, lambda schedule: schedule.preempted).preempted
    assert request.swapped is not None
    set_back_all(scheduler)
    assert request.swapped is None
    assert request.metrics.num_preemptions == 1
    play(scheduler)
    assert [s.token_ids for s in sequences] == [expected_tokens(s) for s in sequences]


def test_who_was_coming_back_in_the_failed_step_comes_back_in_a_later_one():
    scheduler, sequences = three_that_swap()
    (request,) = until(scheduler, lambda schedule: schedule.resumed).resumed
    set_back_all(scheduler)
    assert request.swapped is not None
    until(scheduler, lambda schedule: request in schedule.resumed)
    scheduler.set_back_all()
    play(scheduler)
    assert [s.token_ids for s in sequences] == [expected_tokens(s) for s in sequences]


def test_nothing_is_found_in_the_cache_afterwards():
    scheduler = make_scheduler(caching=True)
    sequence = add(scheduler, "a", 20)
    run_step(scheduler)
    assert scheduler.prefix_cache.match(sequence)
    set_back_all(scheduler)
    assert scheduler.prefix_cache.match(sequence) == []


def test_a_fork_that_never_ran_waits_with_its_request():
    scheduler = make_scheduler()
    first, second = add_group(scheduler, "a", 5, 2)
    set_back_all(scheduler)
    assert (first.row, second.row) == (None, None)
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert second.token_ids == expected_tokens(second, forked_at=6)


def test_who_ended_in_the_failed_step_is_still_known_until_then():
    """So that whoever catches the failure can put its output out."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, budget=8)
    sequence = add(scheduler, "a", 20)
    run_step(scheduler)
    take_blocks(scheduler, 6)
    add(scheduler, "b", 2)
    schedule = scheduler.schedule()
    assert schedule.exhausted == [sequence]
    assert list(scheduler.queues.by_id) == ["a", "b"]
    scheduler.set_back_all()
    assert list(scheduler.queues.by_id) == ["b"]
    assert names(scheduler.waiting) == ["b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_allocator_that_an_interrupt_tore_is_made_anew(mode):
    """A block that left the free list and reached nobody, counts without a holder, swap blocks lost."""
    scheduler = make_scheduler(num_blocks=12, block_size=4, mode=mode, caching=True)
    for name in "abc":
        add(scheduler, name, 7, max_new_tokens=12)
    while not any(request.swapped for request in scheduler.waiting) and mode == "swap":
        run_step(scheduler)
    scheduler.schedule()
    allocator = scheduler.allocator
    allocator._take("nobody")
    allocator._ref_cnt[1] += 1
    allocator.num_shared_blocks += 3
    if mode == "swap":
        scheduler.preemption.space.allocate(2)
    set_back_all(scheduler)
    finish(scheduler)
    assert allocator.num_free_blocks == 11
    space = scheduler.preemption.space
    assert space.num_free_blocks == space.num_blocks


def test_books_that_an_interrupt_tore_are_mended():
    """A request taken from one queue and not yet put into the next, and a row that nobody has."""
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 5), add(scheduler, "b", 5)
    run_step(scheduler)
    scheduler.queues.decoding.remove(a.request)
    b.row = None
    set_back_all(scheduler)
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert [a.token_ids, b.token_ids] == [expected_tokens(a), expected_tokens(b)]
