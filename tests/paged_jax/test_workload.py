"""Which requests of a trace a comparison runs, who shares, and what their prompts are made of."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.errors import InvalidArgument
from paged_jax.request_trace import Trace
from paged_jax.workload import Sharing, make_workload, replayed


def trace_of(*rows, hash_ids=None, hash_block_size=None):
    """Rows of (arrival, prompt, answer)."""
    arrival, prompt, output = zip(*rows, strict=True)
    return Trace(
        source="test",
        arrival_s=np.array(arrival, float),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        places=tuple(f"line {2 + index}" for index in range(len(rows))),
        hash_ids=hash_ids,
        hash_block_size=hash_block_size,
    )


def names(work):
    return [request.name for request in work.requests]


# -- who is accepted ---------------------------------------------------------------------------------------


def test_what_one_strategy_can_not_run_no_strategy_runs_and_the_reason_is_told():
    """Of 100 slots: too large for blocks of 16, longer than the reservation, too wide as a power of two."""
    trace = trace_of((0, 10, 5), (0, 90, 9), (0, 30, 21), (0, 2, 40))
    work = make_workload(trace, slots=100, block_sizes=[1, 16], reservations=["max", "pow2"], reservation=50)
    assert names(work) == ["line 2", "line 5"]
    assert work.dropped == [
        (1, "they need more than the memory's 100 tokens"),
        (1, "they are longer than the reservation of 50 tokens"),
    ]
    wide = make_workload(trace_of((0, 10, 5), (0, 70, 21)), slots=100, block_sizes=[1], reservations=["pow2"])
    assert names(wide) == ["line 2"]
    assert wide.dropped == [(1, "what a strategy reserves for them is more than the memory's 100 tokens")]


def test_without_contiguous_strategies_nothing_is_dropped_for_them():
    trace = trace_of((0, 70, 21), (0, 10, 5))
    work = make_workload(trace, slots=100, block_sizes=[1], reservation=20)
    assert (names(work), work.dropped) == (["line 2", "line 3"], [])


def test_a_request_of_exactly_the_memory_is_accepted_and_one_token_more_is_not():
    for size in (1, 5, 10):
        for answer, accepted in ((41, 1), (42, 0)):  # the last token is never written
            trace = trace_of((0, 60, answer), (0, 1, 1))
            work = make_workload(trace, slots=100, block_sizes=[size])
            assert len(work.requests) == 1 + accepted


def test_the_default_reservation_admits_99_of_100():
    trace = trace_of(*((0, 1, 1 + number) for number in range(200)))
    work = make_workload(trace, slots=1000, block_sizes=[1], reservations=["max"])
    assert work.reservation == 199
    assert work.dropped == [(2, "they are longer than the reservation of 199 tokens")]


def test_when_nothing_is_left_the_reasons_are_told():
    with pytest.raises(InvalidArgument, match=r"test: no request is left to simulate \(2: they are longer"):
        make_workload(
            trace_of((0, 30, 3), (0, 40, 5)), slots=100, block_sizes=[1], reservations=["max"], reservation=9
        )


def test_the_samples_of_a_request_must_fit_together():
    """A prompt of 32 tokens in shared blocks of 16, and for each of 4 samples two blocks of its own."""
    trace = trace_of((0, 33, 17), (0, 1, 1))
    for blocks, count in ((10, 2), (9, 1)):
        work = make_workload(trace, slots=16 * blocks, block_sizes=[16], sharing=Sharing(samples=4))
        assert len(work.requests) == count, blocks


def test_lengths_at_the_end_are_what_is_stored():
    work = make_workload(trace_of((0, 10, 5), (0, 1, 1)), slots=100, block_sizes=[1])
    assert work.final_tokens.tolist() == [14, 1]


# -- who shares --------------------------------------------------------------------------------------------


@given(share=st.floats(0.01, 1), count=st.integers(1, 60))
def test_a_share_of_the_requests_shares_evenly_spread(share, count):
    trace = trace_of(*((0, 5, 5),) * count)
    for sharing in (Sharing(samples=3, share=share), Sharing(beam_width=2, share=share)):
        work = make_workload(trace, slots=1000, block_sizes=[1], sharing=sharing)
        wide = [request.samples > 1 or request.beam_width > 0 for request in work.requests]
        for end in range(1, count + 1):
            assert sum(wide[:end]) == int(end * share)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"samples": 0}, "samples=0: expected 1 or more"),
        ({"beam_width": -1}, "beam_width=-1"),
        ({"samples": 2, "beam_width": 2}, "give one"),
        ({"share": 0.0}, "share=0.0: expected a number over 0, 1 at most"),
        ({"share": 1.5}, "share=1.5"),
        ({"share": math.nan}, "share=nan"),
    ],
)
def test_what_no_request_can_be_is_refused(fields, told):
    with pytest.raises(InvalidArgument, match=told):
        Sharing(**fields)


# -- replayed ----------------------------------------------------------------------------------------------


def test_a_trace_is_replayed_faster_at_once_or_only_its_beginning():
    trace = trace_of((0, 1, 2), (4, 3, 4), (8, 5, 6), hash_ids=((1,), (2,), (3,)), hash_block_size=16)
    assert replayed(trace, speed=4).arrival_s.tolist() == [0, 1, 2]
    assert replayed(trace, speed=math.inf).arrival_s.tolist() == [0, 0, 0]
    first = replayed(trace, first=2)
    assert (len(first), first.prompt_tokens.tolist(), first.hash_ids) == (2, [1, 3], ((1,), (2,)))
    assert replayed(trace, first=99).output_tokens.tolist() == [2, 4, 6]


@pytest.mark.parametrize("speed", [0, -1, math.nan])
def test_a_speed_is_above_zero(speed):
    with pytest.raises(InvalidArgument, match=r"speed=.*: expected a number, 1e-09 or more, or inf"):
        replayed(trace_of((0, 1, 1)), speed=speed)


@pytest.mark.parametrize("first", [0, -3])
def test_first_is_one_or_more(first):
    with pytest.raises(InvalidArgument, match=r"first=.*: expected 1 or more"):
        replayed(trace_of((0, 1, 1)), first=first)


# -- prompts -----------------------------------------------------------------------------------------------


def common(one, other):
    """Tokens that two prompts begin with alike."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.token_ids, other.token_ids)))
    )


