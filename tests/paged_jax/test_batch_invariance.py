"""batch_invariant=True: the same bits whatever shares the batch, in whatever order, from whatever cache."""

import random

import pytest

from paged_jax import SamplingParams

from .test_chaos import assert_nothing_is_held, make_engine

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=9, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=4, max_tokens=16, ignore_eos=True, logprobs=0),
]


def prompts(count):
    """Prompts of 1 to 60 ids; every other one goes on from a beginning that they share."""
    rng = random.Random(5)
    start = [rng.randrange(4, 1024) for _ in range(40)]
    made = [[rng.randrange(4, 1024) for _ in range(rng.randint(1, 20))] for _ in range(count)]
    return [start[: rng.randint(20, 40)] + ids if i % 2 else ids for i, ids in enumerate(made)]


def run(engine, order, together):
    """Each request's ids and logprobs, bit for bit; all at once, or one after the other."""
    given, got = prompts(len(order)), {}
    for index in order:
        prompt = {"prompt_token_ids": given[index]}
        engine.add(engine.make_request(str(index), prompt, PARAMS[index % len(PARAMS)]))
        while engine.has_unfinished and not together:
            got |= taken(engine.step())
    while engine.has_unfinished:
        got |= taken(engine.step())
    assert_nothing_is_held(engine)
    return got


def taken(outputs):
    return {
        output.request_id: (
            output.outputs[0].token_ids,
            [
                {token: entry.logprob.hex() for token, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
        )
        for output in outputs
    }


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_bits_are_the_same_in_company_and_alone(mode, glass_path):
    count = 14
    options = {"batch_invariant": True, "max_num_batched_tokens": 16, "logprobs_mode": mode}
    alone = make_engine(glass_path, num_blocks=300, enable_prefix_caching=False, **options)
    expected = run(alone, range(count), together=False)
    alone.close()

    crowded = make_engine(glass_path, num_blocks=34, **options)
    assert crowded.runner.num_programs <= 6
    for seed in (1, 2):
        order = random.Random(seed).sample(range(count), count)
        assert run(crowded, order, together=True) == expected
    totals = crowded.totals
    assert min(totals.preempted, totals.swapped_in_bytes, totals.prefix_hit_tokens) > 0
    assert totals.prefix_hit_tokens % 16 == 0
    hits = totals.prefix_hit_tokens
    assert run(crowded, range(count), together=False) == expected  # from what the cache holds by now
    assert crowded.totals.prefix_hit_tokens > hits
    crowded.close()


def test_without_it_a_prompts_bits_may_differ_and_its_ids_do_not(glass_path):
    """The default: programs fit the batch, so that last bits depend on it; ids hang on them only at a tie."""
    count = 14
    engine = make_engine(glass_path, num_blocks=300)
    together = run(engine, range(count), together=True)
    alone = run(engine, range(count), together=False)
    engine.close()
    assert {name: ids for name, (ids, _) in together.items()} == {n: ids for n, (ids, _) in alone.items()}
