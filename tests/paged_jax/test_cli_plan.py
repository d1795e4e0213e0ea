"""`paged-jax plan`: what it reads, what it prints where, and how it fails."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import tiny_config, tiny_tokenizer, write_gguf, write_json
from typer.testing import CliRunner

from paged_jax import cli

from .conftest import record_of

PROGRAM = Path(sys.executable).parent / "paged-jax"
POOL = ("--kv-cache-gib", 40, "--block-size", 32)


@pytest.fixture
def run(program):
    """Run `paged-jax plan`: (exit code, stdout, stderr)."""
    return partial(program, "plan")


@pytest.fixture
def record(run):
    """The record of a run that succeeds."""
    return record_of(run)


@pytest.fixture
def config(tmp_path):
    """A config.json of Llama 2 7B's sizes."""
    path = tmp_path / "config.json"
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    }
    write_json(path, tiny_config(**sizes))
    return path


def test_the_articles_pool_comes_out_of_a_config_as_json(record, config):
    found = record("--model", config, *POOL)
    assert (found["max_num_blocks"], found["usable_blocks"]) == (2560, 2559)
    assert found["null_block_counted"] is True
    assert found["bytes_per_token_sum"] == "32 layers x 2 x 32 heads x 128 x 2 bytes = 512 KiB"
    assert found["model"]["num_parameters"] == 6_738_415_616


def test_a_directory_a_known_name_and_a_config_are_the_same_model(record, config):
    by_config = record("--model", config, *POOL)
    for model in (config.parent, "llama-2-7b", "LLAMA-2-7B"):
        found = record("--model", model, *POOL)
        assert found["ledger"] == by_config["ledger"]


