"""Who runs in which step, and with which blocks: driven with made-up tokens, without a device."""

import pytest

from paged_jax.errors import PoolTooSmall
from paged_jax.sampling_params import SamplingParams
from paged_jax.schedule import Sampled
from paged_jax.sequence import TokenLogprobs

from .scheduling import (
    END,
    add,
    add_group,
    check,
    check_all_free,
    expected_tokens,
    finish,
    finish_step,
    give_blocks_back,
    make_scheduler,
    names,
    run_step,
    shape,
    take_blocks,
    token_of,
)

# -- one request -------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_step():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished


def test_a_prompt_is_prefilled_but_for_its_last_token_which_decodes_in_the_same_step():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 5, max_new_tokens=3)
    schedule = scheduler.schedule()
    assert shape(schedule) == ({"a": 4}, "a")
    assert (schedule.prefill[0].start, schedule.prefill[0].end) == (0, 4)
    assert sequence.table.num_tokens == 5
    finish_step(scheduler, schedule, scheduler.device.execute(schedule))
    assert [shape(run_step(scheduler)) for _ in range(2)] == [({}, "a"), ({}, "a")]
    assert scheduler.schedule() is None
    assert sequence.output_token_ids == [token_of("a", 0, position) for position in (5, 6, 7)]
    assert sequence.finish_reason == "length"
    check_all_free(scheduler)


def test_a_request_that_ends_after_two_tokens_has_taken_one_block():
    scheduler = make_scheduler(block_size=16)
    sequence = add(scheduler, "a", 3, max_new_tokens=29)
    run_step(scheduler)
    assert len(sequence.table.blocks) == 1
    run_step(scheduler, end=[sequence])
    assert sequence.finish_reason == "stop"
    assert sequence.num_output_tokens == 2
    assert not scheduler.has_unfinished
    check_all_free(scheduler)


def test_a_block_is_taken_when_a_token_is_about_to_be_written_into_it():
    scheduler = make_scheduler(block_size=4)
    sequence = add(scheduler, "a", 3, max_new_tokens=8)
    held = []
    while scheduler.has_unfinished:
        schedule = scheduler.schedule()
        held.append(len(sequence.table.blocks))
        finish_step(scheduler, schedule, scheduler.device.execute(schedule))
    assert held == [1, 1, 2, 2, 2, 2, 3, 3]  # 3 tokens computed, then 4, 5, ...; the last is never written


def test_a_prompt_of_one_token_goes_straight_to_decode():
    scheduler = make_scheduler()
    add(scheduler, "a", 1, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ({}, "a")
    assert shape(run_step(scheduler)) == ({}, "a")
    assert not scheduler.has_unfinished


def test_a_request_that_fits_the_pool_exactly_runs():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    sequence = add(scheduler, "a", 32, max_new_tokens=1)
    assert shape(run_step(scheduler)) == ({"a": 31}, "a")
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("length", 1)


def test_a_sequence_may_fill_the_pool_to_the_last_slot():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    sequence = add(scheduler, "a", 1, max_new_tokens=32)
    steps = finish(scheduler)
    assert sequence.token_ids == expected_tokens(sequence)  # 33: the last one needs no slot
    assert sequence.request.metrics.num_preemptions == 0
    assert not any(schedule.exhausted for schedule in steps)


def test_a_lone_sequence_that_fills_the_pool_ends_with_length_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    sequence = add(scheduler, "a", 5, max_new_tokens=20)
    for _ in range(4):
        run_step(scheduler)
    schedule = scheduler.schedule()
    assert (schedule.exhausted, bool(schedule)) == ([sequence], False)
    assert "a" in scheduler, "known until it is retired"
    assert finish_step(scheduler, schedule, Sampled([])).advanced == [sequence]
    assert sequence.finish_reason == "length"
    assert sequence.token_ids == [token_of("a", 0, position) for position in range(9)]
    check_all_free(scheduler)


def test_a_request_that_can_never_fit_is_refused_with_numbers_and_others_go_on():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 3)
    with pytest.raises(PoolTooSmall) as refused:
        add(scheduler, "b", 33)
    for part in ("'b'", "33 tokens need 9 blocks of 4 tokens", "the pool has 8", "raise num_blocks to 10"):
        assert part in str(refused.value)
    assert names(scheduler.waiting) == ["a"]
    assert "b" not in scheduler
    finish(scheduler)


def test_an_end_token_ends_at_once_even_as_the_first():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3)
    run_step(scheduler, end=[sequence])
    assert (sequence.output_token_ids, sequence.finish_reason) == ([END], "stop")


