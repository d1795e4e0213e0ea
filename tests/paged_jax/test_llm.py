"""LLM over small models: the same answers whatever shares the batch, the pool or the call."""

import dataclasses
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.checkpoints import tiny_config, tiny_vocab, write_hf, write_json

from paged_jax import LLM, SamplingParams, errors
from paged_jax.audit import AuditLog
from paged_jax.memory_report import MemorySnapshot

from .conftest import TINY, load

EOS = tiny_vocab().index("</s>")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    "a",
    "Hello there",
    "The sea is",
    "1 2 3 4 5 6 7 8",
    "é",
    "Once upon a time there was a",
    "x" * 40,
    "Why",
]
PAST_ONE_BUCKET = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)


def ids_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def alone(llm, prompts, params):
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [
        ids_of(llm.generate(prompt, own, use_tqdm=False))[0]
        for prompt, own in zip(prompts, each, strict=True)
    ]


def generate(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_unused(llm)
    return outputs


def assert_unused(llm):
    llm.engine.allocator.check([])
    assert llm.engine.allocator.num_free_blocks == llm.engine.allocator.num_blocks - 1
    assert not llm.engine.has_unfinished


# -- the same answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "glass"])
def test_greedy_answers_are_the_same_batched_and_alone(model, request):
    llm = request.getfixturevalue(model)
    assert ids_of(generate(llm, PROMPTS)) == alone(llm, PROMPTS, GREEDY)


@pytest.mark.parametrize("block_size", [1, 3])
def test_the_block_size_changes_nothing(block_size, tiny, tiny_path):
    with load(tiny_path, block_size=block_size) as llm:
        assert ids_of(generate(llm, PROMPTS[:4])) == ids_of(generate(tiny, PROMPTS[:4]))


def test_a_pool_far_too_small_sets_back_and_changes_nothing(tiny, tiny_path):
    """16 usable blocks of 4 hold one longest sequence; here are 24 requests, and draws show every slip."""
    prompts = [f"{prompt} {i}" for i in range(3) for prompt in PROMPTS]
    params = [SamplingParams(top_k=50, seed=i, max_tokens=20) for i in range(len(prompts))]
    with load(tiny_path, num_blocks=17) as llm:
        outputs = generate(llm, prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert ids_of(outputs) == ids_of(generate(tiny, prompts, params))


def test_a_prompt_in_pieces_answers_the_same(tiny, tiny_path):
    with load(tiny_path, max_num_batched_tokens=8) as llm:
        assert ids_of(generate(llm, PROMPTS[3:7])) == ids_of(generate(tiny, PROMPTS[3:7]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_run_and_answer_the_same_batched_and_alone(dtype, tiny_path):
    with load(tiny_path, dtype=dtype, max_num_seqs=8) as llm:
        assert {leaf.dtype.name for leaf in llm.engine.runner._step.leaves} == {dtype, "float32"}  # norms
        assert ids_of(generate(llm, PROMPTS)) == alone(llm, PROMPTS, GREEDY)


def test_outputs_come_in_the_prompts_order_though_they_end_in_another(tiny):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = generate(tiny, ["one", "two", "three"], params)
    assert [output.prompt for output in outputs] == ["one", "two", "three"]
    assert [len(ids) for ids in ids_of(outputs)] == [9, 1, 5]


def test_text_and_ids_are_the_same_prompt(tiny):
    ids = tiny.tokenizer.encode("Hello")
    prompts = ["Hello", {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}]
    outputs = generate(tiny, prompts)
    assert len({tuple(answer) for answer in ids_of(outputs)}) == 1
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}


def test_the_text_of_an_answer_is_that_of_its_ids(glass):
    for output in generate(glass, ["Once upon a time", "The King said"]):
        completion = output.outputs[0]
        assert completion.text == glass.tokenizer.decode(completion.token_ids)
        assert len(completion.text) > 5


# -- sampling ----------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_in_any_batch_and_call(tiny):
    params = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=8, top_k=(0, 40)[i % 2], top_p=(1, 0.9)[i % 2])
        for i in range(len(PROMPTS))
    ]
    together = ids_of(generate(tiny, PROMPTS, params))
    assert together == ids_of(generate(tiny, PROMPTS, params))
    assert together == alone(tiny, PROMPTS, params)
    assert together[::-1] == ids_of(generate(tiny, PROMPTS[::-1], params[::-1]))


def test_another_seed_draws_otherwise(tiny):
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=8, ignore_eos=True) for i in range(6)]
    assert len({tuple(ids) for ids in ids_of(generate(tiny, ["a"] * 6, params))}) == 6


