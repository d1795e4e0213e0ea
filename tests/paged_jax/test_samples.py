"""Several samples of a prompt: one prefill, blocks shared until they are written into, ends of their own."""

import pytest
from support.naive_beam_search import MadeUpModel

from paged_jax.errors import InvalidSamplingParams, PoolTooSmall

from .made_up_engine import (
    add_beams,
    add_samples,
    answers,
    make_engine,
    num_blocks_held,
    num_copies,
    run,
    set_back_in_next_step,
    sharing,
    step,
)
from .scheduling import check, token_of

MODEL = MadeUpModel(2000)
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def tokens_of(name, index, prompt, count):
    """What a sample of so many prompt tokens answers."""
    return [token_of(name, index, position) for position in range(prompt, prompt + count)]


def used(engine):
    return engine.allocator.num_blocks - 1 - engine.allocator.num_free_blocks


# -- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_a_prompt_is_computed_once_and_forking_takes_no_block(budget):
    engine = make_engine(MODEL, block_size=4, budget=budget)
    request = add_samples(engine, "s", range(10), n=5, max_tokens=3)
    while not request.sequences[0].num_output_tokens:
        step(engine)
    assert sum(chunk.num_tokens for s in engine.runner.schedules for chunk in s.prefill) == 9
    assert [len(schedule.decode) for schedule in engine.runner.schedules if schedule.decode] == [5]
    assert used(engine) == 3
    assert {tuple(sequence.table.blocks) for sequence in request.sequences} == {(1, 2, 3)}
    assert [engine.allocator.ref_cnt(block) for block in (1, 2, 3)] == [5, 5, 5]
    run(engine)
    assert sum(chunk.num_tokens for s in engine.runner.schedules for chunk in s.prefill) == 9


