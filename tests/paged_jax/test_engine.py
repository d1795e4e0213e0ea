"""The engine around a runner that makes its tokens up: requests in, outputs out, nothing left behind."""

import dataclasses

import pytest

from paged_jax import BlockAllocator, SamplingParams
from paged_jax.audit import AuditLog
from paged_jax.engine import Engine
from paged_jax.errors import (
    EngineClosed,
    InvalidArgument,
    InvalidPrompt,
    InvalidSamplingParams,
    PoolTooSmall,
    PromptTooLong,
)
from paged_jax.schedule import Sampled
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import TokenLogprobs

EOS, LIMIT = 0, 32


class Letters:
    """A tokenizer whose ids are a = 1, b = 2, ...; 0 is special and gives no text."""

    def encode(self, text):
        return [ord(char) - 96 for char in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(token + 96) for token in ids if token != EOS)


class Alphabet:
    """A runner that goes on with the alphabet; `fail` is raised at the step of that number."""

    def __init__(self):
        self.steps = 0
        self.fail = {}
        self.closed = 0

    weight_bytes, block_bytes = 0, 100

    def execute(self, schedule):
        self.steps += 1
        if self.steps in self.fail:
            raise self.fail[self.steps]
        tokens = [self.next_token(sequence) for sequence in schedule.decode]
        return Sampled(tokens, [TokenLogprobs(token, -0.5, 1, [(token, -0.5)]) for token in tokens])

    def next_token(self, sequence):
        return sequence.token_ids[-1] % 26 + 1

    def close(self):
        self.closed += 1


def make_engine(*, num_blocks=64, block_size=4, budget=64, runner=None, seed=None, audit=None, vocab_size=27):
    scheduler = Scheduler(
        BlockAllocator(num_blocks, block_size, audit=audit),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_prefill_seqs=8,
    )
    return Engine(
        runner or Alphabet(),
        scheduler,
        Letters(),
        vocab_size=vocab_size,
        max_model_len=LIMIT,
        eos_ids=[EOS],
        seed=seed,
    )


def add(engine, name, prompt, *, streams=False, **params):
    engine.add(engine.make_request(name, prompt, SamplingParams(**params), streams=streams))