def test_without_a_seed_every_request_of_every_call_draws_its_own(tiny):
    answers = [*ids_of(generate(tiny, ["a"] * 3, PAST_ONE_BUCKET))]
    answers += ids_of(generate(tiny, ["a"] * 3, PAST_ONE_BUCKET))
    assert len({tuple(ids) for ids in answers}) == 6


def test_an_llms_seed_makes_unseeded_requests_repeatable(tiny_path):
    def answers(seed):
        with load(tiny_path, seed=seed) as llm:
            return [ids_of(generate(llm, ["a"] * 2, PAST_ONE_BUCKET)) for _ in range(2)]

    first, other = answers(1), answers(2)
    assert first == answers(1)
    assert first != other
    assert first[0] != first[1]


def test_greedy_rows_beside_drawn_ones_stay_greedy(tiny):
    mixed = [GREEDY, SamplingParams(temperature=2.0, top_p=0.9, max_tokens=12, ignore_eos=True)] * 2
    outputs = ids_of(generate(tiny, ["Hello"] * 4, mixed))
    assert outputs[0] == outputs[2] == alone(tiny, ["Hello"], GREEDY)[0]
    assert outputs[1] != outputs[3]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-300}, {"temperature": 1e-300}])
def test_the_narrowest_sampling_is_greedy(fields, tiny):
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | fields)
    assert ids_of(generate(tiny, PROMPTS[:4], params)) == ids_of(generate(tiny, PROMPTS[:4]))


def test_the_widest_sampling_is_no_error(tiny):
    params = SamplingParams(temperature=1e300, top_k=10**12, max_tokens=8, ignore_eos=True, seed=1)
    (ids,) = ids_of(generate(tiny, "a", params))
    assert len(set(ids)) > 4
    assert all(0 <= token < len(tiny_vocab()) for token in ids)


# -- where it ends -----------------------------------------------------------------------------------------


def test_generate_answers_16_tokens_and_says_when_it_cut(tiny):
    params = SamplingParams(temperature=0, ignore_eos=True)
    with pytest.warns(UserWarning, match="2 of 2 answers were cut at the default max_tokens=16") as caught:
        outputs = generate(tiny, ["a", "b"], params)
    assert [len(ids) for ids in ids_of(outputs)] == [16, 16]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("max_tokens", [3, None])
def test_a_limit_that_was_asked_for_is_no_warning(max_tokens, tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(tiny, "a", SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))


def test_no_limit_goes_on_to_the_end_of_the_context(tiny):
    (output,) = generate(tiny, "a", SamplingParams(temperature=0, ignore_eos=True, max_tokens=None))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    assert output.outputs[0].finish_reason == "length"


