"""One call of an LLM over an engine that makes its tokens up: who is refused, who is answered, and where."""

import itertools

import numpy as np
import pytest

from paged_jax import BlockAllocator, SamplingParams
from paged_jax.engine import Engine
from paged_jax.errors import InvalidArgument, InvalidPrompt, PoolTooSmall, PromptTooLong, TokenizerError
from paged_jax.llm_call import LLMCall, params_of_each, priorities_of_each
from paged_jax.schedule import Sampled
from paged_jax.scheduler import Scheduler

LIMIT = 16
THREE = SamplingParams(max_tokens=3)


class Letters:
    """A tokenizer whose ids are a = 1, b = 2, ..."""

    def encode(self, text):
        return [ord(char) - 96 for char in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(token + 96) for token in ids)


class Alphabet:
    """A runner that goes on with the alphabet."""

    block_bytes = 1

    def execute(self, schedule):
        return Sampled([sequence.token_ids[-1] % 26 + 1 for sequence in schedule.decode])

    def close(self):
        pass


@pytest.fixture
def engine():
    scheduler = Scheduler(
        BlockAllocator(64, 4), max_num_seqs=2, max_num_batched_tokens=64, max_prefill_seqs=2
    )
    engine = Engine(Alphabet(), scheduler, Letters(), vocab_size=27, max_model_len=LIMIT, eos_ids=[])
    yield engine
    engine.allocator.check([])
    assert not engine.has_unfinished


def same(prompt):
    return prompt


def make(engine, prompts, params=THREE, *, priority=0, on_error="raise", default=16):
    return LLMCall(
        engine,
        params_of_each(params, len(prompts), SamplingParams),
        priorities_of_each(priority, len(prompts)),
        default_max_tokens=default,
        on_error=on_error,
    )


def run(engine, prompts, *args, as_prompt=same, **options):
    call = make(engine, prompts, *args, **options)
    call.check(prompts, as_prompt, itertools.count())
    return call.run(use_tqdm=False)


def texts(outputs):
    return [output.outputs[0].text if output.outputs else None for output in outputs]


def test_the_answers_come_in_the_prompts_order_whatever_the_priorities(engine):
    params = [SamplingParams(max_tokens=n) for n in (3, 1, 2)]
    outputs = run(engine, ["a", "d", "h"], params, priority=[2, 1, 0])
    assert texts(outputs) == ["bcd", "e", "ij"]
    assert [output.request_id for output in outputs] == ["llm-0", "llm-1", "llm-2"]


def test_lower_priorities_go_first(engine):
    outputs = run(engine, ["a"] * 6, SamplingParams(max_tokens=1), priority=[5, 4, 3, 2, 1, 0])
    times = [output.metrics.finished_time for output in outputs]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3  # two at once


def test_none_are_answered_with_none(engine):
    assert run(engine, []) == []


BAD = {"prompt_token_ids": [99]}


def test_the_first_bad_prompt_is_named_and_nothing_is_queued(engine):
    with pytest.raises(InvalidPrompt, match=r"^prompt 1: prompt_token_ids\[0\]=99"):
        run(engine, ["a", BAD, "a" * LIMIT])
    assert not engine.has_unfinished
    assert engine.totals.steps == 0


def test_bad_prompts_may_be_returned_in_their_places(engine):
    outputs = run(engine, [BAD, "a", "a" * LIMIT, None, "d"], on_error="return")
    assert texts(outputs) == [None, "bcd", None, None, "efg"]
    assert [type(output.error) for output in outputs] == [
        *(InvalidPrompt, type(None), PromptTooLong, InvalidPrompt, type(None))
    ]
    assert str(outputs[2].error).startswith("prompt 2: the prompt has 16 tokens, expected 15")
    assert outputs[2].prompt == "a" * LIMIT
    assert all(output.finished for output in outputs)


def test_only_bad_prompts_run_nothing(engine):
    assert [str(output.error)[:9] for output in run(engine, [BAD, BAD], on_error="return")] == [
        *("prompt 0:", "prompt 1:")
    ]
    assert engine.totals.steps == 0


@pytest.fixture
def small(engine, monkeypatch):
    """A pool that refuses prompts of more than two tokens when they are queued."""
    add = engine.scheduler.add

    def refuses(request):
        if len(request.prompt_token_ids) > 2:
            raise PoolTooSmall("too small")
        add(request)

    monkeypatch.setattr(engine.scheduler, "add", refuses)
    return engine


def test_what_the_queue_refuses_is_named_and_the_others_are_taken_back(small):
    with pytest.raises(PoolTooSmall, match=r"^prompt 1: too small"):
        run(small, ["a", "abc", "b"])
    assert not small.has_unfinished
    assert small.totals.steps == 0


def test_what_the_queue_refuses_may_be_returned_in_its_place(small):
    outputs = run(small, ["abc", "a", "bcd", "b"], on_error="return")
    assert texts(outputs) == [None, "bcd", None, "cde"]
    assert [str(output.error) for output in outputs if output.error] == [
        *("prompt 0: too small", "prompt 2: too small")
    ]


