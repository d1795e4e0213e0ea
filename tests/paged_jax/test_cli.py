"""The command line: what it prints where, and how it fails."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged_jax import SamplingParams, cli

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
def run(monkeypatch, capsys):
    """Run the program as a person does: (exit code, stdout, stderr)."""

    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["paged-jax", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


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
        "text": expected.text,
        "token_ids": list(expected.token_ids),
        "finish_reason": expected.finish_reason,
    }
    assert "note: 1 of 1 answers were cut at the default max_tokens=16" in " ".join(err.split())


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
        *("--max-num-seqs", 2, "--implementation", "xla"),
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
        "implementation": "xla",
    }
    assert loaded[1]["kv_cache_gib"] == 0.5


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
    assert "64 blocks of 4 tokens" in done.stderr


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
