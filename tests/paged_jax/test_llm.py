"""LLM over small models: the same answers whatever shares the batch, the pool or the call."""

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
        assert {leaf.dtype.name for leaf in llm.engine.runner._leaves} == {dtype, "float32"}  # norms
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


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, "greedy", [GREEDY, None], [{"top_k": 1}] * 2, 0])
def test_parameters_of_another_type_are_refused(params, tiny):
    with pytest.raises(errors.InvalidArgument, match="expected a SamplingParams or a list of them"):
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
    last = None
    while engine.has_unfinished:
        (last,) = engine.step()
    assert ids_of([last]) == [expected]
    assert_unused(tiny)


def test_a_closed_llm_gives_its_memory_back_and_says_that_it_is_closed(tiny_path):
    llm = load(tiny_path)
    arrays = [*llm.engine.runner._leaves, *(array for pool in llm.engine.runner.cache for array in pool)]
    with llm:
        pass
    assert all(array.is_deleted() for array in arrays)
    for call in (lambda: llm.generate("a", GREEDY), lambda: llm.chat(HELLO, GREEDY), llm.engine.step):
        with pytest.raises(errors.PagedJaxError, match="closed"):
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
        ("kv_audit", [True, [], "log"]),
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
    assert steps[0] >= 1
    assert steps[-1] > steps[0]


def test_describe_says_what_the_memory_holds(tiny):
    assert "64 blocks of 4 tokens = 256 tokens" in tiny.describe()
    assert "64 tokens a sequence at most" in tiny.describe()


def test_a_snapshot_amid_a_batch_agrees_with_the_statistics(tiny):
    engine = tiny.engine
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add(engine.make_request(str(index), prompt, GREEDY))
    engine.step()
    engine.step()
    snapshot = MemorySnapshot.of(engine.scheduler)
    assert snapshot.blocks_used == engine.last_step.blocks_used
    assert snapshot.tokens == engine.last_step.cached_tokens
    assert snapshot.block_utilization == engine.block_utilization < 1
    for index in range(3):
        engine.abort(str(index))
    assert_unused(tiny)


# -- programs ----------------------------------------------------------------------------------------------


def test_any_load_is_served_by_a_handful_of_programs(tiny):
    """One prefill shape and two decode shapes, each for three kinds of sampling; then nothing compiles."""
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

    step = tiny.engine.runner._step
    for params in (GREEDY, SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, top_k=3)):
        generate(tiny, ["a"], params)
        generate(tiny, ["a", "b"], params)
    programs = step._cache_size()
    assert programs <= 9
    play()
    assert step._cache_size() == programs


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
