"""Beams as the scheduler sees them: nothing that happens to a group changes what it finds."""

from functools import cache

import pytest
from support.naive_beam_search import MadeUpModel

from .made_up_engine import (
    add_beams,
    add_samples,
    answers,
    make_engine,
    num_blocks_held,
    run,
    set_back_in_next_step,
    sharing,
    step,
)

VOCABULARY, EOS = 12, 3
MODEL = MadeUpModel(VOCABULARY, seed=8, spread=0.8)
BEAMS = {
    "a": ([1, 2, 4, 5, 6], {"beam_width": 4, "max_tokens": 11}),
    "b": ([1, 2, 4, 5], {"beam_width": 3, "max_tokens": 9, "early_stopping": True}),
    "c": ([7] * 9, {"beam_width": 6, "max_tokens": 7, "length_penalty": 0.0, "n": 2}),
    "d": ([9, 8], {"beam_width": 1, "max_tokens": 12, "min_tokens": 4}),
    "e": ([5, 5, 5, 5, 5, 5], {"beam_width": 2, "max_tokens": 13, "no_repeat_ngram_size": 2}),
}
SAMPLES = {
    "s": ([1, 2, 4, 5, 6, 7], {"n": 3, "max_tokens": 9}),
    "t": ([2] * 8, {"n": 1, "max_tokens": 12}),
    "u": ([3, 1], {"temperature": 0, "max_tokens": 14}),
}
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def engine_with(names, *, priorities=None, **options):
    engine = make_engine(MODEL, **{"block_size": 4, "eos_ids": [EOS]} | options)
    for name in names:
        adds, (prompt, fields) = (add_beams, BEAMS[name]) if name in BEAMS else (add_samples, SAMPLES[name])
        adds(engine, name, prompt, priority=(priorities or {}).get(name, 0), **fields)
    return engine


def request_of(engine, name):
    return engine.scheduler.queues.by_id[name]


def found_by(engine):
    return {name: answers(output) for name, output in run(engine).items()}


@cache
def found_alone(name):
    return found_by(engine_with([name]))[name]


def alone(names):
    return {name: found_alone(name) for name in names}


# -- company -----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("num_blocks", [400, 17])
@pytest.mark.parametrize("order", ["abcdestu", "utsedcba", "scaubtde"])
@pytest.mark.parametrize("priorities", [{}, {"a": 1, "s": 2, "d": -1}])
def test_in_company_they_find_what_they_find_alone(mode, num_blocks, order, priorities):
    engine = engine_with(order, priorities=priorities, num_blocks=num_blocks, budget=16, mode=mode)
    assert found_by(engine) == alone(order)
    assert bool(engine.totals.preempted) == (num_blocks < 400)
    assert bool(engine.totals.resumed) == (num_blocks < 400 and mode == "swap")


@pytest.mark.parametrize("seqs", [6, 7, 9])
def test_few_rows_make_them_wait_and_change_nothing(seqs):
    assert found_by(engine_with("abcdestu", seqs=seqs)) == alone("abcdestu")


def test_the_beams_stand_in_order_best_first():
    engine = engine_with("a")
    request = request_of(engine, "a")
    while not request.is_finished:
        step(engine)
        sums = [beam.sum_logprob for beam in request.sequences]
        assert sums == sorted(sums, reverse=True)
        assert [beam.index for beam in request.sequences] == list(range(len(sums)))


# -- set back ----------------------------------------------------------------------------------------------


def note(engine, request, seen):
    """A step, and who of a group shares what after it, by the number of tokens."""
    step(engine)
    if request in engine.scheduler.queues.decoding:
        seen[request.sequences[0].num_output_tokens] = sharing(request)


@MODES
@pytest.mark.parametrize("company", ["", "u", "eu"])
@pytest.mark.parametrize("name", ["a", "c"])
def test_a_group_set_back_at_any_step_finds_the_same_and_shares_the_same(name, company, mode):
    engine = engine_with([*company, name], budget=6)
    request, undisturbed = request_of(engine, name), {}
    while not request.is_finished:
        note(engine, request, undisturbed)
    for num_tokens in undisturbed:
        engine = engine_with([*company, name], budget=6, mode=mode)
        again, seen = request_of(engine, name), {}
        while not (again in engine.scheduler.running and again.sequences[0].num_output_tokens == num_tokens):
            note(engine, again, seen)
        held = num_blocks_held(again)
        set_back_in_next_step(engine, again)
        step(engine)
        assert num_blocks_held(again) == 0
        swapped = [] if again.swapped is None else again.swapped.host_blocks
        assert len(swapped) == (held if mode == "swap" else 0)  # each shared block once
        while not again.is_finished:
            note(engine, again, seen)
        assert again.metrics.num_preemptions == 1
        assert again.beams.hypotheses == request.beams.hypotheses
        assert seen == undisturbed
        run(engine)
