"""Admission of what surely fits: nobody is ever set back, and what fits is not kept waiting."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.sim_request import SimRequest
from paged_jax.simulator import PagedOptions, Simulation
from paged_jax.step_time import StepTime


def run(requests, **options):
    options = {"preemption": "queue", "block_size": 4, "max_num_batched_tokens": 16} | options
    return Simulation(requests, PagedOptions(**options), StepTime(fixed=0.01)).run()


requests_of = st.lists(
    st.tuples(
        st.floats(0, 1, allow_nan=False),
        st.integers(1, 30),
        st.integers(1, 40),
        st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(given=requests_of, num_blocks=st.integers(12, 60), caching=st.booleans())
def test_nobody_is_set_back_and_everybody_who_fits_ends(given, num_blocks, caching):
    requests = [
        SimRequest(
            f"{index}",
            arrival,
            prompt,
            answer,
            tuple(range(prompt)) if caching else None,
            samples=1 if beams else width,
            beam_width=width if beams else 0,
        )
        for index, (arrival, prompt, answer, width, beams) in enumerate(given)
    ]
    outcome = run(requests, num_blocks=num_blocks, max_num_seqs=6, prefix_caching=caching)
    assert (outcome.preemptions, outcome.recomputed_tokens) == (0, 0)
    assert len(outcome.latencies) + len(outcome.refused) == len(requests)


def test_an_exact_fit_is_let_in_at_once_and_one_block_less_waits():
    """Two requests that store 8 + 12 - 1 tokens at their ends: 5 blocks of 4 each."""
    requests = [SimRequest(name, 0.0, 8, 12) for name in "ab"]
    for num_blocks, together in ((11, 2), (10, 1)):
        outcome = run(requests, num_blocks=num_blocks)
        assert outcome.series.peak("running") == together
        assert len(outcome.latencies) == 2


def test_what_can_never_fit_is_refused():
    outcome = run([SimRequest("a", 0.0, 8, 14), SimRequest("b", 0.0, 8, 12)], num_blocks=6)
    assert (outcome.refused, len(outcome.latencies)) == (["a"], 1)
