"""Any load of groups: beams, samples and single requests that come, are set back, fail and are taken back."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.naive_beam_search import MadeUpModel, naive_beam_search

from .made_up_engine import CopyCounts, add_beams, add_samples, make_engine, num_copies, set_back_in_next_step
from .scheduling import check, check_all_free, decoding, give_blocks_back, token_of
from .test_beam_search import assert_found

VOCABULARY, EOS, MAX_TOKENS = 9, 2, 16
MODEL = MadeUpModel(VOCABULARY, seed=5, spread=0.7)
done = Counter()
"""What has happened over all runs."""


class Groups(RuleBasedStateMachine):
    """An engine, and what each of its requests is to answer."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        spare_blocks=st.sampled_from([0, 0, 3, 20]),
        seqs=st.sampled_from([5, 10, 20]),
        budget=st.sampled_from([5, 10, 40]),
        mode=st.sampled_from(["recompute", "swap", "auto"]),
        caching=st.booleans(),
        host_blocks=st.sampled_from([6, 64]),
    )
    def start(self, block_size, spare_blocks, **options):
        largest = 8 // block_size + 5 * (-(-(8 + MAX_TOKENS) // block_size) - 8 // block_size)
        self.engine = make_engine(
            MODEL,
            block_size=block_size,
            num_blocks=largest + spare_blocks + 1,
            eos_ids=[EOS],
            **options,
        )
        self.scheduler = self.engine.scheduler
        self.requests, self.expected, self.outputs = {}, {}, {}
        self.taken_back, self.exhausted = set(), set()
        self.admitted = False
        """Whether the last step took in a request, and nothing has taken blocks from it since."""

    def pick(self, data, requests):
        return data.draw(st.sampled_from(sorted(requests, key=lambda request: request.request_id)))

    # -- what comes ----------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
        beam_width=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 5, 10, MAX_TOKENS]),
        length_penalty=st.sampled_from([0.0, 1.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        priority=st.sampled_from([0, 0, 1]),
        count=st.integers(1, 3),
    )
    def add_beams(self, prompt, priority, count, **fields):
        for _ in range(count):
            name, prompt = f"beams {len(self.requests)}", prompt[::-1]
            self.requests[name] = add_beams(self.engine, name, prompt, priority=priority, **fields)
            self.expected[name] = naive_beam_search(MODEL, prompt, end_ids={EOS}, **fields)

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
        n=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 5, 10, MAX_TOKENS]),
        priority=st.sampled_from([0, 0, -1]),
        count=st.integers(1, 3),
    )
    def add_samples(self, prompt, n, max_tokens, priority, count):
        for _ in range(count):
            name = f"samples {len(self.requests)}"
            fields = {"n": n, "max_tokens": max_tokens, "priority": priority}
            self.requests[name] = add_samples(self.engine, name, prompt, **fields)
            self.expected[name] = [self.sample(name, index, len(prompt), max_tokens) for index in range(n)]

    def sample(self, name, index, start, count):
        tokens = [token_of(name, index, start + place) % VOCABULARY for place in range(count)]
        return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens

    # -- what happens to it --------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.has_unfinished)
    def set_back(self, data):
        if not self.scheduler.running:
            self.step()
        if self.scheduler.running:
            set_back_in_next_step(self.engine, self.pick(data, self.scheduler.running))
            self.step(is_forced=True)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.has_unfinished)
    def abort(self, data):
        if data.draw(st.integers(0, 2)):
            return
        request = self.pick(data, self.scheduler.queues.by_id.values())
        self.taken_back.add(request.request_id)
        self.engine.abort(request.request_id)

    @rule(data=st.data())
    @precondition(lambda self: len(self.scheduler.outsiders) < 2)
    def have_somebody_else_hold_what_a_sequence_holds(self, data):
        tables = [sequence.table for sequence in decoding(self.scheduler) if sequence.table.blocks]
        if tables and self.scheduler.allocator.num_free_blocks > 4:
            self.scheduler.outsiders.append(data.draw(st.sampled_from(tables)).fork("somebody else"))
            self.admitted = False

    @rule()
    def have_somebody_else_give_up(self):
        give_blocks_back(self.scheduler)
        self.scheduler.outsiders.clear()

    @rule(when=st.sampled_from(["before", "after"]))
    @precondition(lambda self: self.scheduler.has_unfinished)
    def fail(self, when):
        self.have_somebody_else_give_up()
        self.engine.runner.fail = {len(self.engine.runner.schedules) + 1: (RuntimeError("device"), when)}
        try:
            self.step()
        except RuntimeError:
            done["failures"] += 1
        self.engine.runner.fail = {}

    @rule(steps=st.integers(1, 4))
    def steps(self, steps):
        for _ in range(steps):
            self.step()

    def step(self, is_forced=False):
        counts, before = CopyCounts(self.scheduler), len(self.engine.runner.schedules)
        running = self.scheduler.running
        try:
            self.outputs |= {output.request_id: output for output in self.engine.step()}
        finally:
            check(self.scheduler)
            for schedule in self.engine.runner.schedules[before:]:
                self.look_at(schedule, counts)
                if not is_forced:
                    self.check_order(schedule, running)
            self.admitted = any(request not in running for request in self.scheduler.running)

    def check_order(self, schedule, running):
        """The first one is never set back, and nobody in the step after an admission."""
        assert not running or running[0] not in schedule.preempted
        assert not (self.admitted and schedule.preempted)

    def look_at(self, schedule, counts):
        copies = num_copies(schedule)
        assert copies == counts.expected(schedule)
        done["copies"] += copies
        done["copies of blocks that come back"] += copies - len(schedule.copies)
        done["set back"] += len(schedule.preempted)
        self.exhausted |= {sequence.request.request_id for sequence in schedule.exhausted}
        done["groups resumed"] += sum(len(request.sequences) > 1 for request in schedule.resumed)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.have_somebody_else_give_up()
        for _ in range(2000):
            if not self.engine.has_unfinished:
                break
            self.step()
        check_all_free(self.scheduler)
        assert set(self.outputs) | self.taken_back == set(self.requests)
        for name, output in self.outputs.items():
            if name not in self.exhausted:
                self.compare(output, self.expected[name])
                done["compared"] += 1
        done["exhausted"] += len(self.exhausted)

    def compare(self, output, expected):
        if self.requests[output.request_id].beams is not None:
            assert_found(output, expected)
        else:
            assert [one.token_ids for one in output.outputs] == expected


EVENTS = ("compared", "copies", "copies of blocks that come back", "failures", "groups resumed", "set back")


def test_any_load_of_groups_ends_as_each_does_alone_and_copies_what_it_must():
    done.clear()
    run_state_machine_as_test(
        Groups,
        settings=settings(
            max_examples=150, stateful_step_count=30, derandomize=True, deadline=None, database=None
        ),
    )
    assert {event: done[event] for event in EVENTS if done[event] < 20} == {}