def run(engine):
    """The last output of each request, by id."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.allocator.check([])
    return outputs


def text_of(output):
    return output.outputs[0].text


# -- outputs -----------------------------------------------------------------------------------------------


def test_each_step_of_a_stream_gives_the_text_so_far():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=3, streams=True)
    seen = []
    while engine.has_unfinished:
        (output,) = engine.step()
        seen.append((text_of(output), output.finished, output.outputs[0].finish_reason))
    assert seen == [("d", False, None), ("de", False, None), ("def", True, "length")]
    assert engine.step() == []


def test_a_request_that_does_not_stream_is_put_out_when_it_is_done():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=3)
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]


def test_an_output_says_what_it_answers():
    engine = make_engine()
    add(engine, "t", "abc", max_tokens=1)
    add(engine, "i", {"prompt_token_ids": [1, 2]}, max_tokens=1)
    outputs = run(engine)
    assert (outputs["t"].prompt, outputs["t"].prompt_token_ids) == ("abc", [1, 2, 3])
    assert (outputs["i"].prompt, outputs["i"].prompt_token_ids) == (None, [1, 2])
    assert outputs["t"].outputs[0].token_ids == [4]
    assert outputs["t"].outputs[0].index == 0


def test_an_output_does_not_change_afterwards():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=3, streams=True)
    (first,) = engine.step()
    kept = dataclasses.asdict(first)["outputs"]
    run(engine)
    assert dataclasses.asdict(first)["outputs"] == kept


def test_outputs_come_in_the_order_of_the_rows():
    engine = make_engine()
    for name in "xyz":
        add(engine, name, "abc", max_tokens=2, streams=True)
    assert [output.request_id for output in engine.step()] == ["x", "y", "z"]


def test_metrics_are_in_the_order_of_events():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=3)
    metrics = run(engine)["r"].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    assert times == sorted(times)
    assert metrics.num_preemptions == 0
    assert metrics.num_output_tokens == 3
    assert metrics.time_to_first_token == pytest.approx(metrics.queue_time + metrics.prefill_time)
    assert metrics.inter_token_latency == pytest.approx(metrics.decode_time / 2)


# -- when it ends ------------------------------------------------------------------------------------------


class ThenEOS(Alphabet):
    """The alphabet up to z, then EOS."""

    def next_token(self, sequence):
        last = sequence.token_ids[-1]
        return EOS if last == 26 else last + 1


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"max_tokens": 9}, "yz", "stop"),
        ({"max_tokens": 2}, "yz", "length"),
        ({"max_tokens": 3}, "yz", "stop"),
        ({"max_tokens": 6, "ignore_eos": True}, "yzabc", "length"),
        ({"max_tokens": 9, "stop_token_ids": [26]}, "yz", "stop"),
        ({"max_tokens": 9, "stop_token_ids": [25, 26]}, "y", "stop"),
        ({"max_tokens": 9, "stop_token_ids": [2], "ignore_eos": True}, "yzab", "stop"),
        ({"max_tokens": 9, "stop_token_ids": [24]}, "yz", "stop"),  # in the prompt only
        ({"max_tokens": 1, "stop_token_ids": [25]}, "y", "stop"),
    ],
)
def test_it_ends_at_an_end_token_or_at_the_limit(params, text, reason):
    engine = make_engine(runner=ThenEOS())
    add(engine, "r", "vwx", **params)
    completion = run(engine)["r"].outputs[0]
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_the_end_token_is_among_the_ids_and_not_in_the_text():
    engine = make_engine(runner=ThenEOS())
    add(engine, "r", "z", max_tokens=5)
    completion = run(engine)["r"].outputs[0]
    assert (completion.token_ids, completion.text) == ([EOS], "")


@pytest.mark.parametrize(
    ("given", "tokens"), [({}, 16), ({"max_tokens": None}, 29), ({"max_tokens": 999}, 29)]
)
def test_max_tokens_is_16_unless_given_and_ends_with_the_context(given, tokens):
    engine = make_engine()
    add(engine, "r", "abc", **given)
    completion = run(engine)["r"].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, "length")


@pytest.mark.parametrize(
    ("params", "text", "reason", "stop_reason"),
    [
        ({"stop": ["ef"]}, "d", "stop", "ef"),
        ({"stop": ["ef"], "include_stop_str_in_output": True}, "def", "stop", "ef"),
        ({"stop": ["ghij", "fg"]}, "de", "stop", "fg"),
        ({"stop": ["fg"], "min_tokens": 5}, "defghijklm", "length", None),
        ({"stop": ["i"], "min_tokens": 5}, "defgh", "stop", "i"),
        ({"stop": ["m"]}, "defghijkl", "stop", "m"),  # completed by the last token there may be
        ({"stop": ["mn"]}, "defghijklm", "length", None),  # what was held back comes out at the end
        ({"stop_token_ids": [6]}, "def", "stop", 6),
        ({"stop_token_ids": [6], "min_tokens": 2}, "def", "stop", 6),
        ({"stop_token_ids": [6], "stop": ["f"]}, "de", "stop", "f"),
    ],
)
def test_stop_strings_and_ids_end_it_and_say_so(params, text, reason, stop_reason):
    engine = make_engine()
    add(engine, "r", "abc", **{"max_tokens": 10} | params)
    completion = run(engine)["r"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)


def test_text_that_may_become_a_stop_string_is_not_shown():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=4, stop=["efx"], streams=True)
    assert [text_of(engine.step()[0]) for _ in range(4)] == ["d", "d", "d", "defg"]


def test_logprobs_come_for_each_token_where_they_are_wanted():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=2, logprobs=1)
    add(engine, "s", "abc", max_tokens=2)
    outputs = run(engine)
    completion = outputs["r"].outputs[0]
    assert [list(token) for token in completion.logprobs] == [[4], [5]]
    assert completion.logprobs[0][4].decoded_token == "d"
    assert completion.cumulative_logprob == -1.0
    assert (outputs["s"].outputs[0].logprobs, outputs["s"].outputs[0].cumulative_logprob) == (None, None)


def test_min_tokens_takes_as_many_end_tokens_as_the_device_can_hold_back():
    engine = make_engine(vocab_size=100)
    ids = list(range(1, 64))
    engine.make_request("r", "abc", SamplingParams(min_tokens=1, stop_token_ids=ids))  # and the model's own
    with pytest.raises(InvalidSamplingParams, match=r"65 end ids .*: expected 64 at most"):
        engine.make_request("r", "abc", SamplingParams(min_tokens=1, stop_token_ids=[*ids, 64]))
    engine.make_request("r", "abc", SamplingParams(stop_token_ids=[*ids, 64]))


def test_the_caller_chooses_what_stands_in_for_max_tokens():
    engine = make_engine()
    engine.add(engine.make_request("r", "abc", SamplingParams(), default_max_tokens=None))
    assert len(run(engine)["r"].outputs[0].token_ids) == 29


# -- requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, LIMIT - 2, LIMIT - 1])
def test_a_prompt_that_leaves_room_is_taken(length):
    engine = make_engine()
    add(engine, "r", "a" * length, max_tokens=None)
    output = run(engine)["r"]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == LIMIT


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("a" * LIMIT, PromptTooLong),
        ("a" * (LIMIT + 1), PromptTooLong),
        ("", InvalidPrompt),
        ({"prompt_token_ids": [27]}, InvalidPrompt),
        ({"prompt_token_ids": [-1]}, InvalidPrompt),
        (None, InvalidPrompt),
    ],
)
def test_a_refused_prompt_leaves_nothing_behind(prompt, error):
    engine = make_engine()
    with pytest.raises(error):
        add(engine, "r", prompt)
    assert not engine.has_unfinished
    engine.allocator.check([])
    add(engine, "r", "abc", max_tokens=1)
    assert text_of(run(engine)["r"]) == "d"


def test_a_request_that_can_never_fit_is_refused_with_numbers_and_blocks_nobody():
    engine = make_engine(num_blocks=5, block_size=4)
    with pytest.raises(PoolTooSmall, match=r"17 tokens need 5 blocks .* has 4: raise num_blocks to 6"):
        add(engine, "r", "a" * 17)
    add(engine, "s", "a" * 16, max_tokens=9)
    completion = run(engine)["s"].outputs[0]
    assert (completion.text, completion.finish_reason) == ("b", "length")


def test_making_a_request_queues_and_allocates_nothing():
    engine = make_engine()
    engine.make_request("r", "abc", SamplingParams())
    assert not engine.has_unfinished
    engine.allocator.check([])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("", {}),
        (5, {}),
        (None, {}),
        ("r", {"priority": "high"}),
        ("r", {"priority": 1.5}),
        ("r", {"params": 3}),
    ],
)
def test_a_request_of_the_wrong_type_is_refused_and_leaves_nothing_behind(name, options):
    engine = make_engine()
    params = options.pop("params", SamplingParams())
    with pytest.raises(InvalidArgument, match=r"(request_id|priority|params)="):
        engine.add(engine.make_request(name, "abc", params, **options))
    assert not engine.has_unfinished


def test_an_id_is_in_use_until_its_request_has_ended():
    engine = make_engine()
    add(engine, "r", "abc", max_tokens=2)
    with pytest.raises(InvalidArgument, match="request_id='r': expected an id that no unfinished"):
        add(engine, "r", "xyz")
    assert text_of(run(engine)["r"]) == "de"
    add(engine, "r", "xyz", max_tokens=1)
    engine.abort("r")
    add(engine, "r", "abc", max_tokens=1)
    assert text_of(run(engine)["r"]) == "d"


def test_unseeded_requests_draw_seeds_of_their_own_and_seeded_ones_keep_theirs():
    engine = make_engine()
    drawn = {engine.make_request("r", "a", SamplingParams()).seed for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert engine.make_request("r", "a", SamplingParams(seed=5)).seed == 5


def test_an_engines_seed_makes_the_drawn_ones_repeatable():
    def drawn(seed):
        engine = make_engine(seed=seed)
        return [engine.make_request("r", "a", SamplingParams()).seed for _ in range(5)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(0) == drawn(0) != drawn(None) != drawn(None)


# -- abort, failure, close ---------------------------------------------------------------------------------


def test_abort_amid_an_answer_leaves_the_others_alone():
    engine = make_engine()
    add(engine, "x", "abc", max_tokens=5)
    add(engine, "y", "def", max_tokens=5)
    engine.step()
    for _ in range(2):
        engine.abort("x")
    engine.abort("nobody")
    outputs = run(engine)
    assert set(outputs) == {"y"}
    assert text_of(outputs["y"]) == "ghijk"


def test_an_abort_while_a_step_is_on_its_way_drops_the_token():
    class AbortsItself(Alphabet):
        def execute(self, schedule):
            engine.abort("x")
            return super().execute(schedule)

    engine = make_engine(runner=AbortsItself())
    add(engine, "x", "abc", max_tokens=5)
    add(engine, "y", "def", max_tokens=1)
    assert [output.request_id for output in engine.step()] == ["y"]
    assert not engine.has_unfinished
    engine.allocator.check([])


@pytest.mark.parametrize("error", [RuntimeError("device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_after_a_failed_step_the_answers_are_the_same(error, at):
    """Whatever the failed step left in the blocks, it is computed again."""
    engine = make_engine(budget=4)
    engine.runner.fail = {at: error}
    add(engine, "x", "abcdef", max_tokens=5)
    add(engine, "y", "b", max_tokens=5)
    outputs = {}
    for _ in range(at - 1):
        outputs |= {output.request_id: output for output in engine.step()}
    with pytest.raises(type(error)):
        engine.step()
    engine.allocator.check([])
    outputs |= run(engine)
    assert [text_of(outputs[name]) for name in "xy"] == ["ghijk", "cdefg"]


def test_preempted_requests_answer_the_same():
    engine = make_engine(num_blocks=9, block_size=4)
    prompts = {name: name * 3 for name in "abcdefgh"}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=20)
    outputs = run(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    alone = make_engine()
    for name, prompt in prompts.items():
        add(alone, name, prompt, max_tokens=20)
    assert {name: text_of(o) for name, o in outputs.items()} == {n: text_of(o) for n, o in run(alone).items()}


def test_a_closed_engine_holds_nothing_and_says_that_it_is_closed():
    engine = make_engine()
    add(engine, "x", "abc")
    request = engine.make_request("y", "abc", SamplingParams())
    engine.step()
    engine.close()
    engine.allocator.check([])
    assert not engine.has_unfinished
    assert engine.runner.closed == 1
    for call in (
        engine.step,
        lambda: engine.add(request),
        lambda: engine.make_request("z", "abc", SamplingParams()),
    ):
        with pytest.raises(EngineClosed, match=r"closed.*make a new LLM"):
            call()
    engine.abort("x")
    engine.close()


# -- what it tells -----------------------------------------------------------------------------------------


def test_the_audit_log_numbers_its_records_by_step():
    audit = AuditLog()
    engine = make_engine(audit=audit)
    add(engine, "r", "abcd", max_tokens=3)
    run(engine)
    told = [(record.step, record.action, record.owner) for record in audit]
    assert told == [
        (0, "arrive", "r"),
        *[(1, "allocate", "r"), (1, "write", "r"), (1, "write", "r")],
        *[(2, "allocate", "r"), (2, "write", "r")],
        *[(3, "write", "r"), (3, "free", "r"), (3, "free", "r"), (3, "end", "r")],
    ]


def test_the_last_step_is_told_in_numbers():
    engine = make_engine()
    assert engine.last_step is None
    assert engine.block_utilization == 1.0
    add(engine, "r", "abc", max_tokens=3)
    engine.step()
    assert (engine.last_step.prefill_tokens, engine.last_step.blocks.stored_tokens) == (2, 3)
    assert engine.block_utilization == 0.75
    engine.step()
    assert (engine.last_step.prefill_tokens, engine.last_step.blocks.stored_tokens) == (0, 4)
    assert engine.block_utilization == 1.0
    assert len(engine.last_step.latencies.inter_token) == 1
    assert (engine.totals.steps, engine.totals.generated_tokens, engine.totals.prefill_tokens) == (2, 2, 2)