def test_an_end_token_stops_and_counts_and_is_not_shown(tiny):
    (ids,) = ids_of(generate(tiny, "Hello"))
    stop = ids[5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    (output,) = generate(tiny, "Hello", params)
    assert list(output.outputs[0].token_ids) == ids[: ids.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_the_models_own_end_token_stops_unless_ignored(tiny):
    """Drawn almost evenly from 268 tokens, the end comes within the context for some of many seeds."""
    params = [SamplingParams(temperature=100.0, seed=seed, max_tokens=None) for seed in range(24)]
    stopped = [o.outputs[0] for o in generate(tiny, ["a"] * 24, params)]
    ended = [completion for completion in stopped if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids.index(EOS) == len(completion.token_ids) - 1
    assert all(EOS not in c.token_ids for c in stopped if c.finish_reason == "length")
    seed = next(i for i, c in enumerate(stopped) if c.finish_reason == "stop")
    on = SamplingParams(temperature=100.0, seed=seed, max_tokens=None, ignore_eos=True)
    (ids,) = ids_of(generate(tiny, "a", on))
    assert ids[: len(stopped[seed].token_ids)] == list(stopped[seed].token_ids)
    assert len(ids) == 62


LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_a_stop_string_ends_the_answer_and_is_cut_off(glass):
    (plain,) = generate(glass, "Once upon a time", LONG)
    text = plain.outputs[0].text
    stop = text[20:26]
    for include in (False, True):
        params = dataclasses.replace(LONG, stop=["not there", stop], include_stop_str_in_output=include)
        (output,) = generate(glass, "Once upon a time", params)
        (completion,) = output.outputs
        begin = text.index(stop)
        assert completion.text == text[: begin + len(stop) * include]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        ids = plain.outputs[0].token_ids
        assert completion.token_ids == ids[: len(completion.token_ids)]
        assert stop in glass.tokenizer.decode(completion.token_ids)
        assert stop not in glass.tokenizer.decode(completion.token_ids[:-1])


def test_stop_strings_are_the_same_batched_and_alone(glass):
    params = [dataclasses.replace(LONG, stop=stop) for stop in ([], ["a"], ["the", " t"], ["\n"])]
    prompts = ["Once upon a time"] * 4
    together = generate(glass, prompts, params)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        assert generate(glass, prompt, own)[0].outputs == output.outputs
    assert len({output.outputs[0].text for output in together}) > 1


def test_min_tokens_keep_stop_strings_from_ending_it(glass):
    (plain,) = generate(glass, "Once upon a time", LONG)
    ids = plain.outputs[0].token_ids
    stop = plain.outputs[0].text[0]
    for least in (1, 5, 20):
        params = dataclasses.replace(LONG, stop=stop, min_tokens=least)
        completion = generate(glass, "Once upon a time", params)[0].outputs[0]
        assert len(completion.token_ids) > least
        kept = glass.tokenizer.decode(ids[:least])
        assert completion.text.startswith(kept)
        assert stop not in completion.text[len(kept) :]


def test_min_tokens_keep_end_tokens_from_being_drawn(tiny):
    """Drawn almost evenly from 268 tokens, of which 60 end it."""
    ends = [token for token in range(4, 64) if token != EOS]
    for least in (0, 6):
        params = [
            SamplingParams(temperature=100.0, seed=seed, max_tokens=30, min_tokens=least, stop_token_ids=ends)
            for seed in range(24)
        ]
        completions = [output.outputs[0] for output in generate(tiny, ["a"] * 24, params)]
        assert all(set(c.token_ids[:least]).isdisjoint([*ends, EOS]) for c in completions)
        stopped = [c for c in completions if c.finish_reason == "stop"]
        assert min(len(c.token_ids) for c in stopped) == least + 1  # some of 24 end at once when they may
        assert all(c.stop_reason == (None if c.token_ids[-1] == EOS else c.token_ids[-1]) for c in stopped)


def test_too_many_end_tokens_for_min_tokens_are_refused(tiny):
    params = SamplingParams(min_tokens=1, stop_token_ids=range(100))
    with pytest.raises(errors.InvalidArgument, match=r"^prompt 0: min_tokens=1 .* 64"):
        generate(tiny, "a", params)


def test_min_tokens_above_the_default_limit_are_refused_in_generate_alone(tiny):
    params = SamplingParams(temperature=0, min_tokens=17, ignore_eos=True)
    with pytest.raises(errors.InvalidArgument, match=r"^prompt 0: min_tokens=17: .* default max_tokens=16"):
        generate(tiny, "a", params)
    assert len(tiny.chat(HELLO, params, use_tqdm=False)[0].outputs[0].token_ids) > 17


# -- log-probabilities -------------------------------------------------------------------------------------


def test_logprobs_are_given_where_they_were_asked_for(tiny):
    params = [dataclasses.replace(GREEDY, logprobs=k) for k in (None, 0, 3)]
    none, chosen, three = (output.outputs[0] for output in generate(tiny, ["Hello"] * 3, params))
    assert (none.logprobs, none.cumulative_logprob) == (None, None)
    assert none.token_ids == chosen.token_ids == three.token_ids
    for completion, k in ((chosen, 1), (three, 3)):
        assert [len(entries) for entries in completion.logprobs] == [k] * 12
        of_chosen = [e[t] for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert {one.rank for one in of_chosen} == {1}
        assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in of_chosen))
    for entries in three.logprobs:
        values = [one.logprob for one in entries.values()]
        assert values == sorted(values, reverse=True)
        assert [one.rank for one in entries.values()] == [1, 2, 3]
        assert sum(np.exp(values)) <= 1
    first = next(iter(three.logprobs[0].items()))
    assert first[1].decoded_token == tiny.tokenizer.decode([first[0]], skip_special_tokens=False)


def test_a_drawn_token_is_among_its_logprobs_with_its_rank(tiny):
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    completion = generate(tiny, "Hello", params)[0].outputs[0]
    ranks = [e[t].rank for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert max(ranks) > 2
    for rank, entries in zip(ranks, completion.logprobs, strict=True):
        assert len(entries) == (2 if rank <= 2 else 3)


# -- parameters --------------------------------------------------------------------------------------------


def test_parameters_one_each_or_one_for_all(tiny):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2)]
    assert [len(ids) for ids in ids_of(generate(tiny, ["a", "b"], params))] == [1, 2]
    assert [len(ids) for ids in ids_of(generate(tiny, ["a", "b"], tuple(params)))] == [1, 2]
    assert [len(ids) for ids in ids_of(generate(tiny, ["a", "b"], params[0]))] == [1, 1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_of_parameters_of_another_length_is_refused(count, tiny):
    with pytest.raises(errors.InvalidArgument, match=f"{count} sampling_params for 2 prompts"):
        generate(tiny, ["a", "b"], [GREEDY] * count)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, "greedy", 0])
