"""Contiguous reservations, beside a plain simulation that takes every step and every slot by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.contiguous import Arena, ContiguousOptions, ContiguousSimulation
from paged_jax.scheduler import SMALLEST_BUDGET
from paged_jax.sim_request import SimRequest
from paged_jax.step_time import StepTime

TIME = StepTime(fixed=0.01, per_token=1e-4, per_kv_token=1e-6)


def slow(requests, options, step_time):
    """Rows of (start, seconds, running, waiting, reserved, written, ahead, stranded), and who was refused."""
    coming = sorted(requests, key=lambda request: request.arrival)
    memory = [None] * options.slots
    waiting, running, refused, rows, clock = [], [], [], [], 0.0
    while coming or waiting or running:
        if not (waiting or running):
            clock = max(clock, coming[0].arrival)
        while coming and coming[0].arrival <= clock:
            request = coming.pop(0)
            if options.slots_for(request):
                waiting.append(request)
            else:
                refused.append(request.name)
        prefilling = [one for one in running if one["written"] < one["request"].prompt_tokens - 1]
        most = options.max_num_batched_tokens
        budget = min(max(most - (len(running) - len(prefilling)), SMALLEST_BUDGET), most)
        stranded = 0
        while waiting and len(running) < options.max_num_seqs and len(prefilling) < options.max_prefill_seqs:
            if sum(one["request"].prompt_tokens - 1 - one["written"] for one in prefilling) >= budget:
                break
            size = options.slots_for(waiting[0])
            if not options.fragments:
                places = [i for i, owner in enumerate(memory) if owner is None][:size]
            else:
                starts = (i for i in range(options.slots - size + 1) if not any(memory[i : i + size]))
                start = next(starts, None)
                places = [] if start is None else list(range(start, start + size))
            if len(places) < size:
                free = memory.count(None)
                stranded = free if size <= free else 0
                break
            request = waiting.pop(0)
            for place in places:
                memory[place] = request.name
            one = {"request": request, "places": places, "written": 0, "generated": 0}
            running.append(one)
            prefilling.append(one)
        if not running:
            continue
        decoding = [one for one in running if one not in prefilling]
        computed = read = 0
        for one in prefilling:
            missing = one["request"].prompt_tokens - 1 - one["written"]
            tokens = min(missing, max(budget - computed, 0))
            one["written"] += tokens
            computed += tokens
            read += one["written"] if tokens else 0
            if tokens == missing:
                decoding.append(one)
        for one in decoding:
            one["written"] += 1
            one["generated"] += 1
            read += one["written"]
        seconds = step_time.seconds(computed + len(decoding), read)
        reserved = sum(len(one["places"]) for one in running)
        written = sum(one["written"] for one in running)
        needed = sum(one["request"].prompt_tokens + one["request"].output_tokens - 1 for one in running)
        rows.append(
            (
                clock,
                seconds,
                len(running),
                len(waiting),
                reserved,
                written,
                needed - written,
                stranded,
            )
        )
        clock += seconds
        for one in list(running):
            if one["generated"] == one["request"].output_tokens:
                running.remove(one)
                memory = [None if owner == one["request"].name else owner for owner in memory]
    return np.array(rows).T, refused


request_lists = st.lists(
    st.tuples(st.floats(0, 1, allow_nan=False), st.integers(1, 20), st.integers(1, 30)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=120, deadline=None)
@given(
    given=request_lists,
    slots=st.integers(10, 120),
    reservation=st.sampled_from(["max", "pow2", "oracle"]),
    fragments=st.booleans(),
    rows=st.integers(1, 6),
)
def test_it_equals_the_plain_simulation(given, slots, reservation, fragments, rows):
    requests = [SimRequest(f"r{i}", *one) for i, one in enumerate(given)]
    options = ContiguousOptions(
        slots,
        reservation,
        max_tokens=32,
        fragments=fragments,
        max_num_seqs=rows,
        max_num_batched_tokens=12,
        max_prefill_seqs=3,
    )
    outcome = ContiguousSimulation(requests, options, TIME).run()
    series, refused = outcome.series, outcome.refused
    expected, expected_refused = slow(requests, options, TIME)
    assert refused == expected_refused
    if not len(series):
        assert expected.size == 0
        return
    got = np.stack(
        [
            series.start,
            series.seconds,
            series.running,
            series.waiting,
            series.reserved,
            series.written,
            series.ahead,
            series.stranded,
        ]
    )
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    assert len(outcome.latencies) == len(requests) - len(refused)


def test_what_each_reservation_takes():
    request = SimRequest("a", 0.0, 100, 25)
    taken = {
        kind: ContiguousOptions(10_000, kind, max_tokens=2048).slots_for(request)
        for kind in ("max", "pow2", "oracle")
    }
    assert taken == {"max": 2048, "pow2": 132, "oracle": 124}
    assert ContiguousOptions(10_000, "max", max_tokens=100).slots_for(request) == 0
    assert ContiguousOptions(100, "oracle").slots_for(request) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
def test_an_arena_gives_the_first_range_that_is_large_enough(moves):
    arena, slots, held = Arena(40), [False] * 40, []
    for takes, size in moves:
        if takes:
            free = [i for i in range(41 - size) if not any(slots[i : i + size])]
            start = arena.allocate(size)
            assert start == (free[0] if free else None)
            if start is not None:
                slots[start : start + size] = [True] * size
                held.append((start, size))
        elif held:
            start, length = held.pop(size % len(held))
            arena.free(start, length)
            slots[start : start + length] = [False] * length
        assert arena.num_free == slots.count(False)
        runs = "".join("x" if taken else "." for taken in slots).split("x")
        assert arena.largest_hole == max(map(len, runs))


def test_holes_that_are_large_enough_only_together_hold_nothing():
    requests = [
        SimRequest("a", 0.0, 5, 10), SimRequest("b", 0.0, 5, 40), SimRequest("c", 0.0, 5, 10),
        SimRequest("d", 0.1, 20, 4),
    ]  # fmt: skip
    waits = {}
    for fragments in (True, False):
        options = ContiguousOptions(14 + 44 + 14, "oracle", fragments=fragments)
        outcome = ContiguousSimulation(requests, options, TIME).run()
        waits[fragments] = outcome.queue_delays[3]
        assert (outcome.series.peak("stranded") == 28) == fragments
    assert waits[True] > 2 * waits[False]


def test_no_memory_holds_nothing():
    outcome = ContiguousSimulation([SimRequest("a", 0.0, 1, 2)], ContiguousOptions(0, "oracle"), TIME).run()
    assert (outcome.refused, len(outcome.series)) == (["a"], 0)


@pytest.mark.parametrize("field", ["fixed", "per_token", "per_kv_token"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None])
def test_time_is_a_number_that_passes(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        StepTime(**{"fixed": 1.0} | {field: value})


def test_every_step_takes_some_time():
    with pytest.raises(ValueError, match="more than 0 seconds"):
        StepTime(fixed=0.0)
