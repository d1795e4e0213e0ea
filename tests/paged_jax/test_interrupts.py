"""Ctrl-C at a line of a step: nobody loses a token or an output, and nothing is kept of who has ended."""

import pytest

from paged_jax import (
    SamplingParams,
    answer_texts,
    engine,
    forks,
    outputs,
    queues,
    scheduler,
    sequence,
    step_update,
    text_stream,
)
from paged_jax.block_table import BlockTable
from paged_jax.sequence import TokenLogprobs

from .interrupts import InterruptAtLine
from .made_up_engine import add_samples, answers, make_engine, step
from .scheduling import check, check_all_free
from .test_beam_groups import MODEL, MODES

FILES = {
    module.__file__
    for module in (
        answer_texts,
        engine,
        forks,
        outputs,
        queues,
        scheduler,
        sequence,
        step_update,
        text_stream,
    )
}


def with_requests(**options):
    """Answers that end at their length, at a token and at a string; two samples; a stream."""
    made = make_engine(MODEL, num_blocks=14, budget=16, **options)
    common = {"temperature": 0, "ignore_eos": True}
    add_samples(made, "length", [1, 2, 3], max_tokens=5, **common)
    add_samples(made, "token", [2, 2], max_tokens=9, stop_token_ids=range(0, MODEL.vocab_size, 2), **common)
    add_samples(made, "string", [3, 1, 4, 1, 5], max_tokens=9, stop=[*"bdfhj"], **common)
    add_samples(made, "two", [4, 4, 1], max_tokens=4, n=2, temperature=1.0, seed=3, ignore_eos=True)
    add_samples(made, "stream", [5], max_tokens=7, streams=True, **common)
    return made


def run(made, interrupt=None):
    """The answers of each request, as its last output tells them."""
    found, steps = {}, 0
    while made.has_unfinished:
        try:
            for output in step(made):
                found[output.request_id] = answers(output)
        except KeyboardInterrupt:
            made.runner.device.fail()
            check(made.scheduler)
        steps += 1
        assert steps < 300
    check_all_free(made.scheduler)
    assert not made._texts
    assert made.num_unfinished == 0
    return found


@MODES
@pytest.mark.parametrize("offset", range(3))
def test_an_interrupt_at_any_line_costs_nobody_anything(mode, offset):
    expected = run(with_requests(mode=mode))
    assert set(expected) == {"length", "token", "string", "two", "stream"}
    assert {reason for answer in expected.values() for *_, reason, _, _ in answer} == {"length", "stop"}
    number, interrupted = 1 + offset, True
    while interrupted:
        made = with_requests(mode=mode)
        line = InterruptAtLine(made, number, FILES)
        assert run(made) == expected, number
        number, interrupted = number + 7, line.left <= 0
    assert number > 1000


def test_who_ended_before_a_step_failed_after_that_is_put_out_once_by_the_next():
    made = with_requests()
    expected = run(with_requests())
    record, found, failures = made.totals.add, [], 0

    def fail(stats):
        nonlocal failures
        failures += 1
        if failures % 2:
            raise RuntimeError("late")
        record(stats)

    made.totals.add = fail
    while made.has_unfinished:
        try:
            found += [(output.request_id, answers(output)) for output in step(made) if output.finished]
        except RuntimeError:
            made.runner.device.fail()
    assert sorted(name for name, _ in found) == sorted(expected)
    assert dict(found) == expected
    assert not made._texts


def test_a_sequence_that_an_interrupt_left_between_its_token_and_its_end_ends():
    made = make_engine(MODEL)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)
    request = made.make_request("a", {"prompt_token_ids": [1, 2]}, params)
    torn = sequence.Sequence(request, 0, BlockTable(made.allocator, "a"))
    torn.token_ids += [5, 6]
    torn.logprobs += [TokenLogprobs(token, -1.0, 1, []) for token in (5, 6, 7)]
    torn.mend(0.0)
    assert (len(torn.logprobs), torn.finish_reason) == (2, None)
    torn.token_ids.append(7)
    torn.mend(0.0)
    assert torn.finish_reason == "length"