def test_parameters_of_another_type_are_refused(params, tiny):
    with pytest.raises(errors.InvalidArgument, match="expected a SamplingParams or a list of them"):
        generate(tiny, ["a", "b"], params)


@pytest.mark.parametrize("params", [[GREEDY, None], [GREEDY, {"top_k": 1}]])
def test_one_of_another_type_is_named_by_its_index(params, tiny):
    with pytest.raises(
        errors.InvalidArgument, match=r"^sampling_params\[1\]=.*: expected a SamplingParams\."
    ):
        generate(tiny, ["a", "b"], params)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"temperature": 0}),
        ({"temperature": 0.5, "top_k": 7}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.5}, {"temperature": 0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9},
            {"temperature": 0.5, "top_k": 7, "top_p": 0.9},
        ),
    ],
)
def test_the_default_is_the_publishers_sampling_if_it_says_so_otherwise_greedy(
    generation, expected, tmp_path
):
    write_hf(tmp_path, tiny_config(**TINY), generation=generation)
    with load(tmp_path) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**expected)


def test_explicit_parameters_apply_as_written_and_none_means_the_default(tiny, monkeypatch):
    recommended = SamplingParams(temperature=0, max_tokens=2)
    monkeypatch.setattr(tiny, "get_default_sampling_params", lambda: recommended)
    asked = []
    make_request = tiny.engine.make_request
    monkeypatch.setattr(
        tiny.engine,
        "make_request",
        lambda name, prompt, params, **rest: (
            asked.append(params) or make_request(name, prompt, params, **rest)
        ),
    )
    explicit = SamplingParams(max_tokens=1)
    tiny.generate("a", explicit, use_tqdm=False)
    tiny.generate("a", use_tqdm=False)
    assert asked == [explicit, recommended]


# -- prompts -----------------------------------------------------------------------------------------------


def test_no_prompts_are_no_outputs(tiny):
    assert generate(tiny, []) == []


def test_one_bad_prompt_of_many_is_named_and_none_runs(tiny):
    bad = [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [len(tiny_vocab())]},
        "x" * 64,
        None,
        "\ud83d",
    ]
    for prompt in bad:
        with pytest.raises(errors.InvalidPrompt, match=r"^prompt 2: "):
            tiny.generate(["a", "b", prompt, "c"], GREEDY, use_tqdm=False)
        assert_unused(tiny)
    with pytest.raises(errors.PromptTooLong, match=r"^prompt 0: "):
        tiny.generate("x" * 64, GREEDY, use_tqdm=False)


def test_a_prompt_may_be_as_long_as_the_context_less_one(tiny):
    text = "x" * 62  # and the BOS
    (output,) = generate(tiny, text)
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (63, 1)
    with pytest.raises(errors.PromptTooLong, match="has 64 tokens, expected 63 at most"):
        generate(tiny, text + "x")


@pytest.mark.parametrize("more", [0, 1])
def test_a_prompt_longer_than_that_is_refused(more, tiny):
    with pytest.raises(errors.PromptTooLong, match=f"has {64 + more} tokens, expected 63 at most"):
        generate(tiny, {"prompt_token_ids": [5] * (64 + more)})


def test_bad_prompts_may_be_returned_among_the_answers(tiny):
    prompts = ["Hello", {"prompt_token_ids": []}, "x" * 64, "Why"]
    outputs = tiny.generate(prompts, GREEDY, on_error="return", use_tqdm=False)
    assert_unused(tiny)
    assert [output.error and str(output.error)[:9] for output in outputs] == [
        *(None, "prompt 1:", "prompt 2:", None)
    ]
    assert [outputs[1].outputs, outputs[2].outputs] == [[], []]
    assert ids_of([outputs[0], outputs[3]]) == ids_of(generate(tiny, ["Hello", "Why"]))


def test_bad_conversations_may_be_returned_among_the_answers(tiny):
    outputs = tiny.chat([[{"role": "user"}], HELLO], GREEDY, on_error="return", use_tqdm=False)
    assert isinstance(outputs[0].error, errors.TokenizerError)
    assert str(outputs[0].error).startswith("conversation 0: ")
    assert ids_of(outputs[1:]) == ids_of(tiny.chat(HELLO, GREEDY, use_tqdm=False))


def test_a_prompt_in_a_dict_is_the_same_prompt_whatever_its_salt(tiny):
    prompts = ["Hello", {"prompt": "Hello"}, {"prompt": "Hello", "cache_salt": "mine"}]
    outputs = generate(tiny, prompts)
    assert len({tuple(answer) for answer in ids_of(outputs)}) == 1
    assert {output.prompt for output in outputs} == {"Hello"}


