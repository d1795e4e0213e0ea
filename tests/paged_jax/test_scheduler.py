"""Who runs in which step, and with which blocks: driven with made-up tokens, without a device."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax import BlockAllocator, BlockTable, SamplingParams
from paged_jax.errors import PoolTooSmall
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, RequestMetrics, Sequence

END = 7
MAX_MODEL_LEN = 32


def make_scheduler(
    num_blocks=64, block_size=4, *, seqs=8, budget=64, prefill_seqs=8, max_model_len=MAX_MODEL_LEN
):
    return Scheduler(
        BlockAllocator(num_blocks, block_size),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_prefill_seqs=prefill_seqs,
        max_model_len=max_model_len,
    )


def add(scheduler, name, prompt_len, max_new_tokens=4):
    request = Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=[token_of(name, position) for position in range(prompt_len)],
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset([END]),
        seed=0,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    sequence = Sequence(request, 0, BlockTable(scheduler.allocator, name))
    scheduler.add(sequence)
    return sequence


def token_of(name, position):
    """The token that stands at a position of a sequence, prompt or answer; never END."""
    return 1000 + (31 * sum(map(ord, name)) + position) % 1000


def names(sequences):
    return [sequence.request.request_id for sequence in sequences]


def shape(schedule):
    """A step as a reader sees it: its phase, and how many tokens of whom."""
    return schedule.phase, {e.sequence.request.request_id: e.num_tokens for e in schedule.entries}


def run_step(scheduler, tokens=None):
    schedule = scheduler.schedule()
    if schedule is not None:
        scheduler.update(schedule, tokens or expected_tokens(schedule))
    return schedule


def expected_tokens(schedule):
    return [token_of(e.sequence.request.request_id, e.seq_len) for e in schedule.entries]


def finish(scheduler):
    steps = 0
    while scheduler.has_unfinished:
        run_step(scheduler)
        steps += 1
        assert steps < 1000
    scheduler.allocator.check([])
    return steps


# -- one request -------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_step():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished


def test_a_request_is_prefilled_then_decoded_token_by_token():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 5, max_new_tokens=3)
    steps = [shape(run_step(scheduler)) for _ in range(3)]
    assert steps == [("prefill", {"a": 5}), ("decode", {"a": 1}), ("decode", {"a": 1})]
    assert scheduler.schedule() is None
    assert sequence.output_token_ids == [token_of("a", position) for position in (5, 6, 7)]
    assert sequence.finish_reason == "length"
    scheduler.allocator.check([])


def test_a_step_says_where_its_tokens_stand_and_where_they_go():
    scheduler = make_scheduler(block_size=4)
    add(scheduler, "a", 5)
    (prefill,) = run_step(scheduler).entries
    assert (prefill.first_position, prefill.seq_len, list(prefill.slots)) == (0, 5, [4, 5, 6, 7, 8])
    (decode,) = run_step(scheduler).entries
    assert (decode.first_position, decode.seq_len, list(decode.slots)) == (5, 6, [9])


def test_a_request_that_ends_after_two_tokens_has_taken_one_block():
    scheduler = make_scheduler(block_size=16)
    sequence = add(scheduler, "a", 3, max_new_tokens=29)
    run_step(scheduler)
    assert len(sequence.table.blocks) == 1
    run_step(scheduler, [END])
    assert sequence.finish_reason == "stop"
    assert sequence.num_output_tokens == 2
    assert not scheduler.has_unfinished
    assert scheduler.allocator.num_free_blocks == 63


def test_a_block_is_taken_when_a_token_is_about_to_be_written_into_it():
    scheduler = make_scheduler(block_size=4)
    sequence = add(scheduler, "a", 3, max_new_tokens=8)
    held = []
    while scheduler.has_unfinished:
        schedule = scheduler.schedule()
        held.append(len(sequence.table.blocks))
        scheduler.update(schedule, expected_tokens(schedule))
    assert held == [1, 1, 2, 2, 2, 2, 3, 3]  # 3 tokens computed, then 4, 5, ...; the last is never written


def test_a_prompt_of_one_token_is_a_prompt():
    scheduler = make_scheduler()
    add(scheduler, "a", 1, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 1})
    assert shape(run_step(scheduler)) == ("decode", {"a": 1})
    assert not scheduler.has_unfinished


def test_a_sequence_may_fill_pool_and_context_to_the_last_slot():
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32)
    sequence = add(scheduler, "a", 1, max_new_tokens=31)
    finish(scheduler)
    assert len(sequence.token_ids) == 32
    assert sequence.request.metrics.num_preemptions == 0


def test_a_pool_that_cannot_hold_one_sequence_of_the_longest_kind_is_refused():
    with pytest.raises(PoolTooSmall, match="needs 8 blocks of 4 tokens, the pool has 7"):
        make_scheduler(num_blocks=8, block_size=4, max_model_len=32)


def test_an_end_token_ends_at_once_even_as_the_first():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3)
    run_step(scheduler, [END])
    assert (sequence.output_token_ids, sequence.finish_reason) == ([END], "stop")


def test_an_end_token_within_the_prompt_ends_nothing():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3)
    sequence.token_ids[1] = END
    finish(scheduler)
    assert sequence.num_output_tokens == 4


# -- many requests -----------------------------------------------------------------------------------------


def test_first_come_first_served():
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 3, "b": 3})
    assert shape(run_step(scheduler)) == ("decode", {"a": 1, "b": 1})
    assert shape(run_step(scheduler)) == ("prefill", {"c": 3})


def test_a_newcomer_is_prefilled_before_the_others_go_on():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    run_step(scheduler)
    add(scheduler, "b", 3)
    assert shape(run_step(scheduler)) == ("prefill", {"b": 3})
    assert shape(run_step(scheduler)) == ("decode", {"a": 1, "b": 1})


def test_no_more_run_at_once_than_allowed():
    scheduler = make_scheduler(seqs=3)
    for index in range(7):
        add(scheduler, str(index), 2)
    while scheduler.has_unfinished:
        run_step(scheduler)
        assert len(scheduler.running) <= 3


def test_no_more_prompts_share_a_step_than_allowed():
    scheduler = make_scheduler(prefill_seqs=2)
    for name in "abc":
        add(scheduler, name, 2)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 2, "b": 2})
    assert shape(run_step(scheduler)) == ("prefill", {"c": 2})


def test_a_prompt_longer_than_a_steps_budget_comes_in_pieces():
    scheduler = make_scheduler(budget=8)
    sequence = add(scheduler, "a", 20, max_new_tokens=2)
    for size in (8, 8, 4):
        assert sequence.num_output_tokens == 0
        assert shape(run_step(scheduler)) == ("prefill", {"a": size})
    assert sequence.num_output_tokens == 1


def test_the_token_of_an_unfinished_prompt_is_dropped():
    scheduler = make_scheduler(budget=8)
    sequence = add(scheduler, "a", 20)
    assert scheduler.update(scheduler.schedule(), [END]) == []
    assert sequence.num_output_tokens == 0
    assert not sequence.is_finished


def test_prompts_share_a_steps_budget():
    scheduler = make_scheduler(budget=8)
    for name in "abc":
        add(scheduler, name, 5)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 5, "b": 3})
    assert shape(run_step(scheduler)) == ("prefill", {"b": 2, "c": 5})
    assert shape(run_step(scheduler)) == ("decode", {"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize("prompt_len", [1, 9])
def test_the_last_token_of_a_prompt_is_not_overtaken_by_a_newcomers_prompt(prompt_len):
    scheduler = make_scheduler(budget=8, prefill_seqs=1)
    add(scheduler, "a", prompt_len)
    if prompt_len > 8:
        run_step(scheduler)
    add(scheduler, "b", 3)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 1})


def test_a_budget_of_one_token_is_enough():
    scheduler = make_scheduler(budget=1)
    sequences = [add(scheduler, name, 3) for name in "ab"]
    finish(scheduler)
    for sequence in sequences:
        name = sequence.request.request_id
        assert sequence.output_token_ids == [token_of(name, position) for position in (3, 4, 5, 6)]


def test_a_request_waits_while_the_pool_is_full_and_none_overtakes_it():
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32)
    add(scheduler, "a", 16, max_new_tokens=2)
    add(scheduler, "b", 20, max_new_tokens=2)
    add(scheduler, "c", 1, max_new_tokens=2)
    assert shape(run_step(scheduler)) == ("prefill", {"a": 16})
    assert names(scheduler.waiting) == ["b", "c"]
    assert shape(run_step(scheduler)) == ("decode", {"a": 1})
    assert shape(run_step(scheduler)) == ("prefill", {"b": 20, "c": 1})


# -- preemption --------------------------------------------------------------------------------------------


def under_pressure():
    """Three sequences in a pool that soon cannot serve all of them."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32)
    sequences = [add(scheduler, name, 4, max_new_tokens=12) for name in "abc"]
    return scheduler, sequences


