"""The figures of a simulated run, on steps made by hand, and the waste of last blocks, slot by slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.sim_series import SeriesBuilder
from paged_jax.sim_summary import Summary
from paged_jax.simulator import Outcome
from paged_jax.tail_waste import TailWaste

STEP = {"start": 0.0, "seconds": 1.0, "running": 1, "waiting": 0, "reserved": 10, "written": 5}


def outcome_of(*steps, **fields):
    builder = SeriesBuilder()
    for step in steps:
        builder.add(**STEP | step)
    return Outcome(builder.build(), **fields)


def summary_of(outcome, block_size=4, mean_length=50.0, **more):
    return Summary.of("run", block_size, outcome, mean_length=mean_length, **more)


# -- means and shares --------------------------------------------------------------------------------------


def test_means_are_weighted_by_the_time_of_a_step():
    found = summary_of(
        outcome_of({"running": 2, "seconds": 3.0}, {"running": 10, "seconds": 1.0, "start": 3.0})
    )
    assert (found.concurrency_mean, found.concurrency_peak) == (4.0, 10)


def test_the_slots_that_were_kept_from_others_are_shared_out_without_rest():
    """In each of two seconds 40 reserved: 20 hold a token, 12 will, 8 never; 10 free ones are stranded."""
    step = {"reserved": 40, "written": 20, "ahead": 12, "stranded": 10}
    found = summary_of(outcome_of(step, step | {"start": 1.0}))
    assert found.utilization == 0.4
    assert found.reservation_waste == pytest.approx(0.24)
    assert found.internal_waste == pytest.approx(0.16)
    assert found.external_waste == 0.2


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 5), *(st.integers(0, 100) for _ in range(4))
        ).map(
            lambda row: {
                "seconds": row[0],
                "written": row[1],
                "ahead": row[2],
                "stranded": row[3],
                "reserved": row[1] + row[2] + row[4],
            }
        ),
        min_size=1,
        max_size=8,
    )
)  # fmt: skip
def test_the_shares_are_a_whole(steps):
    found = summary_of(outcome_of(*steps))
    shares = [found.utilization, found.reservation_waste, found.internal_waste, found.external_waste]
    kept = sum((step["reserved"] + step["stranded"]) * step["seconds"] for step in steps)
    assert sum(shares) == pytest.approx(1 if kept else 0)
    assert all(share >= -1e-12 for share in shares)


def test_speed_counts_from_the_first_step_to_the_end_of_the_last():
    outcome = outcome_of({"start": 100.0}, {"start": 107.0, "seconds": 3.0}, generated_tokens=50)
    found = summary_of(outcome)
    assert (found.seconds, found.tokens_per_second) == (10.0, 5.0)


def test_waits_are_percentiles():
    outcome = outcome_of({}, queue_delays=[float(second) for second in range(101)])
    found = summary_of(outcome)
    assert (found.queue_delay_p50, found.queue_delay_p99) == (50.0, 99.0)


def test_events_are_taken_over_and_swapped_blocks_have_bytes_where_a_token_has():
    outcome = outcome_of(
        {},
        preemptions=3,
        recomputed_tokens=70,
        swapped_blocks=5,
        cow_copies=2,
        prefix_queried_tokens=80,
        prefix_hit_tokens=20,
        latencies=[1.0, 2.0],
        prompt_tokens=9,
        generated_tokens=8,
    )
    found = summary_of(outcome, bytes_per_token=100)
    assert (found.preemptions, found.recomputed_tokens, found.cow_copies) == (3, 70, 2)
    assert (found.swapped_blocks, found.swapped_bytes) == (5, 5 * 4 * 100)
    assert (found.prefix_hit_rate, found.requests) == (0.25, 2)
    assert (found.prompt_tokens, found.generated_tokens) == (9, 8)
    assert summary_of(outcome).swapped_bytes is None


def test_the_expected_utilization_is_of_a_paged_run_alone():
    assert summary_of(outcome_of({})).expected_utilization == 1 - 4 / 100
    assert summary_of(outcome_of({}), block_size=None).expected_utilization is None


def test_a_run_of_no_steps_has_figures_too():
    found = summary_of(outcome_of())
    assert (found.concurrency_mean, found.utilization, found.tokens_per_second) == (0.0, 0.0, 0.0)


# -- series ------------------------------------------------------------------------------------------------


def test_steps_that_are_added_at_once_stand_where_they_were_added():
    builder = SeriesBuilder()
    builder.add(**STEP)
    builder.add_many(start=np.array([1.0, 2.0]), seconds=np.array([0.5, 0.25]), running=np.array([7, 8]))
    builder.add(**STEP | {"start": 3.0, "running": 9, "ahead": 4, "stranded": 2})
    series = builder.build()
    assert series.start.tolist() == [0, 1, 2, 3]
    assert series.running.tolist() == [1, 7, 8, 9]
    assert series.reserved.tolist() == [10, 0, 0, 10]
    assert (series.ahead.tolist(), series.stranded.tolist()) == ([0, 0, 0, 4], [0, 0, 0, 2])
    assert series.total_seconds == 4.0
    assert len(builder.build()) == len(series) == 4


# -- last blocks -------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    size=st.sampled_from([1, 2, 8, 16, 100]),
)
def test_waste_of_last_blocks_is_what_counting_slots_gives(lengths, size):
    found = TailWaste.of(np.array(lengths), size)
    slots = []
    for length in lengths:
        held = 0
        while held < length:
            held += size
        slots.append(held)
    assert found.aggregate == pytest.approx(1 - sum(lengths) / sum(slots))
    assert found.per_request == pytest.approx(
        np.mean([(held - length) / held for held, length in zip(slots, lengths, strict=True)])
    )


def test_both_rules_for_a_mean_of_100_in_blocks_of_16():
    found = TailWaste.of(np.array([90, 110]), 16)
    assert (found.rule, found.closer_rule) == (16 / 200, 15 / 215)


def test_the_closer_rule_is_exact_where_lengths_are_spread_evenly_over_a_block():
    """Every remainder as often: half of a block less one slot stays empty on average."""
    for size in (2, 16, 64):
        found = TailWaste.of(np.arange(10 * size + 1, 14 * size + 1), size)
        assert found.aggregate == pytest.approx(found.closer_rule)
        assert found.aggregate < found.rule


def test_short_requests_raise_the_mean_of_requests_and_hardly_the_whole():
    found = TailWaste.of(np.array([1, 1, 1, 15997]), 16)
    assert found.per_request > 0.7
    assert found.aggregate < 0.004