def test_an_end_token_within_the_prompt_ends_nothing():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", [1, END, 2])
    finish(scheduler)
    assert sequence.num_output_tokens == 4


# -- many requests -----------------------------------------------------------------------------------------


def test_first_come_first_served():
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ({"a": 2, "b": 2}, "ab")
    assert shape(run_step(scheduler)) == ({}, "ab")
    assert shape(run_step(scheduler)) == ({"c": 2}, "c")


def test_a_newcomer_is_prefilled_beside_those_that_decode_and_decodes_with_them():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    run_step(scheduler)
    add(scheduler, "b", 6)
    assert shape(run_step(scheduler)) == ({"b": 5}, "ab")


def test_a_long_prompt_comes_in_pieces_while_others_decode():
    scheduler = make_scheduler(num_blocks=99, budget=40)
    decoding = add(scheduler, "a", 3, max_new_tokens=9)
    run_step(scheduler)
    sequence = add(scheduler, "b", 100, max_new_tokens=2)
    for size in (39, 39):
        assert shape(run_step(scheduler)) == ({"b": size}, "a")
        assert sequence.num_output_tokens == 0
    assert shape(run_step(scheduler)) == ({"b": 21}, "ab")
    assert (decoding.num_output_tokens, sequence.num_output_tokens) == (4, 1)


def test_the_budget_counts_those_that_decode_but_leaves_prompts_a_share():
    scheduler = make_scheduler(num_blocks=400, seqs=100, budget=64, prefill_seqs=100)
    for index in range(60):
        add(scheduler, f"{index}", 1, max_new_tokens=99)
    run_step(scheduler)
    add(scheduler, "long", 200, max_new_tokens=1)
    assert shape(run_step(scheduler))[0] == {"long": 32}
    scheduler = make_scheduler(num_blocks=400, budget=64)
    for name in "abc":
        add(scheduler, name, 1, max_new_tokens=99)
    run_step(scheduler)
    add(scheduler, "long", 200, max_new_tokens=1)
    assert shape(run_step(scheduler))[0] == {"long": 61}


def test_prompts_share_a_steps_budget():
    scheduler = make_scheduler(budget=8)
    for name in "abc":
        add(scheduler, name, 6)
    assert shape(run_step(scheduler)) == ({"a": 5, "b": 3}, "a")
    assert shape(run_step(scheduler)) == ({"b": 2, "c": 5}, "abc")


def test_no_more_prompts_share_a_step_than_allowed():
    scheduler = make_scheduler(prefill_seqs=2)
    for name in "abc":
        add(scheduler, name, 3)
    assert shape(run_step(scheduler)) == ({"a": 2, "b": 2}, "ab")
    assert shape(run_step(scheduler)) == ({"c": 2}, "abc")


def test_a_budget_of_one_token_is_enough():
    scheduler = make_scheduler(budget=1)
    sequences = [add(scheduler, name, 3) for name in "ab"]
    finish(scheduler)
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence)


def test_a_request_waits_while_the_pool_is_full_and_none_overtakes_it():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 16, max_new_tokens=3)
    add(scheduler, "b", 20, max_new_tokens=2)
    add(scheduler, "c", 1, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ({"a": 15}, "a")
    assert names(scheduler.waiting) == ["b", "c"]
    assert shape(run_step(scheduler)) == ({}, "a")
    assert shape(run_step(scheduler)) == ({}, "a")
    assert shape(run_step(scheduler)) == ({"b": 19}, "bc")


def test_lower_priority_numbers_go_first_and_equals_in_order_of_arrival():
    scheduler = make_scheduler(seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 1), ("d", 5), ("e", -1), ("f", 1)):
        add(scheduler, name, 2, max_new_tokens=1, priority=priority)
    assert names(scheduler.waiting) == ["e", "a", "c", "f", "b", "d"]
    served = [step.decode[0].request.request_id for step in finish(scheduler)]
    assert served == ["e", "a", "c", "f", "b", "d"]


# -- rows --------------------------------------------------------------------------------------------------


def test_no_more_run_at_once_than_there_are_rows():
    scheduler = make_scheduler(seqs=3)
    for index in range(7):
        add(scheduler, str(index), 2)
    most = 0
    while scheduler.has_unfinished:
        run_step(scheduler)
        most = max(most, len(scheduler.running))
    assert most == 3