def until_preemption(scheduler):
    while not (schedule := run_step(scheduler)).preempted:
        pass
    return schedule


def test_the_latest_gives_its_blocks_back_and_waits_ahead_of_all():
    scheduler, (_, _, c) = under_pressure()
    add(scheduler, "d", 20)
    schedule = until_preemption(scheduler)
    assert names(schedule.preempted) == ["c"]
    assert names(scheduler.running) == ["a", "b"]
    assert names(scheduler.waiting) == ["c", "d"]
    assert (c.table.blocks, c.table.num_tokens) == ([], 0)
    assert c.request.metrics.num_preemptions == 1
    scheduler.allocator.check([sequence.table for sequence in scheduler.running])


def test_what_was_set_back_keeps_its_tokens_and_is_computed_again_from_them():
    scheduler, (_, _, c) = under_pressure()
    until_preemption(scheduler)
    kept = list(c.token_ids)
    assert len(kept) > 4
    while c not in scheduler.running:
        schedule = run_step(scheduler)
    assert shape(schedule) == ("prefill", {"c": len(kept)})
    assert schedule.entries[0].first_position == 0
    finish(scheduler)
    assert c.token_ids == [token_of("c", position) for position in range(16)]


def test_several_set_back_at_once_keep_their_order():
    scheduler = make_scheduler(num_blocks=9, block_size=1, max_model_len=8)
    for name in "abcd":
        add(scheduler, name, 1, max_new_tokens=7)
    order = []
    while scheduler.has_unfinished:
        run_step(scheduler)
        order.append("".join([*names(scheduler.running), *names(scheduler.waiting)]))
    assert all(list(line) == sorted(line) for line in order)