def test_a_refusing_template_is_named_as_a_conversation(engine):
    def as_prompt(item):
        if item == "bad":
            raise TokenizerError("no such role")
        return item

    with pytest.raises(TokenizerError, match=r"^conversation 1: no such role"):
        run(engine, ["a", "bad", BAD], as_prompt=as_prompt)
    with pytest.raises(InvalidPrompt, match=r"^prompt 0: "):
        run(engine, [BAD, "bad"], as_prompt=as_prompt)
    outputs = run(engine, ["a", "bad"], as_prompt=as_prompt, on_error="return")
    assert texts(outputs) == ["bcd", None]
    assert str(outputs[1].error) == "conversation 1: no such role"


def test_any_other_error_is_raised_whatever_on_error_says(engine, monkeypatch):
    monkeypatch.setattr(engine, "add", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(engine, ["a"], on_error="return")


@pytest.mark.parametrize("on_error", ["ignore", None, True])
def test_on_error_is_checked(engine, on_error):
    with pytest.raises(InvalidArgument, match=r'^on_error=.*: expected "raise" or "return"'):
        run(engine, [], on_error=on_error)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_call_leaves_nothing_behind_but_other_peoples_requests(engine, monkeypatch, at):
    engine.add(engine.make_request("mine", "x", SamplingParams(max_tokens=9)))
    execute, calls = engine.runner.execute, itertools.count(1)

    def interrupted(schedule):
        if next(calls) == at:
            raise KeyboardInterrupt
        return execute(schedule)

    monkeypatch.setattr(engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, ["a", "b", "c"])
    assert [request.request_id for request in engine.scheduler.queues.by_id.values()] == ["mine"]
    engine.abort("mine")


def test_an_interrupt_between_two_requests_leaves_nothing_behind(engine, monkeypatch):
    add, calls = engine.add, itertools.count(1)

    def interrupted(request):
        add(request)
        if next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, ["a", "b", "c"])
    assert not engine.has_unfinished


# -- cut answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "default", "cut"),
    [
        (SamplingParams(), 3, 2),
        ([SamplingParams(), SamplingParams(max_tokens=3)], 3, 1),
        (SamplingParams(max_tokens=3), 3, 0),
        (SamplingParams(max_tokens=None), 3, 0),
        (SamplingParams(), None, 0),
        (SamplingParams(), 99, 0),  # the context ended them
        (SamplingParams(stop=["d", "k"]), 3, 0),
    ],
)
def test_answers_that_the_default_limit_cut_are_counted(engine, params, default, cut):
    call = make(
        engine,
        ["a", "h", BAD],
        [*params_of_each(params, 2, SamplingParams), SamplingParams()],
        on_error="return",
        default=default,
    )
    call.check(["a", "h", BAD], same, itertools.count())
    call.run(use_tqdm=False)
    warning = call.cut_answers()
    assert (warning.num_cut if warning else 0) == cut
    if warning:
        assert str(warning).startswith(f"{cut} of 2 answers were cut at the default max_tokens=3: pass")


# -- one for all, or one each ------------------------------------------------------------------------------


def test_parameters_are_one_for_all_or_one_each():
    one, other = SamplingParams(), SamplingParams(temperature=0)
    assert params_of_each(one, 2, SamplingParams) == [one, one]
    assert params_of_each([one, other], 2, SamplingParams) == [one, other]
    assert params_of_each((one, other), 2, SamplingParams) == [one, other]
    assert params_of_each([], 0, SamplingParams) == params_of_each(one, 0, SamplingParams) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"temperature": 0},
            "sampling_params={'temperature': 0}: expected a SamplingParams or a list of them",
        ),
        ("greedy", "sampling_params='greedy': expected a SamplingParams or a list of them"),
        (0, "sampling_params=0: expected"),
        ([SamplingParams(), None], "sampling_params[1]=None: expected a SamplingParams."),
        ([{"top_k": 1}] * 2, "sampling_params[0]={'top_k': 1}: expected a SamplingParams."),
        ([SamplingParams()], "1 sampling_params for 2 prompts: expected one, or one each"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
    ],
)
def test_wrong_parameters_are_refused(given, told):
    with pytest.raises(InvalidArgument) as caught:
        params_of_each(given, 2, SamplingParams)
    assert str(caught.value).startswith(told)


def test_priorities_are_one_for_all_or_one_each():
    assert priorities_of_each(-3, 2) == [-3, -3]
    assert priorities_of_each([1, np.int64(0)], 2) == priorities_of_each((1, 0), 2) == [1, 0]
    assert type(priorities_of_each(np.int8(1), 1)[0]) is int


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(
            (value, f"priority={value!r}: expected an integer or a list")
            for value in (None, True, 1.0, "1", {0})
        ),
        ([0, 1.0], "priority[1]=1.0: expected an integer."),
        ([True, 0], "priority[0]=True: expected an integer."),
        ([0], "1 priorities for 2 prompts: expected one, or one each"),
    ],
)
def test_wrong_priorities_are_refused(given, told):
    with pytest.raises(InvalidArgument) as caught:
        priorities_of_each(given, 2)
    assert str(caught.value).startswith(told)
