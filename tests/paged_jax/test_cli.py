"""The command line: what it prints where, and how it fails."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged_jax import BeamSearchParams, SamplingParams, __version__, cli
from paged_jax.engine_options import EngineOptions

PROGRAM = Path(sys.executable).parent / "paged-jax"


@pytest.fixture
def loaded(tiny, monkeypatch):
    """The commands get the tiny model that is loaded already; returns the options they asked for."""
    asked = []
    monkeypatch.setattr(
        cli, "_load", lambda model, **options: asked.append({"model": model} | options) or tiny
    )
    yield asked
    tiny.engine.allocator.check([])
    assert not tiny.engine.has_unfinished


@pytest.fixture
def run(program):
    """Run `paged-jax`: (exit code, stdout, stderr)."""
    return program


GREEDY = ("--temperature", 0, "--max-tokens", 6)


def answer(tiny, prompt, max_tokens=6):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return tiny.generate(prompt, params, use_tqdm=False)[0].outputs[0]


# -- generate ----------------------------------------------------------------------------------------------


def test_generate_prints_prompt_and_continuation(run, loaded, tiny):
    code, out, _ = run("generate", "--model", "m", "Hello", *GREEDY)
    assert (code, out) == (0, "Hello" + answer(tiny, "Hello").text + "\n")
    assert loaded[0]["model"] == "m"


def test_several_prompts_are_told_apart(run, loaded, tiny):
    code, out, _ = run("generate", "--model", "m", "Hello", "World", *GREEDY)
    assert code == 0
    expected = [prompt + answer(tiny, prompt).text for prompt in ("Hello", "World")]
    assert [part.strip("\n") for part in out.split("-" * 40)] == [*(e.strip("\n") for e in expected), ""]


def test_without_prompts_they_come_one_a_line_from_stdin(run, loaded):
    code, out, _ = run("generate", "--model", "m", "--json", *GREEDY, stdin="Hello\n\n  \nWorld é\n")
    assert code == 0
    assert [record["prompt"] for record in json.loads(out)] == ["Hello", "World é"]


def test_a_prompt_file_adds_to_the_arguments(run, loaded, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("second\u2028still second\r\nthird 😀\n", encoding="utf-8")
    code, out, _ = run("generate", "--model", "m", "first", "--prompt-file", file, "--json", *GREEDY)
    assert code == 0
    assert [record["prompt"] for record in json.loads(out)] == [
        "first",
        "second\u2028still second",
        "third 😀",
    ]


def test_json_is_all_that_stands_on_stdout(run, loaded, tiny):
    code, out, err = run("generate", "--model", "m", "Hello", "--json", "--temperature", 0)
    (record,) = json.loads(out)
    expected = answer(tiny, "Hello", 16)
    assert code == 0
    assert record == {
        "prompt": "Hello",
        "prompt_tokens": 6,
        "index": 0,
        "text": expected.text,
        "token_ids": list(expected.token_ids),
        "finish_reason": expected.finish_reason,
        "stop_reason": None,
    }
    assert "note: 1 of 1 answers were cut at the default of 16 tokens: give --max-tokens.\n" in err
    assert "SamplingParams" not in err


def test_samples_are_told_apart(run, loaded, tiny):
    arguments = ("generate", "--model", "m", "Hello", "--n", 3, "--seed", 5, "--max-tokens", 6)
    code, out, _ = run(*arguments)
    params = SamplingParams(n=3, seed=5, max_tokens=6, temperature=1.0)
    expected = tiny.generate("Hello", params, use_tqdm=False)[0].outputs
    assert code == 0
    assert out.split("-" * 40 + "\n") == [*("Hello" + one.text + "\n" for one in expected), ""]
    records = json.loads(run(*arguments, "--json")[1])
    assert [(one["index"], one["text"]) for one in records] == [(c.index, c.text) for c in expected]


@pytest.mark.parametrize("chat_template", [False, True])
def test_a_beam_search_shows_scores(chat_template, run, loaded, tiny):
    options = ("--chat-template",) if chat_template else ()
    arguments = ("generate", "--model", "m", "Hello", "--beam-width", 3, "--max-tokens", 5, *options)
    code, out, _ = run(*arguments, "--n", 2, "--length-penalty", 0.5)
    prompt = tiny.chat_prompt([{"role": "user", "content": "Hello"}]) if chat_template else "Hello"
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=5, length_penalty=0.5)
    expected = tiny.beam_search(prompt, params, use_tqdm=False)[0].outputs
    assert (code, len(expected)) == (0, 2)
    start = "" if chat_template else "Hello"
    parts = [f"[score {one.score:.4f}]\n{start}{one.text}\n" for one in expected]
    assert out.split("-" * 40 + "\n") == [*parts, ""]
    records = json.loads(run(*arguments, "--json", "--logprobs", 1)[1])
    assert [one["score"] for one in records] == [one["cumulative_logprob"] / 5 for one in records]
    assert [len(one["logprobs"]) for one in records] == [5, 5, 5]


def test_logprobs_are_shown_in_json(run, loaded, tiny):
    _, out, _ = run("generate", "--model", "m", "Hello", "--json", "--logprobs", 2, *GREEDY)
    (record,) = json.loads(out)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    expected = tiny.generate("Hello", params, use_tqdm=False)[0].outputs[0]
    assert record["token_ids"] == [entries[0]["token_id"] for entries in record["logprobs"]]
    assert record["cumulative_logprob"] == pytest.approx(expected.cumulative_logprob)
    assert record["logprobs"][0] == [
        {
            "token_id": token,
            "logprob": pytest.approx(one.logprob),
            "rank": one.rank,
            "text": one.decoded_token,
        }
        for token, one in expected.logprobs[0].items()
    ]


def test_stop_strings_and_the_least_length_arrive(run, loaded, tiny, monkeypatch):
    used, generate = [], tiny.generate
    monkeypatch.setattr(
        tiny, "generate", lambda prompts, params: used.append(params) or generate(prompts, params)
    )
    run("generate", "--model", "m", "a", "--stop", "x", "--stop", "\n", "--min-tokens", 2, *GREEDY)
    assert used == [SamplingParams(temperature=0, max_tokens=6, min_tokens=2, stop=["x", "\n"])]


def test_an_answer_ends_at_a_stop_string_and_the_record_says_so(run, loaded, tiny):
    text = answer(tiny, "Hello", 12).text
    stop = text[3]
    _, out, _ = run(
        *("generate", "--model", "m", "Hello", "--json", "--stop", stop),
        *("--temperature", 0, "--max-tokens", 12),
    )
    (record,) = json.loads(out)
    assert record["text"] == text[: text.index(stop)]
    assert (record["finish_reason"], record["stop_reason"]) == ("stop", stop)


def test_a_prompt_may_go_through_the_chat_template(run, loaded, tiny):
    _, out, _ = run("generate", "--model", "m", "Hello", "--chat-template", "--json", *GREEDY)
    conversation = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    (expected,) = tiny.chat(conversation, params, use_tqdm=False)
    assert json.loads(out)[0]["token_ids"] == list(expected.outputs[0].token_ids)


def test_sampling_options_change_the_models_own_defaults(run, loaded, tiny, monkeypatch):
    recommended = SamplingParams(temperature=0.5, top_k=7, top_p=0.9)
    monkeypatch.setattr(tiny, "get_default_sampling_params", lambda: recommended)
    used, generate = [], tiny.generate
    monkeypatch.setattr(
        tiny, "generate", lambda prompts, params: used.append(params) or generate(prompts, params)
    )
    run("generate", "--model", "m", "a")
    options = ["--top-k", 3, "--seed", 5, "--max-tokens", 2, "--temperature", 0.25, "--top-p", 0.5]
    run("generate", "--model", "m", "a", *options)
    assert used == [recommended, SamplingParams(0.25, 3, 0.5, 5, 2)]


@pytest.mark.parametrize("option", [["--top-k", 5], ["--top-p", 0.9], ["--seed", 1]])
def test_an_option_of_sampling_turns_it_on_where_the_model_recommends_none(
    run, loaded, tiny, monkeypatch, option
):
    used, generate = [], tiny.generate
    monkeypatch.setattr(
        tiny, "generate", lambda prompts, params: used.append(params) or generate(prompts, params)
    )
    run("generate", "--model", "m", "a", *option)
    run("generate", "--model", "m", "a", *option, "--temperature", 0)
    assert [params.temperature for params in used] == [1, 0]


def test_engine_options_are_kebab_case_and_arrive(run, loaded):
    run(
        *("generate", "--model", "m", "a", "--max-tokens", 1, "--temperature", 0),
        *("--dtype", "float32", "--max-model-len", 32, "--block-size", 8, "--num-blocks", 9),
        *("--max-num-seqs", 2, "--implementation", "xla", "--max-num-batched-tokens", 64),
        *("--no-prefix-caching", "--preemption-mode", "swap", "--swap-space-gib", 0.5),
        *("--batch-invariant", "--warm-up"),
    )
    run("generate", "--model", "m", "a", "--max-tokens", 1, "--temperature", 0, "--kv-cache-gib", 0.5)
    assert loaded[0] == {
        "model": "m",
        "dtype": "float32",
        "max_model_len": 32,
        "block_size": 8,
        "num_blocks": 9,
        "kv_cache_gib": None,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "preemption_mode": "swap",
        "swap_space_gib": 0.5,
        "batch_invariant": True,
        "implementation": "xla",
        "warm_up": True,
    }
    assert loaded[1]["kv_cache_gib"] == 0.5


@pytest.mark.parametrize("command", [("generate", "a"), ("chat", "--message", "a")])
def test_unless_told_otherwise_the_engine_has_its_own_defaults_but_compiles_nothing_ahead(
    command, run, loaded
):
    run(*command, "--model", "m", "--max-tokens", 1, "--temperature", 0)
    (asked,) = loaded
    del asked["model"]
    expected = {name: getattr(EngineOptions(), name) for name in asked} | {"warm_up": False}
    if command[0] == "chat":
        expected["max_num_seqs"] = 1
    assert asked == expected
    unnamed = {field.name for field in dataclasses.fields(EngineOptions)} - set(asked)
    assert unnamed == {"kv_audit", "seed", "logprobs_mode"}


# -- chat --------------------------------------------------------------------------------------------------


def chat_answer(tiny, *contents):
    """The answer to a conversation whose turns alternate, the user's first."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    params = SamplingParams(temperature=0, max_tokens=4)
    return tiny.chat(messages, params, use_tqdm=False)[0].outputs[0].text


