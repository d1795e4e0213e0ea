"""The simulator says what the engine does, and taking quiet stretches at once changes nothing of it."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_jax import SamplingParams
from paged_jax.sim_request import SimRequest
from paged_jax.simulator import PagedOptions, Simulation
from paged_jax.step_time import StepTime

from .conftest import load

TIME = StepTime(fixed=0.01, per_token=1e-4, per_kv_token=1e-6)


def simulate(requests, options, *, jumps=True, step_time=TIME, **more):
    return Simulation(requests, options, step_time, jumps=jumps, **more).run()


def columns(outcome):
    series = outcome.series
    return np.stack([series.running, series.waiting, series.reserved, series.written, series.ahead])


def numbers(outcome):
    """Everything of an outcome but its series and how it was come by."""
    skipped = ("series", "num_windows", "queue_delays", "latencies")
    return {name: value for name, value in vars(outcome).items() if name not in skipped}


def assert_same(fast, slow):
    assert numbers(fast) == numbers(slow)
    np.testing.assert_array_equal(columns(fast), columns(slow))
    np.testing.assert_allclose(fast.series.start, slow.series.start)
    np.testing.assert_allclose(fast.series.seconds, slow.series.seconds)
    np.testing.assert_allclose(fast.queue_delays, slow.queue_delays, atol=1e-9)
    np.testing.assert_allclose(sorted(fast.latencies), sorted(slow.latencies))


lengths = st.tuples(
    st.floats(0, 2, allow_nan=False), st.integers(1, 40), st.integers(1, 60), st.integers(1, 3)
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    given=st.lists(lengths, min_size=1, max_size=12),
    num_blocks=st.integers(8, 80),
    block_size=st.sampled_from([1, 2, 4, 16]),
    rows=st.integers(3, 8),
    caching=st.booleans(),
    mode=st.sampled_from(["recompute", "swap"]),
)
def test_jumping_over_quiet_steps_equals_taking_each(given, num_blocks, block_size, rows, caching, mode):
    requests = [
        SimRequest(f"{index}", arrival, prompt, answer, tuple(range(prompt)) if caching else None, samples)
        for index, (arrival, prompt, answer, samples) in enumerate(given)
    ]
    options = PagedOptions(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=16,
        max_prefill_seqs=2,
        preemption=mode,
        host_blocks=1000,
        prefix_caching=caching,
    )
    fast, slow = (simulate(requests, options, jumps=jumps) for jumps in (True, False))
    assert_same(fast, slow)
    assert len(fast.latencies) + len(fast.refused) == len(requests)


def test_quiet_stretches_are_found():
    requests = [SimRequest(f"{index}", 3.0 * index, 50, 400) for index in range(8)]
    outcome = simulate(requests, PagedOptions(num_blocks=400))
    assert outcome.num_windows >= 8
    assert outcome.generated_tokens == 8 * 400
    assert_same(outcome, simulate(requests, PagedOptions(num_blocks=400), jumps=False))


def test_a_request_that_can_never_fit_is_refused_and_the_others_run():
    requests = [SimRequest("large", 0.0, 200, 5), SimRequest("small", 0.0, 10, 5)]
    outcome = simulate(requests, PagedOptions(num_blocks=9, block_size=16))
    assert (outcome.refused, len(outcome.latencies)) == (["large"], 1)


def test_time_is_what_the_steps_take():
    step_time = StepTime(fixed=1.0, per_token=0.1, per_kv_token=0.01)
    series = simulate([SimRequest("a", 5.0, 4, 3)], PagedOptions(num_blocks=9), step_time=step_time).series
    # 3 prompt tokens and the decode of the fourth, then one token a step.
    assert series.start[0] == 5.0
    np.testing.assert_allclose(series.seconds, [1 + 0.4 + 0.01 * (3 + 4), 1.15, 1.16])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_the_engine_does_the_same_step_by_step(mode, caching, tiny_path):
    """A model that computes, in a pool far too small, and the simulator: the same blocks in every step."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, 60, int(size)).tolist() for size in rng.integers(1, 30, 14)]
    prompts[5] = prompts[2] + [9]
    answers = rng.integers(1, 25, 14).tolist()
    limits = {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 32}
    told, simulated = [], []
    with load(
        tiny_path, preemption_mode=mode, enable_prefix_caching=caching, swap_space_gib=0.01, **limits
    ) as llm:
        engine, swap = llm.engine, llm.engine.scheduler.preemption.space.num_blocks
        costs = engine.scheduler.preemption.costs
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            engine.add(engine.make_request(f"{index}", {"prompt_token_ids": prompt}, params))
        generated = {}
        while engine.has_unfinished:
            for output in engine.step():
                generated[output.request_id] = output.outputs[0].token_ids
            told.append((engine.last_step.blocks, engine.last_step.prefill_tokens))
        preempted = engine.totals.preempted
    requests = [
        SimRequest(f"{index}", 0.0, len(prompt), answer, tuple(prompt))
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    options = PagedOptions(
        block_size=4,
        max_prefill_seqs=6,
        preemption=mode,
        host_blocks=swap if mode == "swap" else 0,
        prefix_caching=caching,
        costs=costs,
        **limits,
    )
    outcome = simulate(
        requests,
        options,
        jumps=False,
        on_step=lambda schedule, blocks: simulated.append(
            (blocks, schedule.num_tokens - len(schedule.decode))
        ),
    )
    assert preempted == outcome.preemptions > 0
    assert simulated == told