def test_prompts_of_another_salt_share_no_cached_block(tiny_path):
    text = "The same beginning"
    with load(tiny_path) as llm:
        cached = [
            generate(llm, {"prompt": text} | salt)[0].num_cached_tokens
            for salt in ({}, {"cache_salt": "a"}, {}, {"cache_salt": "a"}, {"cache_salt": "b"})
        ]
    assert cached[0] == cached[1] == cached[4] == 0
    assert cached[2] == cached[3] > 0


# -- priorities --------------------------------------------------------------------------------------------


def test_lower_priorities_are_answered_first_and_the_order_of_the_outputs_stays(tiny):
    prompts = [str(i) for i in range(8)]
    outputs = tiny.generate(prompts, GREEDY, priority=[7, 6, 5, 4, 3, 2, 1, 0], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    times = [output.metrics.finished_time for output in outputs]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert ids_of(outputs) == ids_of(generate(tiny, prompts))


@pytest.mark.parametrize(
    ("priority", "told"),
    [("1", "priority='1'"), ([0, 1.5], r"priority\[1\]=1.5"), ([0], "1 priorities for 2")],
)
def test_priorities_that_are_none_are_refused(priority, told, tiny):
    with pytest.raises(errors.InvalidArgument, match=told):
        tiny.generate(["a", "b"], GREEDY, priority=priority, use_tqdm=False)
    with pytest.raises(errors.InvalidArgument, match=told):
        tiny.chat([HELLO, HELLO], GREEDY, priority=priority, use_tqdm=False)


# -- chat --------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]


def test_chat_goes_through_the_template_with_one_bos(tiny):
    (output,) = tiny.chat(HELLO, GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert list(output.prompt_token_ids) == tiny.tokenizer.encode(output.prompt)
    assert output.prompt_token_ids.count(tiny_vocab().index("<s>")) == 1
    assert ids_of([output]) == ids_of(generate(tiny, output.prompt))


def test_generate_puts_a_bos_in_front_of_text_and_none_in_front_of_ids(tiny):
    bos = tiny_vocab().index("<s>")
    outputs = generate(tiny, ["a", "<s>a", {"prompt_token_ids": [3]}])
    assert [output.prompt_token_ids.count(bos) for output in outputs] == [1, 1, 0]


def test_chat_answers_several_conversations_at_once(tiny):
    other = [{"role": "system", "content": "Be brief."}, *HELLO]
    outputs = tiny.chat([HELLO, other], GREEDY, use_tqdm=False)
    assert ids_of(outputs) == [ids_of(tiny.chat(c, GREEDY, use_tqdm=False))[0] for c in (HELLO, other)]


def test_a_chat_may_go_on_to_the_end_of_the_context_without_a_warning(tiny):
    params = SamplingParams(temperature=0, ignore_eos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (output,) = tiny.chat(HELLO, params, use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64


@pytest.mark.parametrize(
    "messages",
    [
        *([], [[]], "Hello", HELLO[0], None, [HELLO, []], ["Hello"]),
        *([{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 3}], [*HELLO, HELLO]),
    ],
)
def test_messages_that_are_none_are_refused(messages, tiny):
    with pytest.raises((errors.InvalidPrompt, errors.TokenizerError)):
        tiny.chat(messages, GREEDY, use_tqdm=False)
    assert_unused(tiny)


def test_a_bad_conversation_of_many_is_named(tiny):
    with pytest.raises(errors.TokenizerError, match=r"^conversation 1: messages\[0\]\['content'\]"):
        tiny.chat([HELLO, [{"role": "user"}]], GREEDY, use_tqdm=False)


def test_a_model_without_a_template_can_not_chat_but_generate(glass):
    with pytest.raises(errors.TokenizerError, match="no chat template"):
        glass.chat(HELLO, GREEDY, use_tqdm=False)


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_an_error_amid_generate_leaves_the_pool_empty_and_the_llm_usable(error, at, tiny, monkeypatch):
    before = ids_of(generate(tiny, PROMPTS))
    execute, calls = tiny.engine.runner.execute, []

    def fails(schedule):
        calls.append(1)
        if len(calls) == at:
            raise error
        return execute(schedule)

    monkeypatch.setattr(tiny.engine.runner, "execute", fails)
    with pytest.raises(type(error)):
        tiny.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_unused(tiny)
    assert ids_of(generate(tiny, PROMPTS)) == before


def test_other_requests_go_on_after_a_call_that_failed(tiny, monkeypatch):
    """They had been queued by hand; the failed step is theirs as well."""
    (expected,) = ids_of(generate(tiny, "Hello"))
    engine = tiny.engine
    engine.add(engine.make_request("mine", "Hello", GREEDY))
    engine.step()
    engine.step()
    monkeypatch.setattr(engine.runner, "execute", lambda schedule: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert ids_of(ended) == [expected]
    assert_unused(tiny)


def test_a_closed_llm_gives_its_memory_back_and_says_that_it_is_closed(tiny_path):
    llm = load(tiny_path)
    arrays = [*llm.engine.runner._step.leaves, *(array for pool in llm.engine.runner.cache for array in pool)]
    with llm:
        pass
    assert all(array.is_deleted() for array in arrays)
    for call in (
        lambda: llm.generate("a", GREEDY),
        lambda: llm.generate([]),
        lambda: llm.generate("a", GREEDY, on_error="return"),
        lambda: llm.chat(HELLO, GREEDY),
        llm.engine.step,
    ):
        with pytest.raises(errors.EngineClosed, match="closed"):
            call()
    llm.close()


def test_an_error_within_the_context_passes_through_and_closes(tiny_path):
    with pytest.raises(KeyError), load(tiny_path) as llm:
        raise KeyError
    with pytest.raises(errors.PagedJaxError, match="closed"):
        llm.generate("a", GREEDY)


# -- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("block_size", [0, -1, True, 1.5, "16", None]),
        ("num_blocks", [0, 1, -1, True, 2.0, "9"]),
        ("kv_cache_gib", [0, -1, True, float("nan"), float("inf"), "1"]),
        ("max_model_len", [0, 1, -1, True, 65, 10**9, 64.0, "9"]),
        ("max_num_seqs", [0, -1, True, 1.5, None]),
        ("max_num_batched_tokens", [0, -1, True, 1.5, None]),
        ("dtype", ["int8", "fp16", "", None, 32, ["float32"], float]),
        ("seed", [-1, True, 1.5, "1", [1]]),
        ("kv_audit", [True, [], "no-such-folder/log", "."]),
        ("enable_prefix_caching", [0, None, "yes"]),
        ("preemption_mode", ["", None, "swop"]),
        ("swap_space_gib", [-1, True, "1", None]),
        ("batch_invariant", [0, None]),
        ("logprobs_mode", ["", None]),
        ("warm_up", [0, None]),
    ],
)
def test_a_wrong_option_is_named(option, values, tiny_path):
    for value in values:
        with pytest.raises(errors.InvalidArgument, match=f"{option}.*expected"):
            load(tiny_path, **{option: value})


def test_only_one_option_sizes_the_pool(tiny_path):
    with pytest.raises(errors.InvalidArgument, match=r"num_blocks=9 and kv_cache_gib=1: .* give one"):
        load(tiny_path, num_blocks=9, kv_cache_gib=1)


def test_an_unknown_option_is_an_error(tiny_path):
    with pytest.raises(TypeError, match="num_block"):
        load(tiny_path, num_block=9)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_gib": 1e-9},
        {"kv_cache_gib": 5e-7},  # the null block alone
        {"num_blocks": 2, "block_size": 1},
        {"num_blocks": 8, "max_model_len": 64},
        {"num_blocks": 16, "max_model_len": 64},
    ],
)
def test_a_pool_that_cannot_hold_what_was_asked_for_is_refused(options, tiny_path):
    with pytest.raises(errors.PoolTooSmall, match="raise num_blocks or kv_cache_gib"):
        load(tiny_path, **options)


def test_the_smallest_pool_works_and_limits_the_context(tiny_path):
    with load(tiny_path, num_blocks=2) as llm:
        assert llm.max_model_len == 4
        (output,) = generate(
            llm, {"prompt_token_ids": [1, 2]}, SamplingParams(temperature=0, max_tokens=None)
        )
        assert len(output.outputs[0].token_ids) <= 2


def test_options_may_be_numpys_numbers(tiny_path):
    with load(
        tiny_path, num_blocks=np.int64(20), block_size=np.int32(4), max_num_seqs=np.int64(4), seed=np.int64(1)
    ) as llm:
        allocator, scheduler = llm.engine.allocator, llm.engine.scheduler
        sizes = (allocator.num_blocks, allocator.block_size, scheduler.max_num_seqs)
        assert sizes == (20, 4, 4)
        assert {type(size) for size in sizes} == {int}


def test_a_size_in_gib_is_used_to_the_last_block(tiny_path):
    block_bytes = 4 * 2 * 1 * 1 * 16 * 4  # tokens x (K and V) x layers x heads x head_dim x float32
    with load(tiny_path, kv_cache_gib=40 * block_bytes / 2**30) as llm:
        assert llm.engine.allocator.num_blocks == 40


def test_without_a_size_the_pool_holds_what_a_full_batch_can_need(tiny):
    assert tiny.engine.allocator.num_blocks == 4 * 16 + 1


@pytest.mark.parametrize("model", ["/no/such/path", "nowhere", ""])
def test_no_model_at_a_path_is_told(model):
    with pytest.raises(errors.ModelNotFound, match="no such file or directory"):
        LLM(model, use_tqdm=False)


@pytest.mark.parametrize("model", [None, 5, ["x"]])
def test_what_is_no_path_is_told(model):
    with pytest.raises(errors.InvalidArgument, match=r"model=.*expected a path"):
        LLM(model, use_tqdm=False)


def test_a_folder_without_a_model_is_told(tmp_path):
    with pytest.raises(errors.ModelNotFound, match="holds no model"):
        LLM(tmp_path, use_tqdm=False)


def test_an_architecture_that_is_not_there_is_told(tmp_path):
    write_hf(tmp_path)
    write_json(tmp_path / "config.json", tiny_config(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(errors.UnsupportedModel, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        LLM(tmp_path, use_tqdm=False)


# -- what it tells -----------------------------------------------------------------------------------------


def test_the_audit_log_sees_what_every_block_went_through(tiny_path):
    audit = AuditLog()
    with load(tiny_path, kv_audit=audit) as llm:
        outputs = generate(llm, PROMPTS[:3])
    actions = [record.action for record in audit]
    assert actions.count("allocate") == actions.count("free") > 3
    assert {record.owner for record in audit} == {output.request_id for output in outputs}
    steps = [record.step for record in audit]
    assert steps == sorted(steps)
    assert steps[0] == 0  # where they arrive
    assert steps[-1] > 1


def test_describe_says_what_the_memory_holds(tiny):
    said = tiny.describe()
    assert "64 blocks of 4 tokens = 256 tokens, 0.0 MiB: 4.0 sequences of max_model_len=64 tokens" in said
    assert said.endswith("prefix caching on")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"num_blocks": 41, "max_model_len": 62},
            "40 blocks of 4 tokens = 160 tokens, 0.0 MiB: 2.5 sequences",
        ),
        ({"swap_space_gib": 1 / 1024}, "swap space 2,048 blocks, 1.0 MiB"),
        ({"swap_space_gib": 0}, "no swap space"),
        ({"preemption_mode": "recompute"}, "no swap space"),
        ({"enable_prefix_caching": False}, "prefix caching off"),
    ],
)
def test_describe_says_what_the_options_came_to(options, told, tiny_path):
    with load(tiny_path, warm_up=False, **options) as llm:
        assert told in llm.describe()


