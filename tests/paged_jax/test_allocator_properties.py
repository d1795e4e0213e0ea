from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from .allocator_model import BYTES_PER_OPERATION, describe, run_program

OPERATIONS_PER_PROGRAM = 400
EVENTS = (
    "allocations refused",
    "appends refused",
    "copies",
    "evictions",
    "forgotten",
    "forks",
    "groups",
    "hits",
    "misuses",
    "registered",
    "registered second",
    "releases",
    "revived",
    "swaps in",
)


def play(num_programs):
    """Random programs against the model; hypothesis shrinks one that fails to few and small operations."""
    size = BYTES_PER_OPERATION * (1 + OPERATIONS_PER_PROGRAM)
    done = Counter()

    @settings(
        max_examples=num_programs,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=st.binary(min_size=size, max_size=size))
    def agrees_with_the_model(program):
        note(describe(program))
        done.update(run_program(program))

    agrees_with_the_model()
    return done


def test_a_hundred_thousand_random_operations_agree_with_the_model():
    done = play(num_programs=280)
    assert done["operations"] >= 100_000
    assert {event: done[event] for event in EVENTS if done[event] < 100} == {}


@pytest.mark.full
def test_a_million_random_operations_agree_with_the_model():
    assert play(num_programs=2800)["operations"] >= 1_000_000