def test_a_gguf_file_goes_through_the_engines_own_reader(record, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    found = record("--model", tmp_path / "tiny.gguf", "--num-blocks", 9, "--dtype", "float32")
    assert found["bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert found["num_blocks"] == 9


def test_people_get_tables_and_a_verdict(run):
    code, out, err = run("--model", "llama-2-7b", "--device", "a100-80", "--mean-tokens", "400,100")
    assert (code, err) == (0, "")
    text = " ".join(out.replace("│", " ").split())
    for told in (
        "32 layers x 2 x 32 heads x 128 x 2 bytes = 512 KiB",
        "2,048 tokens 1.00 GiB; 4,096 tokens 2.00 GiB",
        "null block counted",
        "estimated for 2,048 tokens a step",
        "recommended: block_size=32",
        "lower bounds on a100-80",
        "bandwidth",
        "L2",
        "use paging: ",
    ):
        assert told in text


def test_every_option_arrives(record):
    found = record(
        *("--model", "llama-3-8b", "--dtype", "float32", "--kv-dtype", "float16", "--device", "h200"),
        *("--memory-fraction", 0.9, "--max-model-len", 1024, "--concurrency", 5, "--num-blocks", 200),
        *("--block-size", 8, "--mean-tokens", 100, "--std-tokens", 20, "--max-num-batched-tokens", 512),
    )
    assert (found["dtype"], found["kv_dtype"], found["concurrency"]) == ("float32", "float16", 5)
    assert (found["max_model_len"], found["num_blocks"], found["block_size"]) == (1024, 200, 8)
    assert found["device"]["limit_bytes"] == int(found["device"]["memory_bytes"] * 0.9)
    assert found["activation_bytes_estimated"] < 512 * (12 * 14336 + 4 * 4096) + 1
    assert found["requests"]["mean_tokens"] == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(
    ("options", "prompt", "answer"),
    [
        (("--mean-tokens", "500"), 250, 250),
        (("--mean-tokens", "500", "--std-tokens", "200"), 250, 250),
        (("--mean-tokens", "400,100"), 400, 100),
        (("--mean-tokens", "400, 100", "--std-tokens", "300,50"), 400, 100),
    ],
)
def test_lengths_may_be_of_the_whole_or_of_prompt_and_answer(options, prompt, answer, record):
    found = record("--model", "llama-2-7b", *POOL, *options)["requests"]
    assert found["mean_prompt_tokens"] == pytest.approx(prompt, rel=0.02)
    assert found["mean_output_tokens"] == pytest.approx(answer, rel=0.02)
    assert "made up" in found["note"]


def test_a_trace_is_measured_and_bad_lines_are_skipped_where_that_is_asked_for(run, record, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,29\n1,0,5\n2,50,50\n3,4000,1000\n")
    code, out, err = run("--model", "llama-2-7b", *POOL, "--trace", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "line 3: prompt_tokens='0'" in err
    found = record("--model", "llama-2-7b", *POOL, "--trace", path, "--skip-invalid")
    assert (found["requests"]["count"], found["requests"]["skipped"]) == (2, 2)
    assert found["requests"]["peak_blocks"] == 64 * 4  # two requests of four blocks each, repeated
    assert any("line 5" in line for line in found["requests"]["skipped_first"])


def test_texts_are_counted_by_a_tokenizer_or_estimated(record, tmp_path):
    path, tokenizer = tmp_path / "chats.json", tmp_path / "tokenizer.json"
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 20}]
    write_json(path, [{"conversations": turns}])
    tiny_tokenizer().save(str(tokenizer))
    options = ("--model", "llama-2-7b", *POOL, "--trace", path)
    estimated = record(*options, "--characters-per-token", 5)["requests"]
    assert (estimated["mean_tokens"], "5 characters" in estimated["note"]) == (12, True)
    counted = record(*options, "--tokenizer", tokenizer)["requests"]
    assert (counted["mean_tokens"], counted["note"]) == (60, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "llama-9"), "no name that is known here"),
        (("--model", "llama-2-7b", "--device", "h300"), "device='h300': expected one of h100"),
        (("--model", "llama-2-7b", "--device", "9" * 400 + "GiB"), "expected one of h100"),
        (("--model", "a" * 5000), "no path and no known name: "),
        (("--model", "llama-2-7b", "--concurrency", 0), "concurrency=0: expected from 1 to 65,536"),
        (("--model", "llama-2-7b", "--concurrency", 65_537), "concurrency=65537: expected from 1 to 65,536"),
        (("--model", "llama-2-7b", "--dtype", "int3"), "dtype='int3': expected"),
        (("--model", "llama-2-7b", "--num-blocks", 1), "num_blocks=1: expected"),
        (("--model", "llama-2-7b", "--num-blocks", 9, "--kv-cache-gib", 1), "give one"),
        (("--model", "llama-2-7b", "--max-model-len", 9999), "expected 4096 at most"),
        (("--model", "llama-2-7b", "--trace", "/no/such"), "/no/such: expected a text file"),
        (("--model", "llama-2-7b", "--trace", "x", "--mean-tokens", 5), "give one"),
        (("--model", "llama-2-7b", "--std-tokens", 5), "--mean-tokens beside it"),
        (("--model", "llama-2-7b", "--mean-tokens", "many"), "--mean-tokens='many': expected a number"),
        (("--model", "llama-2-7b", "--mean-tokens", "1,2,3"), "expected a number of tokens, or two"),
        (("--model", "llama-2-7b", "--mean-tokens", "nan"), "mean=nan"),
        (("--model", "llama-2-7b", "--mean-tokens", 5, "--std-tokens", -1), "std=-"),
        (
            ("--model", "llama-2-7b", "--trace", "x", "--tokenizer", "/no/such"),
            "--tokenizer /no/such: cannot be read",
        ),
    ],
)
def test_a_wrong_option_is_one_line(arguments, told, run):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert told in err


def test_a_model_whose_cache_is_of_another_kind_is_refused_in_one_line(run, tmp_path):
    write_json(tmp_path / "config.json", tiny_config(model_type="deepseek_v3", kv_lora_rank=512))
    code, out, err = run("--model", tmp_path, *POOL)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "latent attention (MLA, kv_lora_rank=512)" in err


def test_options_are_kebab_case():
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    output = runner.invoke(cli.app, ["plan", "--help"]).output
    options = {word.strip(",") for word in output.split() if word.startswith("--")}
    wanted = "model dtype kv-dtype device max-model-len concurrency trace mean-tokens std-tokens kv-cache-gib"
    assert {f"--{name}" for name in f"{wanted} num-blocks block-size skip-invalid json".split()} <= options
    assert not [option for option in options if "_" in option]


@pytest.mark.parametrize("model", ["llama-2-7b", "config"])
def test_a_plan_imports_no_jax(model, config):
    code = (
        "import sys; from paged_jax.cli import main\n"
        f"sys.argv = ['paged-jax', 'plan', '--model', {str(config) if model == 'config' else model!r},"
        " '--device', 'h100', '--mean-tokens', '500', '--json']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sorted({'jax', 'flax', 'chex', 'torch', 'paged_jax_models'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_the_installed_program_plans(config):
    arguments = ("plan", "--model", config, "--kv-cache-gib", "40", "--block-size", "32", "--json")
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_blocks"] == 2560
    assert done.stderr == ""