def test_at_the_start_it_describes_itself_on_standard_error_unless_told_not_to(tiny_path, capsys):
    with load(tiny_path, warm_up=False, use_tqdm=True) as llm:
        out, err = capsys.readouterr()
        assert (out, err) == ("", llm.describe() + "\n")
    with load(tiny_path, warm_up=False):
        assert capsys.readouterr() == ("", "")


def test_at_the_start_it_says_what_it_compiled(tiny_path, capsys):
    with load(tiny_path, warm_up=True, use_tqdm=True) as llm:
        first, second = capsys.readouterr().err.splitlines()
        count = llm.engine.runner.num_programs
        assert first.startswith(f"{count} programs ready in ")
        assert second == llm.describe()


def test_a_snapshot_amid_a_batch_agrees_with_the_statistics(tiny):
    engine = tiny.engine
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add(engine.make_request(str(index), prompt, GREEDY))
    engine.step()
    engine.step()
    snapshot = MemorySnapshot.of(engine.scheduler)
    assert snapshot.blocks_used == engine.last_step.blocks.used
    assert snapshot.stored_tokens == engine.last_step.blocks.stored_tokens
    assert snapshot.block_utilization == engine.block_utilization < 1
    for index in range(3):
        engine.abort(str(index))
    assert_unused(tiny)