CHAT = ("chat", "--model", "m", "--temperature", 0, "--max-tokens", 4)


def test_one_message_is_answered(run, loaded, tiny):
    code, out, _ = run(*CHAT, "--message", "Hi")
    assert (code, out) == (0, chat_answer(tiny, "Hi") + "\n")


def test_a_conversation_goes_on_with_what_was_said(run, loaded, tiny, monkeypatch):
    asked = []
    template = tiny.chat_prompt
    monkeypatch.setattr(tiny, "chat_prompt", lambda messages: asked.append(list(messages)) or "a")
    run(*CHAT, stdin="one\ntwo\n\n/clear\nthree\n/exit\nfour\n")
    said = [[message["content"] for message in messages] for messages in asked]
    text = answer(tiny, "a", 4).text
    assert said == [["one"], ["one", text, "two"], ["three"]]
    assert template([{"role": "user", "content": "x"}])


def test_a_system_message_begins_every_conversation(run, loaded, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(tiny, "chat_prompt", lambda messages: asked.append(list(messages)) or "a")
    run(*CHAT, "--system", "Be brief.", stdin="one\n/clear\ntwo\n")
    assert [[m["role"] for m in messages] for messages in asked] == [["system", "user"]] * 2


def test_a_message_that_is_too_long_is_told_and_the_talk_goes_on(run, loaded, tiny):
    code, out, err = run(*CHAT, stdin=f"{'x' * 60}\n/clear\nHi\n")
    assert code == 0
    assert "error: the prompt has" in err
    assert out == chat_answer(tiny, "Hi") + "\n"


def test_ctrl_c_ends_an_answer_and_not_the_talk(run, loaded, tiny, monkeypatch):
    expected = chat_answer(tiny, "Hi")
    execute, calls = tiny.engine.runner.execute, []

    def interrupted(schedule):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return execute(schedule)

    monkeypatch.setattr(tiny.engine.runner, "execute", interrupted)
    code, out, _ = run(*CHAT, stdin="Hello\nHi\n")
    assert code == 0
    assert out.endswith("\n" + expected + "\n")


@pytest.mark.parametrize(
    ("limit", "told"), [(4, "[cut at --max-tokens 4]"), (None, "[cut at the context's end: ")]
)
def test_a_cut_answer_says_what_cut_it(limit, told, run, loaded, tiny, monkeypatch):
    monkeypatch.setattr(
        tiny, "get_default_sampling_params", lambda: SamplingParams(temperature=0, ignore_eos=True)
    )
    options = ["--max-tokens", limit] if limit else []
    _, _, err = run("chat", "--model", "m", "--message", "Hi", *options)
    assert told in err


def test_a_chat_ends_at_a_stop_string_and_never_shows_it(run, loaded, tiny):
    text = chat_answer(tiny, "Hi")
    stop = text[-2:]
    _, out, _ = run(*CHAT, "--stop", stop, "--message", "Hi")
    assert out == text[: text.index(stop)] + "\n"


# -- errors ------------------------------------------------------------------------------------------------


def assert_one_line(result, told):
    code, out, err = result
    assert code == 1
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.parametrize("command", [("generate", "x"), ("chat", "--message", "x")])
def test_no_model_is_one_line(command, run):
    assert_one_line(run(*command, "--model", "/no/such"), "no such file or directory")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--temperature", -1), "temperature=-1.0: expected"),
        (("--top-p", 0), "top_p=0.0: expected"),
        (("--max-tokens", 0), "max_tokens=0: expected"),
        (("--min-tokens", 5, "--max-tokens", 4), "min_tokens=5: expected 4 at most"),
        (("--min-tokens", 17), "min_tokens=17: expected 16 at most"),
        (("--stop", ""), "stop=['']: expected no empty string"),
        (("--logprobs", 21, "--json"), "logprobs=21: expected"),
        (("--logprobs", 2), "--logprobs=2: expected --json beside it"),
        (("--n", 0), "n=0: expected"),
        (("--n", 2, "--temperature", 0), "n=2: expected 1 with temperature=0"),
        (("--beam-width", 2, "--temperature", 1), "temperature=1.0: expected 0"),
        (("--beam-width", 2, "--n", 3), "n=3: expected None or an integer from 1 to beam_width=2"),
        (("--beam-width", 2, "--top-k", 3), "top_k=3: no such sampling field"),
        (("--length-penalty", 2), "--length-penalty=2.0: expected --beam-width beside it"),
        (("--max-num-batched-tokens", 0), "max_num_batched_tokens=0: expected"),
        (("--preemption-mode", "swop"), "preemption_mode='swop': expected"),
        (("--swap-space-gib", -1), "swap_space_gib=-1.0: expected"),
        (("--batch-invariant", "--preemption-mode", "recompute"), "batch_invariant=True and preemption_mode"),
        (("--block-size", 0), "block_size=0: expected"),
        (("--num-blocks", 1), "num_blocks=1: expected"),
        (("--dtype", "int3"), "dtype='int3': expected"),
        (("--num-blocks", 9, "--kv-cache-gib", 1), "give one"),
        (("--num-blocks", 3, "--max-model-len", 64), "raise num_blocks"),
    ],
)
def test_a_wrong_option_is_one_line(option, told, run, tiny_path):
    assert_one_line(run("generate", "--model", tiny_path, "x", *option), told)


