"""The runner over a tiny model: steps against the whole-sequence definition, and what a failure leaves."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import random_tensors, tiny_config
from support.paged_decoder import decoder_of, full_logits
from support.steps import Steps

from paged_jax.model_runner import ModelRunner
from paged_jax.rows import Sampling
from paged_jax.sampler import sample
from paged_jax.schedule import Chunk, Sampled, Schedule

SAMPLED = {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def decoder():
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=64)
    return decoder_of(config, random_tensors(config, seed=5))


@pytest.fixture(scope="module")
def shared(decoder):
    return Steps(decoder, num_host_blocks=16)


@pytest.fixture
def steps(shared):
    """One runner for many tests: its programs are what they wait for."""
    shared.forget()
    return shared


@pytest.fixture
def best(decoder):
    """The greedy continuation of some tokens, without a cache."""

    def continued(tokens, count):
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(full_logits(decoder, tokens)[-1].argmax()))
        return tokens

    return continued


def alone(steps, tokens, count, **params):
    """What a sequence becomes when nothing else runs."""
    sequence = steps.sequence(tokens, 2, **params)
    steps.start(sequence)
    for _ in range(count - 1):
        steps.decode(sequence)
    steps.finish(sequence)
    return sequence.token_ids


# -- steps -------------------------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_and_decoded_in_one_step(steps, best):
    sequence = steps.sequence([5, 6, 7, 8, 9, 10, 11], 1)
    steps.start(sequence)
    assert sequence.token_ids == best(range(5, 12), 1)
    steps.finish(sequence)


def test_a_prompt_of_one_token_needs_no_prefill(steps, best):
    sequence = steps.sequence([9], 3)
    assert sequence.num_to_prefill == 0
    steps.start(sequence)
    assert sequence.token_ids == best([9], 1)
    steps.finish(sequence)


def test_sequences_join_and_leave_in_any_row(steps, best):
    first, second, third = (steps.sequence(range(5, 5 + n), row) for n, row in ((7, 3), (12, 0), (2, 1)))
    steps.start(first, second)
    steps.decode(second, first)
    chunk = steps.chunk(third)
    steps.decode(first, second, third, prefill=[chunk], placed=[third])
    first.table.release()
    steps.decode(third, second)
    late = steps.sequence([3, 4], 3)  # first's row
    steps.start(late)
    steps.decode(late, second, third)
    assert first.token_ids == best(range(5, 12), 3)
    assert second.token_ids == best(range(5, 17), 5)
    assert third.token_ids == best(range(5, 7), 3)
    assert late.token_ids == best([3, 4], 2)
    steps.finish(second, third, late)


def test_a_long_prompt_goes_in_pieces_while_others_decode(steps, best):
    short, long = steps.sequence([7, 8], 0), steps.sequence(range(20, 50), 2)
    steps.start(short)
    for size in (10, 3, 13):
        steps.decode(short, prefill=[steps.chunk(long, size)], placed=[long])
    steps.decode(short, long, prefill=[steps.chunk(long)], placed=[long])
    assert long.token_ids == best(range(20, 50), 1)
    assert short.token_ids == best([7, 8], 5)
    steps.finish(short, long)


def test_more_than_one_call_holds_is_spread_over_several(decoder, best):
    steps = Steps(decoder, max_num_seqs=18, max_prefill_seqs=2, max_num_batched_tokens=16, num_blocks=128)
    sequences = [steps.sequence(range(3 + row, 10 + row), row) for row in range(18)]
    steps.start(*sequences)  # 18 rows to place at 16 a call, 108 tokens to prefill at 16
    for row, sequence in enumerate(sequences):
        assert sequence.token_ids == best(range(3 + row, 10 + row), 1)


def test_a_step_without_a_decode_gives_no_tokens(steps):
    sequence = steps.sequence(range(5, 12), 0)
    schedule = Schedule(prefill=[steps.chunk(sequence, 4)], placed=[sequence])
    assert steps.runner.execute(schedule) == Sampled([])
    steps.finish(sequence)


def test_an_answer_does_not_depend_on_what_the_pool_held_before(decoder, steps):
    other = Steps(decoder)
    cache = jax.tree.map(lambda pool: jnp.full(pool.shape, jnp.nan, pool.dtype), other.runner.cache)
    other.runner.allocate(cache)
    assert alone(other, range(5, 16), 6) == alone(steps, range(5, 16), 6)


def test_a_row_keeps_nothing_of_the_sequence_before(steps, best):
    before = steps.sequence(range(5, 16), 2, temperature=2.0, min_tokens=9, stop=range(60), logprobs=3)
    steps.start(before)
    steps.finish(before)
    assert alone(steps, [8, 9], 3) == best([8, 9], 3)


# -- sampling ----------------------------------------------------------------------------------------------


def test_draws_depend_on_seed_sample_and_position_alone(steps):
    expected = alone(steps, range(5, 12), 6, **SAMPLED)
    sequence, other = steps.sequence(range(5, 12), 3, **SAMPLED), steps.sequence([9], 0, temperature=3.0)
    steps.start(other)
    steps.start(sequence)
    for _ in range(2):
        steps.decode(other, sequence)
    # Computed again from its tokens, in another row, as after a preemption.
    sequence.table.release()
    sequence.row = 1
    steps.start(sequence)
    for _ in range(2):
        steps.decode(sequence)
    assert sequence.token_ids == expected
    assert alone(steps, range(5, 12), 6, **SAMPLED | {"seed": 6}) != expected
    assert alone(steps, range(5, 12), 6, **SAMPLED, index=1) != expected
    steps.finish(sequence, other)


def test_the_noise_of_a_token_is_that_of_its_place_in_the_sequence(steps, decoder):
    """A seed promises its tokens: position is the number of tokens that stand before the new one."""
    tokens = alone(steps, range(5, 12), 4, **SAMPLED, index=2)
    for count in range(7, 11):
        row = Sampling(
            temperature=jnp.ones(1),
            top_k=jnp.zeros(1, jnp.int32),
            top_p=jnp.ones(1),
            seed=jnp.asarray([[0, 5]], jnp.uint32),
            sample=jnp.full(1, 2),
            min_position=jnp.zeros(1, jnp.int32),
            suppressed=jnp.full((1, 64), 2**31 - 1),
            num_logprobs=jnp.full(1, -1),
        )
        logits = jnp.asarray(full_logits(decoder, tokens[:count])[-1:])
        drawn, _ = sample(logits, row, jnp.asarray([count], jnp.int32), "temperature")
        assert tokens[count] == drawn[0]


def test_min_tokens_hold_back_no_longer_than_asked(steps, best):
    """The second token may be an end, where one is the least."""
    end = best([5, 6, 7], 2)[-1]
    first = best([5, 6, 7], 1)[-1]
    assert end != first
    assert alone(steps, [5, 6, 7], 2, min_tokens=1, stop=[end])[3:] == [first, end]


def test_min_tokens_hold_the_end_back(steps, best):
    end = best([5, 6, 7], 1)[-1]
    held = alone(steps, [5, 6, 7], 4, min_tokens=3, stop=[end])
    assert end not in held[3:6]
    assert alone(steps, [5, 6, 7], 1, min_tokens=0, stop=[end])[-1] == end


def test_logprobs_come_only_where_someone_wants_them(steps, decoder):
    plain, wants = steps.sequence([5, 6, 7], 0), steps.sequence([8, 9], 1, logprobs=3)
    assert steps.start(plain).logprobs is None
    sampled = steps.start(wants)
    other, one = steps.decode(plain, wants).logprobs
    assert [one.token_id, other.token_id] == [wants.token_ids[-1], plain.token_ids[-1]]
    exact = np.asarray(full_logits(decoder, wants.token_ids[:-1])[-1], np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    assert [token for token, _ in one.top] == np.argsort(-exact)[:3].tolist()
    np.testing.assert_allclose([value for _, value in one.top], np.sort(exact)[:-4:-1], atol=1e-4)
    assert one.rank == 1
    assert other.top == []
    assert len(sampled.logprobs) == 1
    steps.finish(plain, wants)


def test_processed_logprobs_leave_out_what_cannot_be_drawn(decoder):
    steps = Steps(decoder, logprobs_mode="processed")
    sequence = steps.sequence([5, 6, 7], 0, temperature=1.0, top_k=4, logprobs=20)
    (found,) = steps.start(sequence).logprobs
    assert len(found.top) == 4
    np.testing.assert_allclose(sum(np.exp(value) for _, value in found.top), 1, atol=1e-5)
    assert found.token_id in dict(found.top)


# -- copies, forks and swaps -------------------------------------------------------------------------------


def fill(steps, value):
    """What an earlier owner left in the blocks must not pass for a copy."""
    steps.runner._cache = jax.tree.map(lambda pool: jnp.full_like(pool, value), steps.runner.cache)


def test_forks_part_ways_through_the_copies_of_their_step(steps, best):
    fill(steps, 30.0)
    parent = steps.sequence(range(20, 41), 0)  # the last block of four holds one token
    steps.start(parent)
    family = [parent] + [steps.sequence(parent.token_ids, row) for row in (1, 2, 3)]
    for child in family[1:]:
        child.table = parent.table.fork(child.row)
    for row, sequence in enumerate(family):
        sequence.token_ids[-1] = 50 + row  # each goes on with a token of its own
    starts = [list(sequence.token_ids) for sequence in family]
    shared = parent.table.blocks[-1]
    # The rows of the children are placed after their tables have taken their copies.
    steps.decode(*family, placed=family)
    assert len({sequence.table.blocks[-1] for sequence in family}) == 4
    assert family[-1].table.blocks[-1] == shared
    for _ in range(4):
        steps.decode(*family)
    for sequence, start in zip(family, starts, strict=True):
        assert sequence.token_ids == best(start, 5)
    steps.finish(*family)


def test_more_copies_than_a_call_holds(steps):
    pairs = [(block, 20 + block) for block in range(1, 20)]
    fill(steps, 0.0)
    numbers = jnp.arange(64.0)[:, None, None, None]
    steps.runner._cache = jax.tree.map(lambda pool: pool + numbers, steps.runner.cache)
    sequence = steps.sequence([3], 0)
    sequence.table.append(1)
    copies = [(s, d) for s, d in pairs if s != sequence.table.blocks[0]]
    steps.runner.execute(Schedule(decode=[sequence], placed=[sequence], copies=copies))
    for array in jax.tree.leaves(steps.runner.cache):
        for source, destination in copies:
            assert (array[destination] == source).all()
    fill(steps, 0.0)
    steps.finish(sequence)


def test_siblings_that_share_their_last_prompt_token_read_it_and_write_it_once(steps, best):
    leader = steps.sequence(range(5, 12), 0)
    chunk = steps.chunk(leader)
    leader.table.append(1)
    sibling = steps.sequence(range(5, 12), 1)
    sibling.table = leader.table.fork("sibling")
    schedule = Schedule([chunk], [leader, sibling], [leader, sibling])
    tokens = steps.runner.execute(schedule).tokens
    assert tokens == [best(range(5, 12), 1)[-1]] * 2
    for sequence, token in zip((leader, sibling), (40, 41), strict=True):
        sequence.token_ids.append(token)
    steps.runner.execute(Schedule(placed=[leader, sibling], prefill=[]))  # their tokens are the test's own
    steps.decode(leader, sibling)
    assert leader.token_ids == best([*range(5, 12), 40], 1)
    assert sibling.token_ids == best([*range(5, 12), 41], 1)
    steps.finish(leader, sibling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_goes_on_after_its_blocks_were_away(decoder, steps, dtype):
    steps = steps if dtype == "float32" else Steps(decoder, num_host_blocks=16, dtype=dtype)
    expected = alone(steps, range(5, 26), 6)
    sequence, other = steps.sequence(range(5, 26), 0), steps.sequence([7], 1)
    steps.start(sequence)
    blocks, num_tokens = list(sequence.table.blocks), sequence.table.num_tokens
    sequence.table.release()
    swap_out = [(block, 9 - i) for i, block in enumerate(blocks)]
    # In the same step another sequence overwrites the first of the freed blocks.
    chunk = steps.chunk(other)
    steps.decode(other, prefill=[chunk] if chunk.num_tokens else [], placed=[other], swap_out=swap_out)
    before = steps.runner._host_pool.read([host for _, host in swap_out], 8)[: len(blocks)].copy()
    fill(steps, 9.0)
    new = steps.allocator.allocate(len(blocks), owner="row 0")[::-1]
    sequence.table.adopt(new, num_tokens)
    sequence.row = 2
    swap_in = [(host, block) for (_, host), block in zip(swap_out, new, strict=True)]
    steps.decode(sequence, placed=[sequence], swap_in=swap_in)
    after = steps.runner._programs[steps.runner.program_keys[-2]](
        steps.runner.cache, np.array(new[:-1] + [0] * (32 - len(new[:-1])), np.int32)
    )
    np.testing.assert_array_equal(
        np.asarray(after)[: len(new) - 1].view(np.uint8), before[:-1].view(np.uint8)
    )
    for _ in range(4):
        steps.decode(sequence)
    assert sequence.token_ids == expected
    steps.finish(sequence, other)


def test_a_host_block_given_up_in_a_step_may_be_taken_in_it(steps):
    """What comes in is read before what goes out is written."""
    first, second = steps.sequence(range(5, 8), 0), steps.sequence(range(30, 33), 1)
    expected = [alone(steps, range(5, 8), 3), alone(steps, range(30, 33), 3)]
    steps.start(first)
    (block,) = first.table.blocks
    num_tokens = first.table.num_tokens
    first.table.release()
    steps.runner.execute(Schedule(swap_out=[(block, 3)]))
    steps.start(second)
    (out,) = second.table.blocks
    (into,) = steps.allocator.allocate(1, owner="row 0")
    first.table.adopt([into], num_tokens)
    steps.decode(first, placed=[first], swap_in=[(3, into)], swap_out=[(out, 3)])
    steps.decode(first)
    assert first.token_ids == expected[0]
    held = second.table.num_tokens
    second.table.release()
    (into,) = steps.allocator.allocate(1, owner="row 1")
    second.table.adopt([into], held)
    for schedule in ({"placed": [second], "swap_in": [(3, into)]}, {}):
        steps.decode(second, **schedule)
    assert second.token_ids == expected[1]
    steps.finish(first, second)


# -- programs, memory --------------------------------------------------------------------------------------


def test_after_a_warm_up_no_step_compiles(decoder):
    steps = Steps(decoder, num_host_blocks=4)
    keys = steps.runner.program_keys
    assert steps.runner.num_programs == len(keys) == 7
    told = []
    warm = steps.runner.warm_up(lambda *state: told.append(state))
    assert [state[:2] for state in told] == [(done, 7) for done in range(8)]
    assert (warm.num_programs, steps.runner.compilations) == (7, 7)
    with jax.no_tracing():
        sequence = steps.sequence(
            range(5, 16), 0, temperature=1.0, top_k=4, logprobs=2, min_tokens=2, stop=[4]
        )
        steps.start(sequence)
        steps.decode(sequence, swap_out=[(2, 1)], swap_in=[(0, 30)])
        child = steps.sequence(sequence.token_ids, 1)
        child.table = sequence.table.fork("child")
        steps.decode(sequence, child, placed=[child])
    assert steps.runner.compilations == 7


def test_without_a_warm_up_a_program_is_compiled_when_it_is_needed(decoder):
    steps = Steps(decoder)
    assert (steps.runner.num_programs, steps.runner.compilations) == (5, 0)
    sequence = steps.sequence([5], 0)
    steps.start(sequence)
    assert steps.runner.compilations == 2
    steps.decode(sequence)
    assert steps.runner.compilations == 2


def test_a_gpus_variants_are_chosen_by_the_step(decoder, best):
    steps = Steps(decoder, platform="cuda", max_num_seqs=1, max_prefill_seqs=1)
    asked = []
    programs = steps.runner._programs
    steps.runner._programs = type(
        "", (), {"__getitem__": lambda _, key: asked.append(key) or programs[key]}
    )()
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 1}):
        sequence = steps.sequence([5], 0, **params)
        steps.start(sequence)
        steps.finish(sequence)
    variants = [key.variant for key in asked if key.kind == "decode"]
    assert variants == ["greedy", "temperature", "full", "full"]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_gpus_programs_hold_no_loop_and_no_branch(decoder, mode):
    """But for the choice of the platform, whose index is a constant and which the compiler resolves."""
    steps = Steps(decoder, platform="cuda", logprobs_mode=mode)
    for key in steps.runner.program_keys:
        lowered = steps.runner.trace(key, steps.runner.cache).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        for op in ("while", "if", "sort"):
            assert f"stablehlo.{op}" not in text, key
        assert "chlo.top_k" not in text, key
        known = {line.split()[0] for line in text.splitlines() if "stablehlo.constant" in line}
        for line in text.splitlines():
            if "stablehlo.case" in line:
                index = line.split("stablehlo.case")[1].split("(")[1].split(")")[0]
                assert index in known, (key, line)
                known.add(line.split()[0])


def test_the_weights_are_counted(steps):
    leaves = steps.runner._step.leaves
    assert steps.runner.weight_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) > 20_000


def test_a_step_takes_pools_and_rows_and_gives_them_back_in_place(steps):
    """Donated: otherwise every step would copy the whole cache."""

    def arrays():
        return jax.tree.leaves((steps.runner.cache, steps.runner._state))

    alone(steps, range(5, 16), 3)
    before = arrays()
    places = [array.unsafe_buffer_pointer() for array in before]
    alone(steps, range(5, 16), 3)
    assert [array.unsafe_buffer_pointer() for array in arrays()] == places
    assert all(array.is_deleted() for array in before)


def test_the_arrays_of_a_step_are_not_written_again(steps, monkeypatch):
    """JAX may still read them when the next step is packed."""
    kept = []
    pack = ModelRunner._pack

    def keeping(self, schedule):
        step = pack(self, schedule)
        calls = [*step.place, *step.prefill, *step.copies, step.decode]
        kept.extend((call.packed, call.packed.copy()) for call in calls)
        return step

    monkeypatch.setattr(ModelRunner, "_pack", keeping)
    alone(steps, range(5, 16), 6)
    assert len(kept) == 8
    for packed, copy in kept:
        np.testing.assert_array_equal(packed, copy)
    for one, other in pairwise(kept):
        assert not np.shares_memory(one[0], other[0])


def test_the_largest_programs_temporaries_do_not_hold_the_pools_size(steps):
    """Measured with the smallest pool, they are what any pool leaves for them: the logits of four rows."""
    temporaries = steps.runner.largest_temporaries(steps.runner.cache)
    rows, vocab_size = 4, 268
    assert rows * vocab_size * 4 <= temporaries < 100 * 2**20


def test_close_gives_the_memory_back(decoder):
    steps = Steps(decoder, num_host_blocks=4)
    copies = jax.tree.map(jnp.copy, steps.runner._step.leaves)  # the other tests' decoder keeps its own
    steps.runner._step.leaves = copies
    arrays = jax.tree.leaves((copies, steps.runner.cache, steps.runner._state))
    steps.runner.close()
    assert all(array.is_deleted() for array in arrays)
    steps.runner.close()


# -- failures ----------------------------------------------------------------------------------------------


def whole(steps):
    return not any(array.is_deleted() for array in jax.tree.leaves((steps.runner.cache, steps.runner._state)))


@pytest.mark.parametrize("stage", ["_pack", "_launch", "_fetch"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no memory")])
def test_a_step_that_fails_in_any_stage_does_not_end_the_runner(steps, monkeypatch, stage, when, error):
    expected = alone(steps, range(5, 16), 4)
    real = getattr(ModelRunner, stage)

    def fails(self, *args):
        if when == "after":
            real(self, *args)
        raise error

    monkeypatch.setattr(ModelRunner, stage, fails)
    sequence = steps.sequence(range(5, 16), 0)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        steps.start(sequence)
    monkeypatch.undo()
    assert whole(steps)
    steps.finish(sequence)
    assert alone(steps, range(5, 16), 4) == expected


@pytest.mark.parametrize("kind", ["copy", "swap_out", "swap_in", "place", "prefill", "decode"])
def test_a_call_that_took_its_arrays_and_gave_none_back(steps, kind):
    """As when Ctrl-C, or a device without memory, comes between the call and its result."""
    expected = alone(steps, range(5, 16), 4)
    programs = steps.runner._programs

    class Failing:
        def __getitem__(self, key):
            def call(*args):
                programs[key](*args)
                raise KeyboardInterrupt

            return call if key.kind == kind else programs[key]

    steps.runner._programs = Failing()
    sequence = steps.sequence(range(5, 16), 0)
    chunk = steps.chunk(sequence)
    sequence.table.append(1)
    schedule = Schedule(
        [chunk], [sequence], [sequence], copies=[(40, 41)], swap_out=[(40, 0)], swap_in=[(1, 42)]
    )
    with pytest.raises(KeyboardInterrupt):
        steps.runner.execute(schedule)
    steps.runner._programs = programs
    assert whole(steps)
    steps.finish(sequence)
    assert alone(steps, range(5, 16), 4) == expected


def test_a_value_that_never_comes_to_be_does_not_poison_the_runner():
    """The device's errors surface only when the tokens are fetched."""
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=64)
    decoder = decoder_of(config, random_tensors(config, seed=5))
    fail = []

    def check(hidden):
        if fail:
            raise RuntimeError("the device fails")
        return hidden

    class Fragile(type(decoder)):
        def logits(self, hidden):
            shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
            return super().logits(jax.pure_callback(check, shape, hidden))

    decoder.__class__ = Fragile
    steps = Steps(decoder)
    expected = alone(steps, range(5, 16), 4)
    fail.append(True)
    sequence = steps.sequence(range(5, 16), 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device fails"):
        steps.start(sequence)
    fail.clear()
    steps.finish(sequence)
    assert alone(steps, range(5, 16), 4) == expected


def test_an_array_whose_value_failed_is_replaced_and_a_sound_one_kept(steps):
    class Failed:
        shape, dtype, deleted = (2, 3), np.dtype(np.float32), False

        def is_deleted(self):
            return False

        def block_until_ready(self):
            raise RuntimeError("an error from long ago")

        def delete(self):
            self.deleted = True

    failed, sound = Failed(), jnp.ones(4)
    steps.runner._cache, kept = (failed, sound), steps.runner.cache
    steps.runner._recover()
    zeros, same = steps.runner.cache
    steps.runner._cache = kept
    assert failed.deleted
    assert (zeros.shape, zeros.dtype) == ((2, 3), np.float32)
    assert not zeros.any()
    assert same is sound


def test_a_chunk_that_no_program_holds_is_refused(steps):
    sequence = steps.sequence([5] * 40, 0)
    sequence.table.append(39)
    with pytest.raises(ValueError, match="39 tokens"):
        steps.runner.execute(Schedule(prefill=[Chunk(sequence, 0, 39)], placed=[sequence]))
    steps.finish(sequence)
