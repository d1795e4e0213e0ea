"""The benchmarks of the simulator: a line is found again in made-up steps, and every row is of real runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_glassllm

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_simulate import BLOCK_SIZE, growth, simulated
from bench_step_time import TimedStep, fit

from paged_jax.request_trace import Lengths, made_up_trace

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


# -- the line through steps --------------------------------------------------------------------------------


def made_up_steps(fixed, per_token, per_kv_token, *, noise=0.0):
    rng = np.random.default_rng(3)
    tokens = np.where(np.arange(200) % 5, rng.integers(1, 16, 200), rng.integers(100, 500, 200))
    kv_tokens = rng.integers(100, 9000, 200)
    seconds = fixed + per_token * tokens + per_kv_token * kv_tokens
    seconds = seconds * rng.uniform(1 - noise, 1 + noise, 200)
    return [
        TimedStep(*row) for row in zip(tokens.tolist(), kv_tokens.tolist(), seconds.tolist(), strict=True)
    ]


@pytest.mark.parametrize("line", [(0.01, 2e-4, 3e-7), (0.005, 0.0, 1e-6), (1e-3, 1e-3, 0.0)])
def test_the_line_is_found_again(line):
    found = fit(made_up_steps(*line))
    got = (found.time.fixed, found.time.per_token, found.time.per_kv_token)
    np.testing.assert_allclose(got, line, rtol=1e-6, atol=1e-10)
    assert found.explained == pytest.approx(1)
    assert found.median_error < 1e-6


def test_noise_moves_it_a_little_and_is_told():
    found = fit(made_up_steps(0.01, 2e-4, 3e-7, noise=0.1))
    assert found.time.per_token == pytest.approx(2e-4, rel=0.1)
    assert 0.9 < found.explained < 1
    assert 0.02 < found.median_error < 0.08


def test_no_coefficient_is_negative_where_more_tokens_took_less_time():
    steps = [TimedStep(tokens, 100 * tokens, 1 - 0.001 * tokens) for tokens in range(1, 50)]
    line = fit(steps).time
    assert (line.per_token, line.per_kv_token) == (0, 0)
    assert line.fixed == pytest.approx(0.975)


# -- how fast ----------------------------------------------------------------------------------------------


def test_a_run_counts_every_token_and_both_ways_are_timed():
    trace = made_up_trace(20, prompt=Lengths(50, 9), output=Lengths(30, 5), requests_per_second=4, seed=1)
    found = simulated("a", trace, 10_000, steps_too=True, times=1)
    assert found.generated_tokens == trace.output_tokens.sum()
    assert found.prompt_tokens == trace.prompt_tokens.sum()
    assert 0 < found.mean_running < 20
    assert found.jumping > 0 < found.stepping
    assert simulated("a", trace, 100 * BLOCK_SIZE, steps_too=False, times=1).stepping is None


def test_tables_grow_by_blocks_and_by_tokens():
    found = growth(16)
    assert found.by_block > 0 < found.by_token


def test_the_simulators_speed_is_printed_for_traces_too(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,50,20\n0.1,70,30\n")
    done = run("bench_simulate.py", "--quick", "--json", "--trace", path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [one["block_size"] for one in found["growth"]] == [8, 16, 32, 128]
    *_, mine = found["runs"]
    assert (mine["name"], mine["generated_tokens"], mine["prompt_tokens"]) == ("mine", 50, 120)
    table = run("bench_simulate.py", "--quick")
    assert (table.returncode, "whole simulations" in table.stdout, "4 at once" in table.stdout) == (
        0,
        True,
        True,
    )


def test_the_option_that_is_printed_is_one_that_the_simulator_takes(tmp_path):
    write_glassllm(tmp_path)
    done = run("bench_step_time.py", "--model", tmp_path, "--quick", "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "simulated / measured" in done.stdout
    *option, values = done.stdout.splitlines()[-1].split()
    assert option == ["--step-time"]
    simulate = ("-m", "paged_jax", "simulate", "--mean-tokens", "9", "--pool-tokens", "400", "--json")
    again = subprocess.run(
        [sys.executable, *simulate, *option, values], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(again.stdout)["step_time"]["fixed"] == float(values.split(",")[0]) > 0