def test_after_a_failed_step_all_are_computed_again_in_their_order():
    scheduler = make_scheduler()
    sequences = [add(scheduler, name, 5) for name in "ab"]
    add(scheduler, "c", 25)
    run_step(scheduler)
    scheduler.schedule()  # and its tokens never come
    scheduler.set_back_all()
    scheduler.allocator.check([])
    assert names(scheduler.waiting) == ["a", "b", "c"]
    finish(scheduler)
    for sequence in sequences:
        name = sequence.request.request_id
        assert sequence.token_ids == [token_of(name, position) for position in range(9)]


# -- abort -------------------------------------------------------------------------------------------------


def test_abort_while_waiting_prefilling_and_decoding():
    scheduler = make_scheduler(seqs=2, budget=8)
    decoding, prefilling, waiting = (add(scheduler, name, 8) for name in "abc")
    run_step(scheduler)
    scheduler.max_num_batched_tokens = 4
    run_step(scheduler)
    assert (decoding.num_uncomputed, prefilling.num_uncomputed, waiting.num_uncomputed) == (1, 4, 8)
    for sequence, left in ((waiting, "ab"), (prefilling, "a"), (decoding, "")):
        scheduler.abort(sequence.request.request_id)
        assert sequence.finish_reason == "abort"
        assert sequence.request.metrics.finished_time is not None
        assert names([*scheduler.running, *scheduler.waiting]) == list(left)
        scheduler.allocator.check([s.table for s in scheduler.running])
    assert not scheduler.has_unfinished


def test_abort_twice_and_of_nobody_changes_nothing():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    run_step(scheduler)
    for name in ("a", "a", "nobody"):
        scheduler.abort(name)
    assert names(scheduler.running) == ["b"]
    assert sequence.finish_reason == "abort"
    scheduler.allocator.check([scheduler.running[0].table])


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
    scheduler.abort("a")
    assert scheduler.update(schedule, expected_tokens(schedule)) == [other]
    assert aborted.output_token_ids == []
    assert names(scheduler.running) == ["b"]
    scheduler.allocator.check([other.table])


def test_an_id_may_be_used_again_once_its_request_is_aborted():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    schedule = scheduler.schedule()
    scheduler.abort("a")
    again = add(scheduler, "a", 5)
    assert scheduler.update(schedule, expected_tokens(schedule)) == []
    finish(scheduler)
    assert again.token_ids == [token_of("a", position) for position in range(9)]


def test_an_aborted_request_makes_room_for_the_next():
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32)
    add(scheduler, "a", 30)
    run_step(scheduler)
    add(scheduler, "b", 30)
    run_step(scheduler)
    assert names(scheduler.waiting) == ["b"]
    scheduler.abort("a")
    assert shape(run_step(scheduler)) == ("prefill", {"b": 30})