def test_each_running_sequence_has_a_row_of_its_own_and_keeps_it():
    scheduler = make_scheduler(seqs=4)
    a, b, c = (add(scheduler, name, 3, max_new_tokens=9) for name in "abc")
    run_step(scheduler)
    assert [a.row, b.row, c.row] == [0, 1, 2]
    run_step(scheduler)
    assert [a.row, b.row, c.row] == [0, 1, 2]


@pytest.mark.parametrize("way", ["finish", "abort", "set back"])
def test_a_row_is_given_back(way):
    scheduler = make_scheduler(seqs=2, num_blocks=5)
    a, b = add(scheduler, "a", 3, max_new_tokens=99), add(scheduler, "b", 3, max_new_tokens=99)
    run_step(scheduler)
    if way == "finish":
        run_step(scheduler, end=[b])
    elif way == "abort":
        scheduler.abort("b")
    else:
        while not run_step(scheduler).preempted:
            pass
    assert (a.row, b.row) == (0, None)
    assert scheduler.queues.free_rows == [1]


def test_only_rows_that_must_be_written_are_placed():
    scheduler = make_scheduler(budget=32)
    a = add(scheduler, "a", 6, max_new_tokens=20)
    assert run_step(scheduler).placed == [a]
    assert run_step(scheduler).placed == []
    b = add(scheduler, "b", 50, max_new_tokens=3)
    assert run_step(scheduler).placed == [b]  # its first piece
    assert run_step(scheduler).placed == [b]  # the second, with which it begins to decode
    assert run_step(scheduler).placed == []
    twin = scheduler.forks.fork(a)
    assert run_step(scheduler).placed == [twin]
    assert run_step(scheduler).placed == []


# -- groups ------------------------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks_and_costs_one_copy_less_than_there_are_writers():
    scheduler = make_scheduler(block_size=4)
    group = add_group(scheduler, "a", 6, 3, max_new_tokens=6)
    assert len({tuple(sequence.table.blocks) for sequence in group}) == 1
    schedule = run_step(scheduler)
    assert schedule.decode == group
    assert len(schedule.copies) == 2
    assert group[0].table.blocks[0] == group[2].table.blocks[0]
    assert len({sequence.table.blocks[1] for sequence in group}) == 3
    finish(scheduler)
    assert [s.token_ids for s in group] == [expected_tokens(s, forked_at=7) for s in group]


def test_a_fork_takes_the_logprobs_of_its_tokens_along():
    scheduler = make_scheduler()
    first = add(scheduler, "a", 3, params=SamplingParams(logprobs=1))
    logprobs = TokenLogprobs(5, -1.0, 1, [])
    scheduler.update(scheduler.schedule(), Sampled([5], [logprobs]))
    second = scheduler.forks.fork(first)
    assert second.logprobs == first.logprobs == [logprobs]
    assert second.logprobs is not first.logprobs


def test_logprobs_go_to_the_sequences_that_want_them():
    scheduler = make_scheduler()
    wants, not_ = add(scheduler, "a", 3, params=SamplingParams(logprobs=0)), add(scheduler, "b", 3)
    logprobs = [TokenLogprobs(5, -1.0, 1, []), TokenLogprobs(6, -2.0, 1, [])]
    scheduler.update(scheduler.schedule(), Sampled([5, 6], logprobs))
    assert (wants.logprobs, not_.logprobs) == (logprobs[:1], [])


def test_a_groups_sequences_end_one_by_one_and_the_request_with_the_last():
    scheduler = make_scheduler()
    a, b = add_group(scheduler, "a", 6, 2, max_new_tokens=4)
    run_step(scheduler, end=[a])
    assert (a.row, b.row is None, "a" in scheduler) == (None, False, True)
    assert run_step(scheduler).decode == [b]
    finish(scheduler)
    assert (a.finish_reason, b.finish_reason) == ("stop", "length")


# -- preemption --------------------------------------------------------------------------------------------


