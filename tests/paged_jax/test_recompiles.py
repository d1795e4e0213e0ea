"""After the warm-up nothing compiles, whatever comes."""

import random

import chex
import jax
import pytest

from paged_jax import SamplingParams

from .test_chaos import assert_nothing_is_held, make_engine, random_requests, run_with_arrivals

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts what JAX compiles, by its own events."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, seconds, **kwargs):
        self.count += event == COMPILED


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 16, "batch_invariant": True}],
    ids=["default", "batch_invariant"],
)
def test_two_hundred_random_requests_compile_nothing(options, glass_path, compilations, monkeypatch):
    engine = make_engine(glass_path, num_blocks=41, preemption_mode="swap", **options)
    runner = engine.runner
    traced = chex.assert_max_traces(lambda key: None, n=runner.num_programs)
    trace = runner.trace

    def counted(key, cache):
        jax.jit(traced, static_argnums=0)(key)
        return trace(key, cache)

    chex.clear_trace_counter()
    monkeypatch.setattr(runner, "trace", counted)
    warm_up = runner.warm_up()
    assert warm_up.num_programs == runner.num_programs == runner.compilations <= 16
    before = compilations.count
    assert before > 0
    requests = random_requests(11, 200)
    outputs, aborted = run_with_arrivals(engine, requests, 11)
    assert len(outputs) + len(aborted) == 200
    totals = engine.totals
    assert min(totals.preempted, totals.swapped_in_bytes, totals.prefix_hit_tokens, len(aborted)) > 0
    assert compilations.count == before
    assert runner.compilations == runner.num_programs
    assert_nothing_is_held(engine)
    engine.close()


def test_sixteen_programs_by_default_and_a_program_that_is_missing_is_counted(glass_path, compilations):
    engine = make_engine(glass_path, num_blocks=60, max_num_seqs=64, max_num_batched_tokens=2048)
    assert engine.runner.num_programs <= 16
    assert engine.runner.compilations == 0
    jax.clear_caches()  # an engine of equal sizes may have compiled one of the three in this process
    before = compilations.count
    prompts = random.Random(0).choices(range(4, 1024), k=5)
    engine.add(engine.make_request("r", {"prompt_token_ids": prompts}, SamplingParams(max_tokens=2)))
    while engine.has_unfinished:
        engine.step()
    assert engine.runner.compilations == 3  # place, prefill, decode
    assert compilations.count >= before + 3
    engine.close()
