"""Searches that are taken back, or amid which something fails: the others, and what is computed again."""

import numpy as np
import pytest

from paged_jax import beam_search, forks, step_update
from paged_jax.errors import ConstraintFailed

from .interrupts import InterruptAtLine
from .made_up_engine import add_beams, answers, make_engine, run, step
from .scheduling import check, check_all_free
from .test_beam_groups import BEAMS, MODEL, MODES, VOCABULARY, alone, engine_with, found_by

FILES = {module.__file__ for module in (beam_search, forks, step_update)}


def num_steps(engine):
    run(engine)
    return len(engine.runner.schedules)


@pytest.mark.parametrize("amid", [False, True])
@MODES
def test_an_abort_at_any_step_frees_everything_and_leaves_the_others_alone(mode, amid):
    for at in range(num_steps(engine_with("acu"))):
        engine = engine_with("acu", mode=mode, num_blocks=20)
        found = {}
        for _ in range(at):
            found |= {output.request_id: answers(output) for output in step(engine)}
        if amid:
            engine.runner.amid = lambda engine=engine: engine.abort("a")
            found |= {output.request_id: answers(output) for output in step(engine)}
        engine.abort("a")
        check(engine.scheduler)
        assert "a" not in engine.scheduler
        found |= found_by(engine)
        assert {"c", "u"} <= set(found)
        assert found == alone(found)


def found_before(error, engine):
    """Run up to an error of that kind."""
    found = {}
    try:
        while True:
            found |= {output.request_id: answers(output) for output in step(engine)}
            assert engine.has_unfinished
    except error:
        return found


@pytest.mark.parametrize("when", ["before", "after"])
@MODES
def test_a_step_that_fails_changes_nothing_that_is_found(mode, when):
    options = {"num_blocks": 20, "budget": 16, "mode": mode}
    for at in range(1, 1 + num_steps(engine_with("abcu", **options))):
        engine = engine_with("abcu", **options)
        engine.runner.fail = {at: (RuntimeError("device"), when)}
        found = found_before(RuntimeError, engine)
        check(engine.scheduler)
        assert found | found_by(engine) == alone("abcu")


def with_function(fails_at=0, error=None, *, does=None):
    """Two searches whose function allows all tokens, but its call of that number raises; and others.

    does: instead of raising, this is done with the engine.
    """
    calls = 0

    def allowed(index, ids):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            if does is None:
                raise error
            does(engine)
        return range(VOCABULARY)

    engine = engine_with("au")
    for name in "bc":
        prompt, fields = BEAMS[name]
        add_beams(engine, f"{name}'", prompt, prefix_allowed_tokens_fn=allowed, **fields)
    return engine, lambda: calls


def test_an_interrupt_in_a_users_function_changes_nothing_that_is_found():
    engine, calls = with_function()
    undisturbed = found_by(engine)
    for at in range(1, 1 + calls()):
        engine, _ = with_function(at, KeyboardInterrupt())
        found = found_before(KeyboardInterrupt, engine)
        engine.runner.device.fail()
        assert found | found_by(engine) == undisturbed


def test_a_users_function_that_fails_ends_its_own_request_alone():
    engine, calls = with_function()
    undisturbed = found_by(engine)
    for at in range(1, 1 + calls()):
        engine, _ = with_function(at, LookupError("no such state"))
        outputs = run(engine)
        (failed,) = [name for name, output in outputs.items() if output.error is not None]
        assert failed in ("b'", "c'")
        assert isinstance(outputs[failed].error, ConstraintFailed)
        assert "LookupError: no such state" in str(outputs[failed].error)
        assert (outputs[failed].outputs, outputs[failed].finished) == ([], True)
        del outputs[failed]
        for name, output in outputs.items():
            assert answers(output) == undisturbed[name]


def test_a_function_that_allows_everything_changes_nothing_that_is_found():
    engine, _ = with_function()
    found = {name[0]: answer for name, answer in found_by(engine).items()}
    for name, answer in alone("abcu").items():
        *rest, scores = zip(*answer, strict=True)
        *expected, exact = zip(*found[name], strict=True)
        assert rest == expected
        if name != "u":
            # The search's own logarithms and the device's need not agree to the last bit.
            np.testing.assert_allclose(scores, exact, rtol=1e-12)


def test_a_step_amid_a_step_is_refused_and_ends_the_request_that_asked_for_it():
    engine, _ = with_function(7, does=lambda engine: engine.step())
    outputs = run(engine)
    (failed,) = [name for name, output in outputs.items() if output.error is not None]
    assert isinstance(outputs[failed].error, ConstraintFailed)
    assert "EngineBusy: A step amid a step" in str(outputs[failed].error)
    whole, _ = with_function()
    undisturbed = found_by(whole)
    assert {n: answers(o) for n, o in outputs.items() if n != failed} == {
        name: answer for name, answer in undisturbed.items() if name != failed
    }
    assert not engine.has_unfinished


@pytest.mark.parametrize("names", [["b'"], ["c'"], ["a"], ["u"], ["a", "b'", "c'", "u"], ["nobody"]])
def test_an_abort_amid_a_users_function_is_done_when_the_step_is(names):
    def abort(engine):
        for name in names:
            engine.abort(name)
            engine.abort(name)

    engine, _ = with_function(7, does=abort)
    outputs = run(engine)
    assert set(outputs) == {"a", "b'", "c'", "u"} - set(names)
    whole, _ = with_function()
    undisturbed = found_by(whole)
    assert {n: answers(o) for n, o in outputs.items()} == {n: undisturbed[n] for n in outputs}
    assert sorted(engine.scheduler.queues.free_rows) == list(range(40))


@pytest.mark.parametrize("given", [[VOCABULARY], [-1], [1.0], ["a"], [True], None, 5])
def test_what_are_no_token_ids_is_an_error_of_the_request(given):
    engine = make_engine(MODEL)
    add_beams(engine, "b", [1], beam_width=2, max_tokens=4, prefix_allowed_tokens_fn=lambda _, ids: given)
    output = run(engine)["b"]
    assert isinstance(output.error, ConstraintFailed)
    assert output.outputs == []


def test_an_interrupt_at_any_line_changes_nothing_that_is_found():
    number, interrupted = 1, True
    while interrupted:
        engine = engine_with("bsu")
        line, found = InterruptAtLine(engine, number, FILES), {}
        while engine.has_unfinished:
            try:
                found |= {output.request_id: answers(output) for output in step(engine)}
            except KeyboardInterrupt:
                engine.runner.device.fail()
                check(engine.scheduler)
        check_all_free(engine.scheduler)
        assert found == alone("bsu")
        number, interrupted = number + 11, line.left <= 0
    assert number > 2000


def test_what_a_search_has_found_when_it_is_taken_back_can_be_had():
    engine = engine_with("a")
    request = engine.scheduler.queues.by_id["a"]
    assert engine.output_of(request).outputs == []
    for _ in range(5):
        step(engine)
    beams = {tuple(sequence.output_token_ids) for sequence in request.sequences}
    finished = {tuple(found.token_ids) for found in request.beams.hypotheses}
    engine.abort("a")
    outputs = engine.output_of(request).outputs
    assert {tuple(one.token_ids) for one in outputs} <= beams | finished
    assert len(outputs) == 4
    for one in outputs:
        assert one.finish_reason == ("abort" if tuple(one.token_ids) in beams else "stop")
    assert [one.score for one in outputs] == sorted((one.score for one in outputs), reverse=True)