# -- programs ----------------------------------------------------------------------------------------------


def test_any_load_is_served_by_a_handful_of_programs(tiny):
    """One prefill shape and two decode shapes, whatever the sampling; then nothing compiles."""
    rng = np.random.default_rng(0)

    def play():
        for _ in range(6):
            prompts = [
                {"prompt_token_ids": rng.integers(0, 200, rng.integers(1, 60)).tolist()} for _ in "abcde"
            ]
            params = [
                SamplingParams(
                    temperature=rng.choice([0, 0.8]),
                    top_k=int(rng.choice([0, 5])),
                    max_tokens=int(rng.integers(1, 9)),
                )
                for _ in prompts
            ]
            count = rng.integers(1, 6)
            generate(tiny, prompts[:count], params[:count])

    runner = tiny.engine.runner
    for params in (GREEDY, SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, top_k=3)):
        generate(tiny, ["a"], params)
        generate(tiny, ["a", "b"], params)
    programs = runner.compilations
    assert programs <= runner.num_programs <= 9
    play()
    assert runner.compilations == programs


def test_calls_from_several_threads_run_one_after_the_other(tiny):
    expected = ids_of(tiny.generate(["a", "Hello"], GREEDY, use_tqdm=False))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(tiny.generate, ["a", "Hello"], GREEDY, use_tqdm=False) for _ in range(8)]
        assert all(ids_of(call.result()) == expected for call in calls)
    assert_unused(tiny)