@settings(deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=5),
    size=st.sampled_from([4, 16]),
    short=st.integers(0, 3),
)
def test_prompts_begin_alike_as_far_as_their_hash_ids_do(prompts, size, short):
    """The last block of a prompt may be cut. Ids may be hashes of any size."""
    prompts = [[[0, 1, 2**64 - 1, -(10**30)][number] for number in ids] for ids in prompts]
    lengths = [len(ids) * size - short for ids in prompts]
    trace = trace_of(
        *((0, length, 1) for length in lengths), hash_ids=tuple(map(tuple, prompts)), hash_block_size=size
    )
    work = make_workload(trace, slots=1000, block_sizes=[1], with_token_ids=True)
    assert [len(request.token_ids) for request in work.requests] == lengths
    for one, ids in zip(work.requests, prompts, strict=True):
        for other, others in zip(work.requests, prompts, strict=True):
            alike = next(
                (at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
                min(len(ids), len(others)),
            )
            assert common(one, other) == min(alike * size, len(one.token_ids), len(other.token_ids))


def test_without_hash_ids_no_two_prompts_begin_alike():
    work = make_workload(trace_of((0, 9, 1), (0, 7, 1)), slots=100, block_sizes=[1], with_token_ids=True)
    assert common(*work.requests) == 0
    assert make_workload(trace_of((0, 9, 1)), slots=100, block_sizes=[1]).requests[0].token_ids is None


def test_ids_made_of_hashes_of_any_size_are_keys_of_the_prefix_cache():
    trace = trace_of((0, 8, 1), hash_ids=((2**80, 7),), hash_block_size=4)
    (request,) = make_workload(trace, slots=100, block_sizes=[1], with_token_ids=True).requests
    assert request.token_ids == tuple(range(8))