def test_no_prompt_is_one_line(run):
    assert_one_line(run("generate", "--model", "m"), "no prompt")
    assert_one_line(run("generate", "--model", "m", stdin="\n \n"), "no prompt")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_prompt_file_that_cannot_be_read_is_one_line(content, run, tmp_path):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    assert_one_line(run("generate", "--model", "m", "--prompt-file", file), "--prompt-file")


def test_a_bad_prompt_is_one_line(run, loaded):
    assert_one_line(
        run("generate", "--model", "m", "x" * 100, *GREEDY), "prompt 0: the prompt has 101 tokens"
    )


def test_a_model_without_a_chat_template_is_one_line(run, glass, monkeypatch):
    monkeypatch.setattr(cli, "_load", lambda *_, **__: glass)
    assert_one_line(run(*CHAT, "--message", "Hi"), "no chat template")


@pytest.mark.parametrize(
    "arguments", [("generate", "x"), ("generate", "--model"), ("--nonsense",), ("sing",)]
)
def test_wrong_usage_is_exit_code_2(arguments):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 2
    assert "Traceback" not in result.output


# -- the program itself ------------------------------------------------------------------------------------


def test_the_installed_program_generates(tiny_path, tiny):
    done = subprocess.run(
        [
            *(PROGRAM, "generate", "--model", tiny_path, "Hello", "--json", "--temperature", "0"),
            *("--max-tokens", "4", "--max-num-seqs", "4", "--block-size", "4"),
        ],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (record,) = json.loads(done.stdout)
    assert record["token_ids"] == list(answer(tiny, "Hello", 4).token_ids)
    assert done.stderr.count("64 blocks of 4 tokens") == 1
    assert done.stderr.count("\n") == 1


def test_it_says_its_version(run):
    assert run("--version") == (0, f"paged-jax {__version__}\n", "")


def test_help_names_the_commands():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("generate", "chat"):
        assert command in result.output


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_are_kebab_case(command):
    output = (
        CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(cli.app, [command, "--help"]).output
    )
    options = {word.strip(",") for word in output.split() if word.startswith("--")}
    assert {"--max-model-len", "--block-size", "--num-blocks", "--kv-cache-gib", "--top-k"} <= options
    assert not [option for option in options if "_" in option]


def test_help_and_wrong_parameters_import_no_jax():
    code = (
        "import sys; from paged_jax.cli import main\n"
        "for arguments in (['--help'], ['generate', '--model', 'm', 'x', '--temperature', '-1']):\n"
        "    sys.argv = ['paged-jax', *arguments]\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
