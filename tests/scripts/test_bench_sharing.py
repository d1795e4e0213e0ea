"""The benchmark of sharing: its made-up searches count blocks as they should, and both sides do the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import reference
from support.checkpoints import write_glassllm

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_sharing
from beam_speed import NEW_TOKENS, Case, Comparison, OurSearches, Run, TheirSearches, compare
from made_up_searches import BLOCK_SIZE, Saving, run_made_up
from request_lengths import LogNormal, cut_prompt, read_lengths
from shared_blocks import Saved, made_up_lengths, memory_table

from paged_jax import LLM

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench_sharing.py"
PROMPTS = [[5 + (7 * at + step) % 40 for step in range(20)] for at in range(2)]


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def glass_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("glass")
    write_glassllm(path)
    return path


@pytest.fixture(scope="module")
def ours(glass_path):
    options = {"num_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 64, "warm_up": False}
    with LLM(glass_path, use_tqdm=False, **options) as llm:
        yield OurSearches(llm, "float32")


@pytest.mark.parametrize(("prompt", "answer", "n"), [(1, 40, 2), (16, 1, 3), (33, 50, 4), (48, 17, 6)])
def test_samples_share_the_full_blocks_of_their_prompt(prompt, answer, n):
    def blocks(tokens):
        return -(-tokens // BLOCK_SIZE)

    full = prompt // BLOCK_SIZE
    own = sum(blocks(prompt + step) - full for step in range(1, answer))
    saving = run_made_up(np.array([(prompt, answer)]), "samples", n)
    assert saving.logical_block_steps == n * sum(blocks(prompt + step) for step in range(answer))
    assert saving.block_steps == blocks(prompt) + (answer - 1) * full + n * own
    assert saving.copies == (n - 1 if prompt % BLOCK_SIZE and answer > 1 else 0)


def test_beams_share_more_than_samples_and_no_more_than_all():
    lengths = np.array([(20, 40), (70, 30), (5, 60)])
    shares = [run_made_up(lengths, "beams", width).share for width in (1, 2, 4, 6)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    for width, share in zip((2, 4, 6), shares[1:], strict=True):
        assert run_made_up(lengths, "samples", width).share < share < 1 - 1 / width


def test_made_up_searches_are_the_same_each_time():
    lengths = np.array([(20, 40), (70, 30)])
    assert run_made_up(lengths, "beams", 4) == run_made_up(lengths, "beams", 4)


def test_made_up_lengths_have_the_means_that_they_are_said_to_have():
    for lengths, means in zip(made_up_lengths(100), [(19.3, 58.5), (161.3, 338.0)], strict=True):
        assert np.allclose(lengths.tokens.mean(axis=0), means, rtol=0.01)
        assert lengths.tokens.min() >= 1
    lengths = LogNormal(20, 0.0).sample(7, np.random.default_rng(0))
    assert lengths.tolist() == [20] * 7


def test_lengths_are_read_from_a_trace(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,12,3\n0.5,40,7\n")
    assert read_lengths(trace, 2).tolist() == [[12, 3], [40, 7]]
    with pytest.raises(SystemExit, match="2 requests; give --requests 2 or fewer"):
        read_lengths(trace, 3)


def test_prompts_of_different_indices_do_not_begin_alike():
    prompts = [cut_prompt(list(range(100)), 150, index) for index in range(8)]
    assert {len(prompt) for prompt in prompts} == {150}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 8


def test_the_memory_part_runs_through_without_a_model(tmp_path):
    trace = tmp_path / "chats.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "30,20\n" * 3)
    done = run("--only", "memory", "--requests", 3, "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["memory"]
    assert len(found) == 6
    for shares in found.values():
        assert list(shares) == ["2", "4", "6"]
        assert list(shares.values()) == sorted(shares.values())


def test_the_published_figures_stand_beside_ours(capsys):
    alpaca = made_up_lengths(4)[0]
    savings = [Saving(9, 10, 4), Saving(3, 4, 40), Saving(1, 2, 400)]
    bench_sharing.print_table(memory_table([Saved(alpaca, "beams", savings)], 4))
    row = capsys.readouterr().out
    for cell in ("10.0", "25.0", "50.0", "37.6 53.1 55.2", "1 10 100"):
        assert cell in row


def test_the_parts_of_our_time_come_to_the_whole(ours):
    (comparison,) = compare([(Case(2, 20, 4), PROMPTS)], [ours], [], rounds=1)
    found = comparison.runs["paged_jax float32"]
    assert [[len(ids) for ids in beams] for beams in found.hypotheses] == [[NEW_TOKENS] * 4] * 2
    prefill, decode, host, saved = found.parts
    assert min(prefill, decode, host) > 0
    assert 0.5 * found.seconds < prefill + decode + host <= found.seconds
    assert 0 < saved < 0.75
    assert comparison.ratio() is None
    assert comparison.same is None
    assert bench_sharing.goals([comparison]) == {}
    assert len(bench_sharing.cells_of(comparison)) == 13


def test_the_best_of_each_side_is_compared():
    ids = [[[1, 2], [3, 4]]]
    runs = {
        "paged_jax float32": Run(4.0, ids),
        "paged_jax bfloat16": Run(2.0, ids),
        "transformers float32, all at a time": Run(9.0, ids),
        "transformers float32, 1 at a time": Run(8.0, [[[1, 2], [3, 5]]]),
        "transformers bfloat16, all at a time": Run(5.0, ids),
    }
    comparison = Comparison(Case(1, 1004, 8), runs)
    assert (comparison.ratio(), comparison.ratio("float32")) == (2.5, 2.0)
    assert comparison.same == (1, 2)
    assert list(bench_sharing.goals([comparison]).values()) == [False]


@pytest.mark.reference
def test_both_sides_find_the_same_hypotheses(glass_path, ours):
    theirs = [TheirSearches(reference.load_model(glass_path), "float32", at_once) for at_once in (None, 1)]
    (comparison,) = compare([(Case(2, 20, 4), PROMPTS)], [ours], theirs, rounds=1)
    assert len(comparison.runs) == 3
    assert comparison.same == (8, 8)
    assert comparison.ratio() > 0
    (alone,) = compare([(Case(1, 20, 4), PROMPTS[:1])], [ours], theirs, rounds=1)
    assert len(alone.runs) == 2
