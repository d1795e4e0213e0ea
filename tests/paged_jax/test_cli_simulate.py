"""`paged-jax simulate`: what it reads, what it prints where, and how it fails."""

import csv
import json
import subprocess
import sys
from functools import partial

import pytest
from support.checkpoints import tiny_config, write_json
from typer.testing import CliRunner

from paged_jax import cli

from .conftest import record_of

HEAD = "arrival_s,prompt_tokens,output_tokens\n"
POOL = ("--pool-tokens", 400)
SMALL = (*POOL, "--max-num-seqs", 64)
MODEL = ("--mean-tokens", 50, "--model", "llama-2-7b")


@pytest.fixture
def run(program):
    """Run `paged-jax simulate`: (exit code, stdout, stderr)."""
    return partial(program, "simulate")


@pytest.fixture
def record(run):
    """The record of a run that succeeds."""
    return record_of(run)


@pytest.fixture
def trace(tmp_path):
    """30 requests of some 60 tokens in 0.6 seconds: more than 400 slots hold at once."""
    path = tmp_path / "trace.csv"
    rows = [f"{0.02 * number:.2f},{30 + 3 * (number % 7)},{20 + number % 11}\n" for number in range(30)]
    path.write_text(HEAD + "".join(rows))
    return path


def names(found):
    return [run["name"] for run in found["comparisons"][0]["runs"]]


def runs_of(found, place=0):
    return {run["name"]: run for run in found["comparisons"][place]["runs"]}


# -- what comes out ----------------------------------------------------------------------------------------


def test_every_strategy_is_run_on_the_same_requests(record, trace):
    found = record("--trace", trace, *SMALL, "--block-sizes", "8,16", "--preemption", "recompute,queue")
    (compared,) = found["comparisons"]
    assert (compared["accepted"], compared["dropped"], compared["reservation"]) == (30, [], 77)
    runs = runs_of(found)
    assert {run["requests"] for run in runs.values()} == {30}
    assert {run["strategy"] for run in runs.values()} == {
        "paged",
        "contiguous-max",
        "contiguous-pow2",
        "contiguous-oracle",
    }
    assert {"paged 8, queue", "paged 16, recompute", "contiguous-oracle, no holes"} <= set(runs)
    assert runs["paged 8, recompute"]["concurrency_mean"] > runs["contiguous-max 77"]["concurrency_mean"]
    assert runs["paged 8, queue"]["preemptions"] == 0 < runs["paged 8, recompute"]["preemptions"]
    assert runs["paged 8, recompute free"]["recomputed_tokens"] > 0
    assert [waste["block_size"] for waste in compared["tail_waste"]] == [8, 16]


