"""Stop strings, character by character, beside a look at the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from paged_jax.stop_strings import StopStrings

texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)


def begins_a_stop(text, stop):
    """The most characters at the end of text that begin a stop string."""
    return max(
        (n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stop)), default=0
    )


@given(texts, stops)
def test_every_end_and_every_beginning_is_known(text, stop):
    automaton, state = StopStrings(stop), 0
    for end, char in enumerate(text, 1):
        state = automaton.advance(state, char)
        assert automaton.found(state) == next((s for s in stop if text[:end].endswith(s)), None)
        assert automaton.length(state) == begins_a_stop(text[:end], stop)


def test_one_inside_another_is_found_amid_it():
    automaton, state, found = StopStrings(["abcd", "bc"]), 0, []
    for char in "abcd":
        state = automaton.advance(state, char)
        found.append(automaton.found(state))
    assert found == [None, None, "bc", "abcd"]


def test_of_those_that_end_together_the_first_given_counts():
    for stop in (["b", "ab"], ["ab", "b"]):
        automaton = StopStrings(stop)
        assert automaton.found(automaton.advance(automaton.advance(0, "a"), "b")) == stop[0]


def test_no_strings_are_never_found():
    automaton = StopStrings([])
    assert automaton.advance(0, "a") == 0
    assert automaton.found(0) is None
