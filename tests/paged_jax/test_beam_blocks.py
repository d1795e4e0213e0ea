"""What beams cost in blocks: copies of a last, partly filled block each step, and nothing else."""

import pytest
from support.naive_beam_search import MadeUpModel, naive_beam_search

from paged_jax.errors import InvalidSamplingParams, PoolTooSmall

from .made_up_engine import add_beams, make_engine, num_blocks_held, num_copies, run, step
from .test_beam_search import assert_found

MODEL = MadeUpModel(12, seed=8, spread=0.8, look_back=4)


def copies_of_steps(prompt, width, block_size, max_tokens=40):
    """Blocks copied by each step of a lone search."""
    engine = make_engine(MODEL, block_size=block_size, num_blocks=4000, budget=9000)
    request = add_beams(engine, "b", prompt, beam_width=width, max_tokens=max_tokens)
    output = run(engine)["b"]
    copies = [num_copies(schedule) for schedule in engine.runner.schedules]
    assert request.metrics.num_cow_copies == sum(copies)
    return copies, output


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_step_copies_fewer_blocks_than_there_are_beams_however_long_the_prompt_is(width):
    short = [5, 6, 7, 8] * 2 + [9, 1]
    long = [2] * 3990 + short * 2
    (copies, output), (same, again) = (copies_of_steps(prompt, width, 10) for prompt in (short, long))
    assert copies == same
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in again.outputs]
    assert 0 < max(copies) <= width - 1
    full = [at for at in range(len(copies)) if at % 10 == 1]  # steps that begin a block
    assert all(copies[at] == 0 for at in full)


def test_blocks_of_one_token_are_never_copied():
    copies, _ = copies_of_steps([1, 2, 3, 4], 4, 1)
    assert set(copies) == {0}


@pytest.mark.parametrize("width", [2, 3, 8])
def test_an_only_child_keeps_its_parents_table_and_row(width):
    """After the first tokens each beam has one child: the copies of one step are all there are."""
    engine = make_engine(MODEL, block_size=64)
    allowed = {"prefix_allowed_tokens_fn": lambda _, ids: range(12) if len(ids) == 5 else [ids[-1]]}
    request = add_beams(engine, "b", [1, 2, 3, 4, 5], beam_width=width, max_tokens=30, **allowed)
    step(engine)
    step(engine)
    tables = {id(sequence.table): sequence.row for sequence in request.sequences}
    blocks = [list(sequence.table.blocks) for sequence in request.sequences]
    for _ in range(20):
        step(engine)
        assert {id(sequence.table): sequence.row for sequence in request.sequences} == tables
        assert sorted(sequence.table.blocks for sequence in request.sequences) == sorted(blocks)
    copies = [num_copies(schedule) for schedule in engine.runner.schedules]
    assert copies == [0, width - 1] + [0] * 20
    run(engine)


def test_a_group_holds_its_prompt_once():
    engine = make_engine(MODEL, block_size=4, budget=9000)
    request = add_beams(engine, "b", [2] * 802, beam_width=8, max_tokens=20)
    peak = 0
    while not request.is_finished:
        step(engine)
        peak = max(peak, num_blocks_held(request))
    assert peak <= 200 + 8 * 6
    assert request.metrics.saved_share > 0.8


@pytest.mark.parametrize("num_blocks", range(6, 14))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_lone_search_that_fills_the_pool_ends_with_length_and_gives_what_it_has(mode, num_blocks):
    engine = make_engine(MODEL, block_size=4, num_blocks=num_blocks, mode=mode)
    add_beams(engine, "b", [1, 2, 3, 4, 5], beam_width=4, max_tokens=200)
    output = run(engine)["b"]
    length = len(output.outputs[0].token_ids)
    assert {one.finish_reason for one in output.outputs} == {"length"}
    assert_found(output, naive_beam_search(MODEL, [1, 2, 3, 4, 5], beam_width=4, max_tokens=length))
    assert length < 30


def test_what_had_finished_before_the_pool_was_full_is_given_back_too():
    engine = make_engine(MODEL, block_size=4, num_blocks=9, eos_ids=[2])
    add_beams(engine, "b", [1, 2, 3, 4, 5], beam_width=4, max_tokens=200, early_stopping="never")
    outputs = run(engine)["b"].outputs
    assert {one.finish_reason for one in outputs} == {"stop", "length"}
    assert [one.score for one in outputs] == sorted((one.score for one in outputs), reverse=True)


# -- refused -----------------------------------------------------------------------------------------------


def nothing_is_held(engine):
    assert not engine.has_unfinished
    engine.allocator.check([])


def test_more_beams_than_rows_are_refused():
    engine = make_engine(MODEL, seqs=4)
    with pytest.raises(InvalidSamplingParams, match=r"beam_width=5: expected max_num_seqs=4 at most"):
        add_beams(engine, "b", [1, 2], beam_width=5, max_tokens=4)
    nothing_is_held(engine)
    add_beams(engine, "b", [1, 2], beam_width=4, max_tokens=4)
    assert len(run(engine)["b"].outputs) == 4


@pytest.mark.parametrize(("prompt", "width", "needed"), [(8, 4, 6), (9, 4, 6), (11, 3, 5), (12, 3, 6)])
def test_a_group_that_can_never_fit_is_refused_and_one_that_just_fits_is_not(prompt, width, needed):
    """Its first two tokens: the prompt's full blocks, and one of its own for each."""
    engine = make_engine(MODEL, block_size=4, num_blocks=needed)
    with pytest.raises(
        PoolTooSmall, match=rf"need {needed} blocks of 4 .* has {needed - 1}: raise num_blocks"
    ):
        add_beams(engine, "b", [1] * prompt, beam_width=width, max_tokens=4)
    nothing_is_held(engine)
    engine = make_engine(MODEL, block_size=4, num_blocks=needed + 1)
    add_beams(engine, "b", [1] * prompt, beam_width=width, max_tokens=4)
    outputs = run(engine)["b"].outputs
    assert len(outputs) == width
    assert all(len(one.token_ids) >= 2 for one in outputs)


def test_a_search_for_one_token_needs_no_more_than_its_prompt():
    engine = make_engine(MODEL, block_size=4, num_blocks=3)
    add_beams(engine, "b", [1] * 8, beam_width=6, max_tokens=1)
    assert [len(one.token_ids) for one in run(engine)["b"].outputs] == [1] * 6
