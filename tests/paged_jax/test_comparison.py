"""Strategies side by side: which runs there are, on which requests, and figures that can be told before."""

import numpy as np
import pytest

from paged_jax.comparison import PREEMPTS, STRATEGIES, Setting, Variant, run_all, run_variant, variants
from paged_jax.step_time import StepTime
from paged_jax.workload import Sharing, make_workload

from .test_workload import trace_of

TIME = StepTime(fixed=0.01, per_token=1e-4)
ALONE = Sharing()


def setting_of(slots, **more):
    return Setting(slots, more.pop("step_time", TIME), max_num_seqs=more.pop("max_num_seqs", 100), **more)


def work_of(*rows, slots, sharing=ALONE, reservation=None, sizes=(4,), **more):
    return make_workload(
        trace_of(*rows, **more),
        slots=slots,
        block_sizes=list(sizes),
        reservations=["max", "pow2", "oracle"],
        reservation=reservation,
        sharing=sharing,
        with_token_ids=bool(more),
    )


def figures(work, setting, *chosen):
    return {run.summary.name: run.summary for run in run_all(chosen, work, setting)}


# -- which runs --------------------------------------------------------------------------------------------


def test_every_strategy_at_every_block_size_with_and_without_holes():
    names = [one.name for one in variants(STRATEGIES, [8, 16], ["recompute", "queue"])]
    assert names == [
        "paged 8, recompute",
        "paged 8, queue",
        "paged 16, recompute",
        "paged 16, queue",
        "contiguous-max",
        "contiguous-pow2",
        "contiguous-pow2, no holes",
        "contiguous-oracle",
        "contiguous-oracle, no holes",
    ]


ROWS = [(0.02 * number, 5 + 3 * (number % 7), 20 + number % 11) for number in range(30)]


def test_what_recomputed_runs_again_for_free_and_only_that():
    setting, work = setting_of(200, host_tokens=10_000), work_of(*ROWS, slots=200)
    runs = list(run_all(list(variants(["paged"], [4], PREEMPTS)), work, setting))
    by_name = {run.summary.name: run.summary for run in runs}
    assert list(by_name) == [
        "paged 4, recompute",
        "paged 4, recompute free",
        "paged 4, swap",
        "paged 4, auto",
        "paged 4, queue",
    ]
    cost, free = by_name["paged 4, recompute"], by_name["paged 4, recompute free"]
    assert free.recomputed_tokens > 0
    assert free.tokens_per_second > cost.tokens_per_second
    assert by_name["paged 4, swap"].swapped_blocks > 0
    assert by_name["paged 4, queue"].preemptions == 0
    roomy = setting_of(10_000)
    assert len(list(run_all(list(variants(["paged"], [4], ["recompute"])), work, roomy))) == 1


def test_all_answer_the_same_requests_whole():
    setting, work = setting_of(200, host_tokens=10_000), work_of(*ROWS, slots=200)
    for run in run_all(list(variants(STRATEGIES, [4, 16], PREEMPTS)), work, setting):
        assert run.summary.requests == 30
        assert run.summary.prompt_tokens == sum(row[1] for row in ROWS), run.summary.name
        assert run.summary.generated_tokens == sum(row[2] for row in ROWS), run.summary.name


# -- figures that can be told beforehand -------------------------------------------------------------------


def test_as_many_run_at_once_as_their_reservations_fit():
    """64 requests that store 16 tokens each, in 256 slots; one tells that 64 are to be reserved."""
    work = work_of((0, 8, 56), *((0, 8, 9),) * 64, slots=256, reservation=64)
    setting = setting_of(256, step_time=StepTime(fixed=1.0))
    found = figures(work, setting, *variants(STRATEGIES, [4], ["queue"]))
    assert found["contiguous-max 64"].concurrency_peak == 4
    assert found["contiguous-oracle"].concurrency_peak == 1 + (256 - 63) // 16
    assert found["paged 4, queue"].concurrency_peak == 1 + (256 - 64) // 16
    assert found["contiguous-pow2"].concurrency_peak == 256 // (8 + 16)  # when the long one has ended


def test_a_range_can_not_be_shared_so_each_sample_reserves_for_itself():
    work = work_of((0, 21, 4), slots=400, sharing=Sharing(samples=3), reservation=100)
    setting = setting_of(400, step_time=StepTime(fixed=1.0))
    found = figures(work, setting, *variants(["paged", "contiguous-max"], [4], ["recompute"]))
    paged, reserved = found["paged 4, recompute"], found["contiguous-max 100"]
    assert (paged.concurrency_peak, reserved.concurrency_peak) == (3, 3)
    assert (paged.prompt_tokens, reserved.prompt_tokens) == (21, 63)
    assert (paged.generated_tokens, reserved.generated_tokens) == (12, 12)
    assert paged.cow_copies == 2  # the last prompt token is alone in a block, which one of three keeps
    (run,) = run_all([Variant("contiguous-max")], work, setting)
    assert run.series.peak("reserved") == 300
    (run,) = run_all([Variant("paged", 4)], work, setting)
    assert run.series.peak("reserved") == 20 + 3 * 4


def test_a_beam_search_runs_its_beams_and_copies():
    work = work_of((0, 22, 12), slots=400, sharing=Sharing(beam_width=4))
    found = figures(work, setting_of(400), *variants(STRATEGIES, [4], ["recompute"]))
    paged = found["paged 4, recompute"]
    assert (paged.concurrency_peak, paged.requests) == (4, 1)
    assert paged.cow_copies > 0
    assert found["contiguous-oracle"].concurrency_peak == 4


def test_prompts_that_begin_alike_are_found_where_that_is_asked_for():
    rows = [(float(number), 33, 2) for number in range(4)]
    ids = {"hash_ids": ((1, 2, 3),) * 4, "hash_block_size": 16}
    for caching, rate in ((True, 3 * 32 / (4 * 33)), (False, 0.0)):
        work = work_of(*rows, slots=400, sizes=(16,), **ids)
        run = run_variant(Variant("paged", 16), work, setting_of(400, prefix_caching=caching))
        assert run.summary.prefix_hit_rate == pytest.approx(rate)


def test_blocks_waste_only_in_the_last_one():
    """One request of 4 + 13 tokens: of 16 that are stored at its end the last block is full."""
    (run,) = run_all([Variant("paged", 4)], work_of((0, 4, 13), slots=64), setting_of(64))
    held = np.arange(4, 17)
    assert run.series.written.tolist() == held.tolist()
    assert run.series.reserved.tolist() == (-(-held // 4) * 4).tolist()


def test_a_bounded_number_of_sequences_bounds_all():
    work = work_of(*ROWS, slots=2000)
    for run in run_all(
        list(variants(STRATEGIES, [4], ["recompute"])), work, setting_of(2000, max_num_seqs=5)
    ):
        assert run.summary.concurrency_peak == 5


def test_progress_is_told_by_variant():
    told = []
    work, chosen = work_of(*ROWS, slots=200), list(variants(STRATEGIES, [4], ["recompute"]))
    runs = list(run_all(chosen, work, setting_of(200), lambda one, ended: told.append((one.name, ended))))
    assert len(runs) == len(chosen) + 1
    for one in chosen:
        ended = [count for name, count in told if name == one.name]
        assert ended == sorted(ended)
        assert ended[-1] == 30


def test_a_paged_run_has_a_block_size():
    with pytest.raises(ValueError, match="block_size=None: expected a number of tokens"):
        run_variant(Variant("paged"), work_of((0, 1, 1), slots=9), setting_of(9))
