"""An exception at every named point of a step: the books stay right, and the answers are the same."""

import pytest

from paged_jax import SamplingParams

from .test_chaos import assert_nothing_is_held, make_engine, tables

POINTS = {
    "allocation": lambda engine: (engine.allocator, "allocate"),
    "free": lambda engine: (engine.allocator, "free"),
    "schedule": lambda engine: (engine.scheduler, "_admit"),
    "pack": lambda engine: (engine.runner, "_pack"),
    "program": lambda engine: (engine.runner, "_launch"),
    "fetch": lambda engine: (engine.runner, "_fetch"),
    "update": lambda engine: (engine.scheduler, "update"),
    "text": lambda engine: (engine, "_take_texts"),
}
PROMPTS = ["Once upon a time", "The Queen", "Once upon a time there was", "said the", "A", "Off with"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=11, ignore_eos=True, stop=["zz"]),
]


class Fault:
    """Raises at the given call of a method, before or after the method has done its work."""

    def __init__(self, owner, name, at, error, after):
        self.owner, self.name, self.at, self.error, self.after = owner, name, at, error, after
        self.method, self.calls = getattr(owner, name), 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls != self.at:
            return self.method(*args, **kwargs)
        if self.after:
            self.method(*args, **kwargs)
        raise self.error


def add_all(engine):
    for index, prompt in enumerate(PROMPTS):
        engine.add(engine.make_request(str(index), prompt, PARAMS[index % 2]))


def run(engine):
    outputs = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id] = output
        engine.allocator.check(tables(engine))
    assert_nothing_is_held(engine)
    return outputs


@pytest.fixture(scope="module", params=["recompute", "swap"])
def engine(request, glass_path):
    engine = make_engine(
        glass_path, num_blocks=13, max_num_seqs=4, max_num_batched_tokens=32, preemption_mode=request.param
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine):
    add_all(engine)
    outputs = run(engine)
    assert engine.totals.preempted > 0
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_costs_nobody_a_token(point, at, error, engine, expected, monkeypatch):
    owner, name = POINTS[point](engine)
    if hasattr(type(owner), "__slots__"):
        # An instance of a class with slots takes no attribute of its own: patch the class for the while.
        fault = Fault(owner, name, at, error, after=False)
        monkeypatch.setattr(type(owner), name, lambda self, *args, **kwargs: fault(*args, **kwargs))
    else:
        fault = Fault(owner, name, at, error, after=at % 2 == 0)
        monkeypatch.setattr(owner, name, fault)
    add_all(engine)
    outputs, failed = {}, 0
    while engine.has_unfinished:
        try:
            for output in engine.step():
                outputs[output.request_id] = output
        except type(error):
            failed += 1
        engine.allocator.check(tables(engine))
    assert failed == 1
    assert_nothing_is_held(engine)
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == expected
    assert not engine._texts


def test_pools_that_a_failed_program_took_are_made_anew(engine, expected, monkeypatch):
    """The cache is donated to a call: one that fails has taken it."""
    launch = engine.runner._launch

    def fails(packed):
        launch(packed)
        for pool in engine.runner.cache:
            pool.k.delete()
        raise RuntimeError("lost")

    add_all(engine)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_launch", fails)
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
    assert {name: output.outputs[0].token_ids for name, output in run(engine).items()} == expected