def under_pressure(**options):
    """Three sequences in a pool that soon cannot serve all of them."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, **options)
    return scheduler, [add(scheduler, name, 4, max_new_tokens=12) for name in "abc"]


def until_preemption(scheduler):
    while not (schedule := run_step(scheduler)).preempted:
        pass
    return schedule


def test_the_latest_gives_its_blocks_back_and_waits_ahead_of_those_that_came_later():
    scheduler, (_, _, c) = under_pressure()
    add(scheduler, "d", 20)
    schedule = until_preemption(scheduler)
    assert names(schedule.preempted) == ["c"]
    assert shape(schedule) == ({}, "ab")
    assert names(scheduler.running) == ["a", "b"]
    assert names(scheduler.waiting) == ["c", "d"]
    assert (c.table.blocks, c.table.num_tokens) == ([], 0)
    assert c.request.metrics.num_preemptions == 1


def test_a_step_that_sets_somebody_back_admits_nobody():
    scheduler = make_scheduler(num_blocks=13, block_size=4, seqs=3)
    for name, prompt in (("a", 4), ("b", 4), ("c", 24)):
        add(scheduler, name, prompt, max_new_tokens=12)
    run_step(scheduler)
    d = add(scheduler, "d", 1, priority=-1)  # it waits for a row
    assert names(until_preemption(scheduler).preempted) == ["c"]
    assert d.row is None
    run_step(scheduler)
    assert d.row is not None


@pytest.mark.parametrize("alone", [True, False])
def test_a_fork_that_ends_or_is_set_back_before_it_runs_is_not_placed(alone):
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    if not alone:
        add(scheduler, "a", 1, max_new_tokens=99)
    group = add_group(scheduler, "b", 6, 3, max_new_tokens=9)
    take_blocks(scheduler, scheduler.allocator.num_free_blocks)
    schedule = run_step(scheduler)
    assert (schedule.exhausted, names(schedule.preempted)) == ((group, []) if alone else ([], ["b"]))
    assert schedule.placed == []


def test_the_least_urgent_is_set_back_whenever_it_came():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        add(scheduler, name, 4, max_new_tokens=12, priority=priority)
    assert names(until_preemption(scheduler).preempted) == ["a"]
    assert names(scheduler.running) == ["b", "c"]


def test_what_was_set_back_keeps_its_tokens_and_is_computed_again_from_them():
    scheduler, (_, _, c) = under_pressure()
    until_preemption(scheduler)
    kept = list(c.token_ids)
    assert len(kept) > 4
    while c.row is None:
        schedule = run_step(scheduler)
    assert shape(schedule)[0] == {"c": len(kept) - 1}
    assert schedule.prefill[0].start == 0
    finish(scheduler)
    assert c.token_ids == expected_tokens(c)


def test_several_set_back_at_once_keep_their_order():
    scheduler = make_scheduler(num_blocks=9, block_size=1)
    for name in "abcd":
        add(scheduler, name, 1, max_new_tokens=7)
    order = []
    while scheduler.has_unfinished:
        run_step(scheduler)
        order.append("".join([*names(scheduler.running), *names(scheduler.waiting)]))
    assert all(list(line) == sorted(line) for line in order)


@pytest.mark.parametrize(("prompt", "enters"), [(16, True), (17, False)])
def test_a_newcomer_leaves_a_block_for_every_running_sequence(prompt, enters):
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 6, max_new_tokens=12)
    run_step(scheduler)
    add(scheduler, "b", prompt, max_new_tokens=2)  # 6 blocks are free, of which a and b may each need one
    assert not run_step(scheduler).preempted
    assert names(scheduler.running) == ["a", "b"][: 1 + enters]
    assert not run_step(scheduler).preempted


@pytest.mark.parametrize(("prompt", "enters"), [(12, True), (13, False)])
def test_what_earlier_ones_still_lack_is_not_given_to_newcomers(prompt, enters):
    scheduler = make_scheduler(num_blocks=17, block_size=4)
    add(scheduler, "a", 41, max_new_tokens=2)  # 10 blocks for the prefill, and one for its last token
    add(scheduler, "b", prompt, max_new_tokens=2)
    run_step(scheduler)
    assert names(scheduler.running) == ["a", "b"][: 1 + enters]


def test_a_lone_prompt_that_can_not_go_on_ends_instead_of_waiting_for_ever():
    scheduler = make_scheduler(num_blocks=9, block_size=4, budget=8)
    sequence = add(scheduler, "a", 20)
    run_step(scheduler)
    take_blocks(scheduler, 6)
    assert run_step(scheduler).exhausted == [sequence]
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("length", 0)
    give_blocks_back(scheduler)
    check_all_free(scheduler)


# -- abort -------------------------------------------------------------------------------------------------


def test_abort_while_waiting_prefilling_and_decoding():
    scheduler = make_scheduler(seqs=2, budget=9)
    decoding, prefilling, waiting = (add(scheduler, name, 9) for name in "abc")
    run_step(scheduler)
    scheduler.max_num_batched_tokens = 4
    run_step(scheduler)
    assert (decoding.num_to_prefill, prefilling.num_to_prefill, waiting.num_to_prefill) == (0, 3, 8)
    for sequence, left in ((waiting, "ab"), (prefilling, "a"), (decoding, "")):
        scheduler.abort(sequence.request.request_id)
        assert sequence.finish_reason == "abort"
        assert sequence.request.metrics.finished_time is not None
        assert names([*scheduler.running, *scheduler.waiting]) == list(left)
        check(scheduler)
    assert not scheduler.has_unfinished
    check_all_free(scheduler)


def test_abort_twice_and_of_nobody_changes_nothing():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    run_step(scheduler)
    for name in ("a", "a", "nobody"):
        scheduler.abort(name)
    assert names(scheduler.running) == ["b"]
    assert sequence.finish_reason == "abort"
    check(scheduler)


def test_abort_after_the_end_keeps_the_reason():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_new_tokens=1)
    run_step(scheduler)
    scheduler.abort("a")
    assert sequence.finish_reason == "length"


def test_the_first_end_of_a_sequence_is_the_one_that_counts():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_new_tokens=1)
    run_step(scheduler)
    ended = sequence.request.metrics.finished_time
    sequence.finish("abort", ended + 1)
    assert (sequence.finish_reason, sequence.request.metrics.finished_time) == ("length", ended)


def test_a_token_that_arrives_after_the_abort_is_dropped():
    scheduler = make_scheduler()
    aborted, other = add(scheduler, "a", 3), add(scheduler, "b", 3)
    schedule = scheduler.schedule()
    sampled = scheduler.device.execute(schedule)
    scheduler.abort("a")
    assert finish_step(scheduler, schedule, sampled).advanced == [other]
    assert aborted.output_token_ids == []
    assert names(scheduler.running) == ["b"]


def test_an_id_may_be_used_again_once_its_request_is_aborted():
    scheduler = make_scheduler()
    old = add(scheduler, "a", 3)
    schedule = scheduler.schedule()
    sampled = scheduler.device.execute(schedule)
    scheduler.abort("a")
    again = add(scheduler, "a", 5)
    assert scheduler.update(schedule, sampled).advanced == []
    scheduler.retire([old.request])  # changes nothing for its namesake
    finish(scheduler)
    assert again.token_ids == expected_tokens(again)


def test_an_aborted_request_makes_room_for_the_next():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 30)
    run_step(scheduler)
    add(scheduler, "b", 30)
    run_step(scheduler)
    assert names(scheduler.waiting) == ["b"]
    scheduler.abort("a")
    assert shape(run_step(scheduler)) == ({"b": 29}, "b")


# -- times -------------------------------------------------------------------------------------------------


def test_a_step_tells_how_long_first_tokens_and_later_ones_took():
    scheduler = make_scheduler()
    a = add(scheduler, "a", 3)
    schedule = scheduler.schedule()
    first = finish_step(scheduler, schedule, scheduler.device.execute(schedule)).latencies
    begun = a.request.metrics.first_token_time
    assert first == ([begun], [])  # it arrived at 0.0
    add(scheduler, "b", 3)
    schedule = scheduler.schedule()
    second = finish_step(scheduler, schedule, scheduler.device.execute(schedule)).latencies
    assert second == ([a.request.metrics.last_token_time], [a.request.metrics.last_token_time - begun])
    assert a.request.metrics.num_output_tokens == 2


def test_fixed_chunks_end_at_their_multiples_whatever_else_runs():
    scheduler = make_scheduler(num_blocks=99, block_size=4, budget=40, prefill_seqs=1, chunk=40)
    for name in "ab":
        add(scheduler, name, 1, max_new_tokens=99)
    run_step(scheduler)
    long = add(scheduler, "long", 101, max_new_tokens=2)
    chunks = []
    while not long.num_output_tokens:
        chunks += [(chunk.start, chunk.end) for chunk in run_step(scheduler).prefill]
    assert chunks == [(0, 40), (40, 80), (80, 100)]


def test_a_fixed_chunk_is_not_cut_where_the_pool_is_short():
    scheduler = make_scheduler(num_blocks=12, block_size=4, budget=8, prefill_seqs=1, chunk=8)
    add(scheduler, "a", 1, max_new_tokens=99)
    run_step(scheduler)
    add(scheduler, "b", 21, max_new_tokens=2)
    run_step(scheduler)
    take_blocks(scheduler, scheduler.allocator.num_free_blocks - 1)
    assert shape(run_step(scheduler)) == ({}, "a")  # one block would hold half of the chunk
    give_blocks_back(scheduler)
    assert shape(run_step(scheduler)) == ({"b": 8}, "a")