# -- any load ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A pool, limits, requests (prompt length, answer length, arrives at step), and aborts (step, request,
    before or amid the step)."""

    block_size: int
    spare_blocks: int
    seqs: int
    budget: int
    prefill_seqs: int
    requests: list
    aborts: list


lengths = st.integers(1, MAX_MODEL_LEN - 1)
loads = st.builds(
    Load,
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    spare_blocks=st.integers(0, 12),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 3, 5, 8, 40]),
    prefill_seqs=st.integers(1, 4),
    requests=st.lists(st.tuples(lengths, lengths, st.integers(0, 30)), min_size=1, max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7), st.booleans()), max_size=3),
)


class Machine:
    """Plays a load against a memory of its own, and checks every step."""

    def __init__(self, load):
        self.load = load
        blocks = -(-MAX_MODEL_LEN // load.block_size) + load.spare_blocks + 1
        self.scheduler = make_scheduler(
            blocks, load.block_size, seqs=load.seqs, budget=load.budget, prefill_seqs=load.prefill_seqs
        )
        self.sequences = {}
        self.memory = {}
        self.first = None
        self.got_token = {}  # since its last admission

    def play(self):
        arrivals = sorted(enumerate(self.load.requests), key=lambda item: (item[1][2], item[0]))
        step = 0
        while arrivals or self.scheduler.has_unfinished:
            while arrivals and (arrivals[0][1][2] <= step or not self.scheduler.has_unfinished):
                index, (prompt, answer, _) = arrivals.pop(0)
                answer = min(answer, MAX_MODEL_LEN - prompt)
                self.sequences[index] = add(self.scheduler, str(index), prompt, answer)
            self.abort(step, amid=False)
            self.step(step)
            step += 1
            assert step <= self.bound
        self.finish()

    @property
    def bound(self):
        """An answer's tokens, each of which may cost a decode step, and a prefill because it was set back."""
        total = len(self.load.requests) + len(self.load.aborts) + 30
        for _, answer, _ in self.load.requests:
            total += answer * (1 + -(-MAX_MODEL_LEN // self.load.budget))
        return total

    def step(self, step):
        before = list(self.scheduler.running)
        schedule = self.scheduler.schedule()
        if schedule is None:
            assert not self.scheduler.has_unfinished
            return
        self.check_step(schedule, before)
        self.abort(step, amid=True)
        aborted = {s for s in self.sequences.values() if s.finish_reason == "abort"}
        samples = [e.sequence for e in schedule.entries if e.samples and e.sequence not in aborted]
        assert self.scheduler.update(schedule, expected_tokens(schedule)) == samples
        self.got_token |= dict.fromkeys(samples, True)
        for sequence in self.scheduler.running:
            assert not sequence.is_finished
        self.scheduler.allocator.check([s.table for s in self.scheduler.running])

    def check_step(self, schedule, before):
        running = self.scheduler.running
        entries = schedule.entries
        assert len(running) <= self.load.seqs
        assert 0 < len(entries) <= self.load.seqs
        if schedule.phase == "prefill":
            assert len(entries) <= self.load.prefill_seqs
            assert sum(e.num_tokens for e in entries) <= self.load.budget
            assert not schedule.preempted
        else:
            assert [(e.sequence, e.num_tokens) for e in entries] == [(s, 1) for s in running]
        for sequence in running:
            if sequence not in before:
                self.got_token[sequence] = False
        for sequence in schedule.preempted:
            assert self.got_token[sequence], "set back without a token since it was admitted"
        if self.first is not None and not self.first.is_finished:
            assert running[0] is self.first, "the first admitted was set back"
        self.first = running[0]
        self.scheduler.allocator.check([s.table for s in running])
        self.compute(entries)

    def compute(self, entries):
        """Write the step's tokens, then read each sequence's whole past through its table."""
        size = self.load.block_size
        for entry in entries:
            name = entry.sequence.request.request_id
            positions = range(entry.first_position, entry.seq_len)
            self.memory |= {
                slot: (name, position) for slot, position in zip(entry.slots, positions, strict=True)
            }
        for entry in entries:
            blocks, name = entry.sequence.table.blocks, entry.sequence.request.request_id
            past = [self.memory[blocks[p // size] * size + p % size] for p in range(entry.seq_len)]
            assert past == [(name, position) for position in range(entry.seq_len)]

    def abort(self, step, amid):
        for at, index, is_amid in self.load.aborts:
            if at == step and is_amid == amid:
                self.scheduler.abort(str(index))

    def finish(self):
        self.scheduler.allocator.check([])
        for index, sequence in self.sequences.items():
            prompt, answer, _ = self.load.requests[index]
            got = sequence.token_ids
            assert got == [token_of(str(index), position) for position in range(len(got))]
            if sequence.finish_reason != "abort":
                assert sequence.finish_reason == "length"
                assert len(got) == prompt + min(answer, MAX_MODEL_LEN - prompt)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(loads)
def test_any_load_ends_with_every_token_in_its_place(load):
    """Within the bound of steps, the first never set back, none set back without a token between, and the
    counts right after every step."""
    Machine(load).play()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(loads)
def test_first_come_is_first_scheduled_and_gets_its_first_token_no_later(load):
    scheduler = make_scheduler(40, load.block_size, seqs=load.seqs, budget=load.budget)
    sequences = [
        add(scheduler, str(i), prompt, min(answer, MAX_MODEL_LEN - prompt))
        for i, (prompt, answer, _) in enumerate(load.requests)
    ]
    first_tokens = []
    while scheduler.has_unfinished:
        run_step(scheduler)
        first_tokens += [s for s in sequences if s.num_output_tokens and s not in first_tokens]
    assert first_tokens == sequences
    times = [sequence.request.metrics.first_scheduled_time for sequence in sequences]
    assert times == sorted(times)