def test_people_get_tables_that_fit_80_columns(run, trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("--trace", trace, *SMALL, "--block-sizes", "8,128")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for told in (
        "30 requests, 38 + 25 tokens on average",
        "memory: 400 tokens",
        "a step: 10 ms",
        "no model and device are given",
        "30 requests, the same for all",
        "paged 8, recompute",
        "contiguous-max 77",
        "slots that were kept from others",
        "set back, copied and shared",
        "waste of partly filled last blocks",
        "a second",
    ):
        assert told in text
    tables = [line for line in out.splitlines() if line.startswith((" paged", " contiguous"))]
    assert len(tables) > 15
    assert max(map(len, tables)) <= 80
    assert "…" not in out


def test_csv_has_a_line_for_each_run_with_the_names_of_the_json(run, record, trace):
    options = ("--trace", trace, *SMALL, "--reservation", "77,100")
    code, out, _ = run(*options, "--csv")
    assert code == 0
    lines = list(csv.DictReader(out.splitlines()))
    found = record(*options)
    records = [one for compared in found["comparisons"] for one in compared["runs"]]
    assert [line["name"] for line in lines] == [one["name"] for one in records]
    assert set(lines[0]) == set(records[0]) | {"reservation", "accepted"}
    assert [float(line["concurrency_mean"]) for line in lines] == [one["concurrency_mean"] for one in records]
    assert {line["reservation"] for line in lines} == {"77", "100"}


def test_plots_are_drawn_into_a_folder_and_named_on_standard_error(run, trace, tmp_path):
    folder = tmp_path / "new" / "plots"
    code, out, err = run("--trace", trace, *SMALL, "--plot", folder, "--json")
    assert code == 0
    assert json.loads(out)["comparisons"]
    drawn = sorted(path.name for path in folder.iterdir())
    assert drawn == ["concurrency.png", "memory.png", "utilization.png", "waste.png"]
    assert all(name in err for name in drawn)
    run("--trace", trace, *SMALL, "--plot", folder, "--reservation", "77,100")
    assert {path.name for path in folder.iterdir()} - set(drawn) == {"reservation-77", "reservation-100"}


# -- options -----------------------------------------------------------------------------------------------


def test_a_reservation_says_who_is_dropped_for_all(record, trace):
    found = record("--trace", trace, *SMALL, "--reservation", "60,200")
    first, second = found["comparisons"]
    assert (first["reservation"], second["reservation"]) == (60, 200)
    (dropped,) = first["dropped"]
    assert dropped["reason"] == "they are longer than the reservation of 60 tokens"
    assert dropped["requests"] + first["accepted"] == 30
    assert (second["accepted"], second["dropped"]) == (30, [])


def test_a_reservation_of_more_than_the_memory_is_told(run, trace):
    code, _, err = run("--trace", trace, *SMALL, "--reservation", 2048)
    assert (code, err.count("\n")) == (1, 1)
    assert "no request is left to simulate (30: what a strategy reserves for them is more" in err


def test_samples_and_beams_share(record, trace):
    alone = runs_of(record("--trace", trace, *SMALL, "--strategies", "paged,contiguous-oracle"))
    for options in (("--n", 3), ("--beam-width", 3), ("--n", 2, "--share", 0.5)):
        found = runs_of(record("--trace", trace, *SMALL, "--strategies", "paged,contiguous-oracle", *options))
        assert found["paged 16, recompute"]["cow_copies"] > 0
        assert found["contiguous-oracle"]["requests"] > alone["contiguous-oracle"]["requests"]
        assert found["paged 16, recompute"]["requests"] == 30


def test_prefix_caching_finds_what_hash_ids_say(record, tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}
    path.write_text("".join(json.dumps(row | {"timestamp": 1000 * n}) + "\n" for n in range(5)))
    rates = {
        caching: runs_of(record("--trace", path, *POOL, "--strategies", "paged", *caching))[
            "paged 16, recompute"
        ]["prefix_hit_rate"]
        for caching in ((), ("--prefix-caching",))
    }
    assert rates[()] == 0
    assert 0.5 < rates[("--prefix-caching",)] < 0.9


def test_time_is_as_given(record, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "0,1,10\n")
    for text, seconds in (("2", 20), ("2,0.5", 25), ("2,0.5,0.1,9", 25 + 5.5)):
        found = record("--trace", path, *POOL, "--strategies", "paged", "--step-time", text)
        assert runs_of(found)["paged 16, recompute"]["seconds"] == pytest.approx(seconds)
        assert found["step_time"]["fixed"] == 2


def test_a_trace_is_replayed_faster_or_in_part(record, trace):
    waits = {
        speed: runs_of(record("--trace", trace, *POOL, "--strategies", "paged", "--speed", speed))[
            "paged 16, recompute"
        ]["queue_delay_p50"]
        for speed in ("0.01", "inf")
    }
    assert waits["0.01"] == 0 < waits["inf"]
    found = record("--trace", trace, *POOL, "--first", 4)
    assert found["comparisons"][0]["accepted"] == 4


def test_a_huge_memory_costs_no_more_than_what_is_used_of_it(record, trace):
    options = ("--trace", trace, "--block-sizes", "1,16", "--preemption", "all", "--n", 2)
    huge = record(*options, "--pool-tokens", 10**12)
    large = record(*options, "--pool-tokens", 10**5)
    assert huge["comparisons"] == large["comparisons"]
    assert huge["slots"] == 10**12


def test_what_is_of_another_strategy_is_left_empty(record, trace):
    runs = runs_of(record("--trace", trace, *SMALL))
    paged, other = runs["paged 16, recompute"], runs["contiguous-pow2, no holes"]
    assert (paged["preemption"], paged["free_recompute"], paged["fragments"]) == ("recompute", False, None)
    assert (other["preemption"], other["free_recompute"], other["fragments"]) == (None, None, False)


def test_lengths_may_be_made_up(record):
    options = ("--mean-tokens", "60,20", "--std-tokens", "20,5", "--num-requests", 50, *POOL)
    found = record(*options, "--requests-per-second", 5)
    assert found["comparisons"][0]["accepted"] == 50
    assert record(*options) == record(*options, "--seed", 0) != record(*options, "--seed", 1)


def test_a_model_on_a_device_gives_the_memory_and_the_clock(record, trace, run):
    options = ("--trace", trace, "--model", "llama-2-7b", "--strategies", "paged")
    found = record(*options, "--kv-cache-gib", 1)
    assert found["slots"] == 2048 - 16  # of 512 KiB each; the null block holds none
    assert found["bytes_per_token"] == 512 * 1024
    found = record(*options, "--device", "h100")
    assert found["step_time"]["fixed"] == pytest.approx(6_738_415_616 * 2 / 3.35e12, rel=0.05)
    code, out, _ = run(*options, "--device", "h100")
    assert (code, "llama-2-7b at the full rates of h100" in " ".join(out.split())) == (0, True)


def test_a_config_is_a_model_too(record, trace, tmp_path):
    write_json(tmp_path / "config.json", tiny_config())
    found = record("--trace", trace, "--model", tmp_path, "--kv-cache-gib", 0.001, "--dtype", "float32")
    assert found["bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_swapped_bytes_are_told_where_a_token_has_bytes(record, trace):
    options = ("--trace", trace, "--strategies", "paged", "--preemption", "swap", "--block-sizes", 8)
    of_tokens = runs_of(record(*options, *POOL))["paged 8, swap"]
    assert of_tokens["swapped_blocks"] > 0 < of_tokens["preemptions"]
    assert of_tokens["swapped_bytes"] is None
    of_model = runs_of(record(*options, "--model", "llama-2-7b", "--kv-cache-gib", 0.15))["paged 8, swap"]
    assert of_model["swapped_bytes"] == of_model["swapped_blocks"] * 8 * 512 * 1024 > 0


# -- bad input ---------------------------------------------------------------------------------------------

ROW = "0,30,20\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        (HEAD, "no requests"),
        ("when,prompt_tokens,output_tokens\n0,1,1\n", "line 1: "),
        (HEAD + ROW + "1,0,5\n", "line 3: prompt_tokens='0'"),
        (HEAD + ROW + "1,5,-2\n", "line 3: output_tokens='-2'"),
        (HEAD + ROW + "1,nan,2\n", "line 3: prompt_tokens='nan'"),
        (HEAD + ROW + "nan,5,2\n", "line 3: arrival_s='nan'"),
        (HEAD + "5,30,20\n" + "4,30,20\n", "line 3: arrival_s"),
        (HEAD + ROW + "1,5\n", "line 3: "),
        (HEAD + ROW + "1,300,102\n", "line 3: "),
    ],
)
def test_a_bad_line_is_named_with_its_reason(text, told, run, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    code, out, err = run("--trace", path, *POOL)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert told in err


def test_bad_lines_are_skipped_counted_and_told_where_that_is_asked_for(run, record, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + ROW + "1,0,5\n" + "2,300,200\n" + "3,nan,1\n" + "2.5,30,20\n" + "4,30,20\n")
    found = record("--trace", path, *POOL, "--skip-invalid")
    assert found["comparisons"][0]["accepted"] == 3
    assert found["requests"]["skipped"] == 3
    code, out, _ = run("--trace", path, *POOL, "--skip-invalid")
    assert (code, "3 skipped, the first of them line 3: " in out) == (0, True)


def test_made_up_lengths_that_do_not_fit_are_left_out_and_counted(record):
    found = record(
        "--mean-tokens",
        "300,60",
        "--std-tokens",
        "100,20",
        *POOL,
        "--num-requests",
        50,
        "--strategies",
        "paged",
    )
    assert found["requests"]["skipped"] + found["comparisons"][0]["accepted"] == 50
    assert found["requests"]["skipped"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--block-sizes", "0"), "--block-sizes='0': expected whole numbers of tokens from 1"),
        (("--block-sizes", "16,x"), "--block-sizes='16,x': expected"),
        (("--block-sizes", ""), "--block-sizes='': expected"),
        (("--block-sizes", "9999999"), "--block-sizes='9999999': expected"),
        (("--block-sizes", "9" * 5000), "expected whole numbers of tokens from 1"),
        (("--strategies", "best"), "--strategies='best': expected all, or one or more of paged, contig"),
        (("--strategies", "paged,"), "--strategies='': expected"),
        (("--preemption", "never"), "--preemption='never': expected all, or one or more of recompute"),
        (("--reservation", "-5"), "--reservation='-5': expected"),
        (("--reservation", "1e9"), "--reservation='1e9': expected"),
        (("--step-time", "fast"), "--step-time='fast': expected one to four numbers of seconds"),
        (("--step-time", "1,2,3,4,5"), "--step-time='1,2,3,4,5': expected"),
        (("--step-time", "0"), "fixed=0.0: expected more than 0 seconds"),
        (("--step-time", "1,-1"), "per_token=-1.0: expected a number of seconds, from 0"),
        (("--step-time", "nan"), "fixed=nan"),
        (("--n", 0), "samples=0: expected 1 or more"),
        (("--n", 2, "--beam-width", 2), "give one"),
        (("--n", 65, "--max-num-seqs", 64), "--n or --beam-width=65: expected 64 (--max-num-seqs) at most"),
        (("--share", 0), "share=0.0: expected a number over 0"),
        (("--share", 2), "share=2.0"),
        (("--speed", 0), "speed=0.0: expected a number, 1e-09 or more, or inf"),
        (("--speed", "nan"), "speed=nan"),
        (("--first", 0), "first=0: expected 1 or more"),
        (
            ("--plot", "/dev/null/plots"),
            "--plot='/dev/null/plots': expected a directory to draw",
        ),
        (("--pool-tokens", 0), "pool_tokens=0: expected from 1 to 1,099,511,627,776"),
        (("--pool-tokens", 10**20), "expected from 1 to 1,099,511,627,776"),
        (("--step-time", "1,1e7"), "per_token=10000000.0: expected a number of seconds, from 0 to 1,000,000"),
        (("--swap-space-gib", -1), "swap_space_gib=-1.0: expected"),
        (("--swap-space-gib", 1e30), "swap_space_gib=1e+30: expected"),
        (("--max-num-seqs", 0), "max_num_seqs=0"),
        (("--max-num-batched-tokens", 0), "max_num_batched_tokens=0"),
        (("--json", "--csv"), "--json and --csv: give one"),
        (("--mean-tokens", 5), "--trace and --mean-tokens"),
        (("--device", "h100"), "--device='h100': expected --model beside it"),
        (("--kv-cache-gib", 1), "--kv-cache-gib=1.0: expected --model beside it"),
        (("--max-model-len", 64), "--max-model-len=64: expected --model beside it"),
        (("--dtype", "float16"), "--dtype='float16': expected --model beside it"),
        (("--kv-dtype", "float16"), "--kv-dtype='float16': expected --model beside it"),
        (("--memory-fraction", "nan"), "--memory-fraction=nan: expected --model beside it"),
        (("--swap-space-gib", 1), "--swap-space-gib=1.0: expected --model beside it"),
        (("--num-requests", 5), "--num-requests=5: expected --mean-tokens beside it"),
        (("--requests-per-second", 5), "--requests-per-second=5.0: expected --mean-tokens beside it"),
        (("--seed", 5), "--seed=5: expected --mean-tokens beside it"),
        (("--model", "llama-2-7b"), "--model and --pool-tokens: both say how large the memory is"),
    ],
)
def test_a_wrong_option_is_one_line(options, told, run, trace):
    code, out, err = run("--trace", trace, *POOL, *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (POOL, "how long are the requests? Give --trace FILE, or --mean-tokens"),
        (("--mean-tokens", 50), "how much memory is there? Give --model and --device, or --pool-tokens"),
        (("--mean-tokens", 50, "--model", "llama-2-7b"), "Give --device or --kv-cache-gib"),
        (("--mean-tokens", 50, "--model", "llama-9", "--device", "h100"), "no name that is known here"),
        (("--mean-tokens", 50, "--model", "llama-2-7b", "--device", "h300"), "device='h300': expected"),
        (("--mean-tokens", 50, "--model", "llama-2-70b", "--device", "l4"), "no room for a pool"),
        (("--mean-tokens", 50, "--num-requests", 0, *POOL), "num_requests=0"),
        (
            ("--mean-tokens", 50, "--num-requests", 10**11, *POOL),
            "num_requests=100000000000: expected from 1 to",
        ),
        (("--mean-tokens", 50, "--seed", -1, *POOL), "seed=-1: expected 0 or more"),
        (("--mean-tokens", 50, "--std-tokens", 1e200, *POOL), "std=7.07"),
        (("--mean-tokens", 50, "--requests-per-second", 0, *POOL), "requests_per_second=0.0"),
        (
            ("--mean-tokens", 50, "--requests-per-second", 1e-308, *POOL),
            "expected a number from 1e-09 to 1e+09",
        ),
        (
            ("--mean-tokens", 50, "--model", "llama-2-7b", "--kv-cache-gib", 1e30),
            "kv_cache_gib=1e+30: expected",
        ),
        (
            (*MODEL, "--kv-cache-gib", 1, "--preemption", "swap", "--swap-space-gib", 0),
            "preemption_mode='swap' and swap_space_gib=0: there is nowhere to swap to",
        ),
    ],
)
def test_what_is_missing_or_impossible_is_one_line(arguments, told, run):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert told in err


# -- the command -------------------------------------------------------------------------------------------


def test_options_are_kebab_case():
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    output = runner.invoke(cli.app, ["simulate", "--help"]).output
    options = {word.strip(",") for word in output.split() if word.startswith("--")}
    wanted = "trace mean-tokens pool-tokens model device block-sizes strategies reservation preemption n"
    wanted += " beam-width share prefix-caching step-time json csv plot skip-invalid speed first"
    assert {f"--{name}" for name in wanted.split()} <= options
    assert not [option for option in options if "_" in option]


def test_a_simulation_imports_no_jax_and_no_matplotlib(trace):
    code = (
        "import sys; from paged_jax.cli import main\n"
        f"sys.argv = ['paged-jax', 'simulate', '--trace', {str(trace)!r}, '--pool-tokens', '400']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sorted({'jax', 'flax', 'chex', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert done.stderr == ""