def test_a_request_queued_by_hand_goes_on_beside_a_call(tiny):
    engine = tiny.engine
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add(engine.make_request("0", "Hello", long))
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert len(ids_of(tiny.generate("a", short, use_tqdm=False))[0]) == 3
    assert engine.has_unfinished
    engine.abort("0")
    assert_unused(tiny)


def test_an_answer_that_the_context_ended_is_not_said_to_be_cut_at_the_default(tiny, recwarn):
    room = tiny.max_model_len - 1
    tiny.generate(
        {"prompt_token_ids": [5] * room}, SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False
    )
    assert not recwarn.list


@pytest.mark.parametrize("size", [{"num_blocks": 10**12}, {"kv_cache_gib": 1e6}])
def test_a_pool_larger_than_the_memory_is_refused(tiny_path, size):
    with pytest.raises(errors.InvalidArgument, match="GiB at most, which is what the device has left"):
        load(tiny_path, **size)


def test_token_ids_are_lists(tiny):
    output = generate(tiny, "a", GREEDY)[0]
    assert isinstance(output.outputs, list)
    assert isinstance(output.prompt_token_ids, list)
    assert isinstance(output.outputs[0].token_ids, list)


# -- company on the engine ---------------------------------------------------------------------------------


def test_a_request_that_somebody_takes_back_amid_a_call_ends_with_abort(tiny, monkeypatch):
    engine, steps = tiny.engine, iter(range(100))
    step = engine.step

    def then_abort():
        outputs = step()
        if next(steps) == 3:
            engine.abort(next(iter(engine.scheduler.queues.by_id)))
        return outputs

    monkeypatch.setattr(engine, "step", then_abort)
    first, second = generate(tiny, ["Hello", "The sea is"])
    assert (first.outputs[0].finish_reason, len(first.outputs[0].token_ids)) == ("abort", 4)
    assert second.outputs[0].finish_reason == "length"


def test_what_others_have_on_the_engine_is_put_out_to_them(tiny):
    engine = tiny.engine
    engine.add(engine.make_request("mine", "Hello", SamplingParams(temperature=0, max_tokens=2)))
    tiny.generate("The sea is", GREEDY, use_tqdm=False)
    assert engine.has_unfinished
    (mine,) = engine.step()
    assert (mine.request_id, len(mine.outputs[0].token_ids)) == ("mine", 2)
    assert_unused(tiny)


def test_a_request_of_others_with_the_name_of_one_of_ours_survives(tiny):
    engine = tiny.engine
    number = int(tiny.generate("a", GREEDY, use_tqdm=False)[0].request_id.split("-")[1])
    name = f"llm-{number + 1}"
    engine.add(engine.make_request(name, "Hello", SamplingParams(temperature=0, max_tokens=2)))
    with pytest.raises(errors.InvalidArgument, match="request_id"):
        tiny.generate("The sea is", GREEDY, use_tqdm=False)
    assert name in engine.scheduler
    engine.abort(name)
    assert_unused(tiny)


def test_closing_ends_a_call_of_another_thread_before_its_next_step(tiny_path):
    llm = load(tiny_path)
    launch, started, go_on = llm.engine.runner._launch, threading.Event(), threading.Event()

    def slow(packed):
        started.set()
        assert go_on.wait(30)
        return launch(packed)

    llm.engine.runner._launch = slow
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(llm.generate, "a", GREEDY, use_tqdm=False)
        assert started.wait(60)
        closing = pool.submit(llm.close)
        go_on.set()
        with pytest.raises(errors.EngineClosed):
            answer.result(60)
        closing.result(60)


def test_cached_prefixes_can_be_forgotten(tiny):
    prompt = {"prompt_token_ids": list(range(5, 30))}
    hits = [generate(tiny, [prompt])[0].num_cached_tokens for _ in range(2)]
    tiny.reset_prefix_cache()
    assert hits[1] == 24
    assert generate(tiny, [prompt])[0].num_cached_tokens == 0
