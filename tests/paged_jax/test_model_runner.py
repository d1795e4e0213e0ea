"""The shapes that steps are padded to, and a runner that survives its failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax import SamplingParams
from paged_jax.batch import pack
from paged_jax.block_table import BlockTable
from paged_jax.model_runner import Buckets
from paged_jax.scheduler import Schedule, ScheduledSequence
from paged_jax.sequence import Sequence

from .conftest import load


def buckets(**options):
    defaults = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_prefill_seqs": 16,
        "max_model_len": 100,
        "block_size": 16,
    }
    return Buckets(**defaults | options)


def schedule(phase, sizes):
    return Schedule(phase, [ScheduledSequence(None, 0, size, []) for size in sizes])


def test_the_default_shapes():
    sizes = buckets()
    assert sizes.decode == [1, 8, 32, 64]
    assert sizes.prefill == [32, 64, 128, 256, 512, 1024, 2048]
    assert (sizes.prefill_seqs, sizes.max_blocks) == (16, 7)


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 8), (8, 8), (9, 32), (32, 32), (33, 64), (64, 64)])
def test_a_decode_step_gets_the_smallest_shape_that_holds_it(rows, padded):
    shape = buckets().shape(schedule("decode", [1] * rows))
    assert (shape.phase, shape.num_tokens, shape.num_seqs, shape.max_blocks) == ("decode", padded, padded, 7)


@pytest.mark.parametrize(
    ("sizes", "padded"), [([1], 32), ([20, 12], 32), ([20, 13], 64), ([2048], 2048), ([128] * 16, 2048)]
)
def test_a_prefill_step_gets_the_smallest_shape_that_holds_its_tokens(sizes, padded):
    shape = buckets().shape(schedule("prefill", sizes))
    assert (shape.phase, shape.num_tokens, shape.num_seqs) == ("prefill", padded, 16)


@pytest.mark.parametrize("min_rows", [1, 8])
@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 100_000), st.data())
def test_every_step_that_the_limits_allow_has_a_shape(min_rows, max_num_seqs, max_num_batched_tokens, data):
    sizes = buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_seqs=min(16, max_num_seqs),
        min_rows=min_rows,
    )
    rows = data.draw(st.integers(1, max_num_seqs))
    tokens = data.draw(st.integers(1, max_num_batched_tokens))
    assert sizes.shape(schedule("decode", [1] * rows)).num_seqs >= max(rows, min_rows)
    assert sizes.shape(schedule("prefill", [tokens])).num_tokens >= tokens
    assert sizes.largest_prefill.num_tokens >= tokens
    assert len(sizes.decode) <= 9
    assert sizes.decode == sorted(set(sizes.decode))
    assert sizes.prefill == sorted(set(sizes.prefill))


# -- a runner over the tiny model --------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answers(llm):
    return [output.outputs[0].token_ids for output in llm.generate(["Hello", "a"], GREEDY, use_tqdm=False)]


def test_the_weights_are_counted(tiny):
    runner = tiny.engine.runner
    assert runner.weight_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in runner._leaves) > 50_000


def test_a_step_takes_the_pools_and_gives_them_back_in_place(tiny):
    """Donated: otherwise every step would copy the whole cache."""
    answers(tiny)
    before = tiny.engine.runner.cache
    places = [pool.k.unsafe_buffer_pointer() for pool in before]
    answers(tiny)
    after = tiny.engine.runner.cache
    assert [pool.k.unsafe_buffer_pointer() for pool in after] == places
    assert all(pool.k.is_deleted() for pool in before)


def test_the_array_of_a_step_is_not_written_again(tiny, monkeypatch):
    """JAX may still read it when the next step is packed."""
    kept = []

    def keeping(*args, **kwargs):
        batch = pack(*args, **kwargs)
        kept.append((batch.packed, batch.packed.copy()))
        return batch

    monkeypatch.setattr("paged_jax.model_runner.pack", keeping)
    answers(tiny)
    assert len(kept) == 6
    for packed, copy in kept:
        np.testing.assert_array_equal(packed, copy)


def test_a_step_that_fails_after_it_took_the_pools_does_not_end_the_engine(tiny_path, tiny, monkeypatch):
    """As when Ctrl-C, or a device without memory, comes between the call and its result."""
    with load(tiny_path) as llm:
        runner = llm.engine.runner
        step = runner._step

        def fails(leaves, cache, packed, **static):
            step(leaves, cache, packed, **static)
            raise KeyboardInterrupt

        monkeypatch.setattr(runner, "_step", fails)
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
        monkeypatch.undo()
        assert not any(array.is_deleted() for array in jax.tree.leaves(runner.cache))
        assert answers(llm) == answers(tiny)


def test_an_answer_does_not_depend_on_what_the_pool_held_before(tiny):
    expected = answers(tiny)
    runner = tiny.engine.runner
    kept = runner.cache
    runner.allocate(jax.tree.map(lambda pool: jnp.full(pool.shape, jnp.nan, pool.dtype), kept))
    assert answers(tiny) == expected
    runner.allocate(jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype), kept))


def test_forks_part_ways_through_the_copies_of_their_step(glass):
    """Siblings over one partly filled block: all but the last get a copy before any of them writes."""
    engine = glass.engine
    allocator, scheduler = engine.allocator, engine.scheduler
    # What an earlier owner left in the blocks must not pass for a copy.
    engine.runner.allocate(jax.tree.map(lambda pool: jnp.full_like(pool, 30.0), engine.runner.cache))
    prompt = {"prompt_token_ids": list(range(20, 41))}  # 21 tokens: the second block of 16 is shared in part
    request = engine.make_request("parent", prompt, SamplingParams(temperature=0, max_tokens=9))
    tables = [BlockTable(allocator, "parent")]
    tables[0].append(20)
    tables += [tables[0].fork(f"child {row}") for row in range(3)]
    family = [Sequence(request, row, table) for row, table in enumerate(tables)]
    prefill = ScheduledSequence(
        family[0], 0, 20, [block * 16 + i for block in tables[0].blocks for i in range(16)][:20]
    )
    engine.runner.execute(Schedule("prefill", [prefill]))
    for row, sequence in enumerate(family):
        sequence.token_ids[-1] = 50 + row  # each goes on with a token of its own
    forked = [list(sequence.token_ids) for sequence in family]
    scheduler.running.extend(family)

    copies = []
    for _ in range(9):
        schedule = scheduler.schedule()
        copies.append(len(schedule.copies))
        scheduler.update(schedule, engine.runner.execute(schedule))
    assert copies == [3, 0, 0, 0, 0, 0, 0, 0, 0]
    alone = glass.generate(
        [{"prompt_token_ids": tokens} for tokens in forked],
        SamplingParams(temperature=0, max_tokens=9),
        use_tqdm=False,
    )
    assert [sequence.output_token_ids for sequence in family] == [list(o.outputs[0].token_ids) for o in alone]
    allocator.check([])


def test_the_largest_programs_temporaries_do_not_hold_the_pools_size(tiny_path):
    """Measured with the smallest pool, they are what any pool leaves for them: two logits rows at least."""
    with load(tiny_path) as llm:
        temporaries = llm.engine.runner.largest_temporaries(llm.engine.runner.cache)
    rows, vocab_size = 4, 268
    assert rows * vocab_size * 4 <= temporaries < 100 * 2**20