@pytest.mark.parametrize("num_samples", [2, 5])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_blocks_and_copies_are_exactly_those_of_the_ledger(num_samples, prompt, block_size):
    """Of L tokens: floor(L / B) blocks for all together, and for each ceil((L + a) / B) - floor(L / B)."""
    engine = make_engine(MODEL, block_size=block_size)
    request = add_samples(engine, "s", range(prompt), n=num_samples, max_tokens=30)
    step(engine)
    assert used(engine) == -(-prompt // block_size)
    full = prompt // block_size
    for appended in range(1, 25):
        step(engine)
        own = -(-(prompt + appended) // block_size) - full
        assert used(engine) == num_blocks_held(request) == full + num_samples * own
        wanted = num_samples - 1 if appended == 1 and prompt % block_size else 0
        assert num_copies(engine.runner.schedules[-1]) == wanted  # the last holder copies nothing
    run(engine)
    assert request.metrics.num_cow_copies == (num_samples - 1 if prompt % block_size else 0)


def test_answers_of_one_token_take_no_more_than_the_prompt():
    engine = make_engine(MODEL, block_size=4, num_blocks=3)
    add_samples(engine, "s", range(7), n=6, max_tokens=1)
    outputs = run(engine)["s"].outputs
    assert [one.token_ids for one in outputs] == [tokens_of("s", index, 7, 1) for index in range(6)]


# -- outputs -----------------------------------------------------------------------------------------------


def test_each_sample_keeps_its_index_and_its_tokens():
    engine = make_engine(MODEL)
    add_samples(engine, "s", range(5), n=4, max_tokens=6)
    output = run(engine)["s"]
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert [one.token_ids for one in output.outputs] == [tokens_of("s", i, 5, 6) for i in range(4)]
    assert {one.finish_reason for one in output.outputs} == {"length"}
    assert output.metrics.num_output_tokens == 24
    assert output.metrics.num_token_steps == 6


def ending(num_tokens, *, name="s", prompt=5):
    """Stop tokens by which sample i ends with its token number num_tokens[i]."""
    return [token_of(name, index, prompt + count - 1) for index, count in num_tokens.items()]


def test_a_stream_carries_all_samples_in_every_step():
    engine = make_engine(MODEL)
    ends = ending({0: 2, 2: 4})
    add_samples(engine, "s", range(5), n=3, max_tokens=6, stop_token_ids=ends, streams=True)
    for count in range(1, 7):
        (output,) = step(engine)
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert [len(one.token_ids) for one in output.outputs] == [min(2, count), count, min(4, count)]
        assert output.finished == (count == 6)
        reasons = [one.finish_reason for one in output.outputs]
        assert reasons == [
            "stop" if count >= 2 else None,
            "length" if count == 6 else None,
            "stop" if count >= 4 else None,
        ]
    assert [one.stop_reason for one in output.outputs] == [ends[0], None, ends[1]]


def test_without_streaming_the_request_comes_out_once_when_its_last_sample_ends():
    engine = make_engine(MODEL)
    add_samples(engine, "s", range(5), n=3, max_tokens=6, stop_token_ids=ending({0: 1, 1: 5, 2: 3}))
    assert [len(step(engine)) for _ in range(5)] == [0, 0, 0, 0, 1]
    assert not engine.has_unfinished


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_sample_that_ends_gives_its_row_and_its_own_blocks_back(first):
    engine = make_engine(MODEL, block_size=4)
    request = add_samples(engine, "s", range(5), n=3, max_tokens=20, stop_token_ids=ending({first: 6}))
    for _ in range(5):
        step(engine)
    assert (used(engine), len(engine.scheduler.queues.free_rows)) == (1 + 3 * 2, 37)
    step(engine)
    assert (used(engine), len(engine.scheduler.queues.free_rows)) == (1 + 2 * 2, 38)
    assert request.sequences[first].table.blocks == []
    assert request.sequences[first].row is None
    counts = [len(schedule.decode) for schedule in engine.runner.schedules]
    outputs = run(engine)["s"].outputs
    assert counts == [3] * 6
    assert [len(one.token_ids) for one in outputs] == [6 if one.index == first else 20 for one in outputs]


# -- rows --------------------------------------------------------------------------------------------------


def test_rows_are_kept_for_samples_that_are_still_one():
    """Its long prompt takes many steps; whoever comes meanwhile leaves as many rows as it will fork into."""
    engine = make_engine(MODEL, seqs=5, budget=32, block_size=4)
    add_samples(engine, "s", range(300), n=4, max_tokens=8)
    step(engine)
    for name in "abc":
        add_samples(engine, name, range(3), max_tokens=4)
    outputs, running = {}, set()
    while engine.has_unfinished:
        outputs |= {output.request_id: answers(output) for output in step(engine)}
        running.add(tuple(request.request_id for request in engine.scheduler.running))
    assert {("s", "a"), ("s", "b")} <= running <= {("s",), ("s", "a"), ("s", "b"), ("s", "c"), ("c",), ()}
    assert [one[1] for one in outputs["s"]] == [tokens_of("s", index, 300, 8) for index in range(4)]
    assert [one[1] for one in outputs["c"]] == [tokens_of("c", 0, 3, 4)]


@pytest.mark.parametrize("num_blocks", [40, 100])
@MODES
def test_a_fork_always_finds_a_row(mode, num_blocks):
    engine = make_engine(MODEL, seqs=6, budget=8, block_size=2, num_blocks=num_blocks, mode=mode)
    widths = [1, 4, 2, 6, 3, 1, 5, 2, 6, 1]
    ends = [token for i, n in enumerate(widths) for token in ending({n // 2: 3}, name=str(i), prompt=3 + i)]
    for place, width in enumerate(widths):
        params = {"n": width, "max_tokens": 7, "stop_token_ids": ends, "priority": place % 3}
        add_samples(engine, str(place), range(3 + place), **params)
        add_beams(engine, f"b{place}", [place], beam_width=1 + width % 4, max_tokens=5)
    outputs = run(engine)
    for place, width in enumerate(widths):
        for one in outputs[str(place)].outputs:
            expected = tokens_of(str(place), one.index, 3 + place, 7)
            assert one.token_ids == (expected[:3] if one.index == width // 2 else expected)


# -- refused -----------------------------------------------------------------------------------------------


def test_more_samples_than_rows_are_refused():
    engine = make_engine(MODEL, seqs=3)
    with pytest.raises(InvalidSamplingParams, match=r"n=4: expected max_num_seqs=3 at most"):
        add_samples(engine, "s", [1], n=4, max_tokens=2)
    assert not engine.has_unfinished
    engine.allocator.check([])


@pytest.mark.parametrize(("prompt", "num_samples", "needed"), [(8, 4, 6), (11, 4, 6), (3, 7, 7)])
def test_samples_that_can_never_fit_are_refused_and_those_that_just_fit_are_not(prompt, num_samples, needed):
    engine = make_engine(MODEL, block_size=4, num_blocks=needed)
    with pytest.raises(
        PoolTooSmall, match=rf"{num_samples} sequences after its {prompt} tokens need {needed}"
    ):
        add_samples(engine, "s", range(prompt), n=num_samples, max_tokens=2)
    assert not engine.has_unfinished
    engine.allocator.check([])
    engine = make_engine(MODEL, block_size=4, num_blocks=needed + 1)
    add_samples(engine, "s", range(prompt), n=num_samples, max_tokens=2)
    assert [len(one.token_ids) for one in run(engine)["s"].outputs] == [2] * num_samples


# -- set back, failed, taken back --------------------------------------------------------------------------

PROMPTS = pytest.mark.parametrize("prompt", [12, 13, 16])


def engine_and_request(prompt, **options):
    engine = make_engine(MODEL, **{"block_size": 4, "budget": 5} | options)
    fields = {"n": 3, "max_tokens": 9, "stop_token_ids": ending({1: 4}, prompt=prompt)}
    return engine, add_samples(engine, "s", range(prompt), **fields)


def undisturbed(prompt):
    """The answers, and the number of steps."""
    engine, _ = engine_and_request(prompt)
    return answers(run(engine)["s"]), len(engine.runner.schedules)


@PROMPTS
@MODES
def test_samples_set_back_at_any_step_before_or_after_they_fork_go_on_as_they_would_have(mode, prompt):
    engine, request = engine_and_request(prompt)
    shared = {}
    while not request.is_finished:
        step(engine)
        shared[max(s.num_output_tokens for s in request.sequences)] = sharing(request)
    expected, steps = undisturbed(prompt)
    for at in range(1, steps):
        engine, request = engine_and_request(prompt, mode=mode)
        for _ in range(at):
            step(engine)
        held, forked = num_blocks_held(request), len(request.sequences)
        set_back_in_next_step(engine, request)
        step(engine)
        assert (request.swapped is not None) == (mode == "swap")
        assert mode == "recompute" or len(request.swapped.host_blocks) == held
        assert len(request.sequences) == forked
        while not request.is_finished:
            outputs = step(engine)
            if request in engine.scheduler.queues.decoding:
                assert sharing(request) == shared[max(s.num_output_tokens for s in request.sequences)]
        assert answers(outputs[0]) == expected
        assert request.metrics.num_preemptions == 1


def fail_next_step(engine, when):
    engine.runner.fail = {len(engine.runner.schedules) + 1: (RuntimeError("device"), when)}
    with pytest.raises(RuntimeError, match="device"):
        engine.step()
    check(engine.scheduler)


@PROMPTS
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_step_costs_no_sample_a_token(when, prompt):
    expected, steps = undisturbed(prompt)
    for at in range(steps):
        engine, _ = engine_and_request(prompt)
        for _ in range(at):
            step(engine)
        fail_next_step(engine, when)
        assert answers(run(engine)["s"]) == expected


@PROMPTS
@MODES
def test_a_step_that_fails_right_after_a_set_back_costs_no_sample_a_token(mode, prompt):
    """It may have brought them back and forked them, at once."""
    expected, steps = undisturbed(prompt)
    for at in range(1, steps):
        engine, request = engine_and_request(prompt, mode=mode)
        for _ in range(at):
            step(engine)
        set_back_in_next_step(engine, request)
        step(engine)
        fail_next_step(engine, "after")
        assert answers(run(engine)["s"]) == expected


def test_an_abort_at_any_step_gives_everything_back():
    for at in range(undisturbed(13)[1]):
        engine, request = engine_and_request(13)
        for _ in range(at):
            step(engine)
        engine.abort("s")
        assert run(engine) == {}
        for one in engine.output_of(request).outputs:
            assert one.finish_reason in ("abort", "stop")
            assert one.token_ids == tokens_of("s", one.index, 13, 9)[: len(one.token_ids)]


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_step_that_fails_as_it_forks_loses_nothing(block_size):
    """The prompt fills its blocks, the slot of its last token among them."""
    answered = []
    for fails in (False, True):
        engine = make_engine(MadeUpModel(9, seed=5), block_size=block_size, num_blocks=40, budget=10)
        add_samples(engine, "s", [0] * 8, n=2, max_tokens=3, temperature=1.0)
        if fails:
            engine.runner.fail = {1: (RuntimeError("device"), "before")}
            with pytest.raises(RuntimeError, match="device"):
                engine.step()
        answered.append(answers(run(engine)["s"]))
    assert answered[0] == answered[1]
    assert [len(one[1]) for one in answered[1]] == [3, 3]


def test_a_step_that_fails_as_it_forks_what_came_back_from_the_swap_space_loses_nothing():
    engine = make_engine(MadeUpModel(9, seed=5), block_size=4, mode="swap", num_blocks=40, budget=5)
    request = add_samples(engine, "s", [0] * 9, n=2, max_tokens=3, temperature=1.0)
    engine.step()  # 5 of 8 prompt tokens
    set_back_in_next_step(engine, request)
    engine.step()
    engine.runner.fail = {len(engine.runner.schedules) + 1: (RuntimeError("device"), "before")}
    with pytest.raises(RuntimeError, match="device"):
        engine.step()
    assert [len(one[1]) for one in answers(run(engine)["s"])] == [3, 3]
