"""Rows on the device: what is placed comes out as it went in, and nothing else changes."""

import jax
import numpy as np
import pytest
from support.steps import make_sequence

from paged_jax import BlockAllocator
from paged_jax.rows import allocate_rows, pack_rows, place, sampling_of
from paged_jax.sampling_params import MAX_SUPPRESSED_IDS

NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, SIZE = 5, 6, 4, 3
TINY = np.finfo(np.float32).tiny
placing = jax.jit(place)


@pytest.fixture
def pool():
    return BlockAllocator(64, BLOCK_SIZE)


def sequence(pool, row=0, tokens=(5, 6, 7), **options):
    made = make_sequence(pool, tokens, row, **options)
    made.table.append(len(tokens))
    return made


def packed(*sequences):
    return pack_rows(sequences, size=SIZE, num_rows=NUM_ROWS, max_blocks=MAX_BLOCKS)


def placed(*sequences, state=None):
    state = allocate_rows(NUM_ROWS, MAX_BLOCKS) if state is None else state
    return jax.tree.map(np.asarray, placing(state, packed(*sequences)))


def sampling(*sequences):
    return placed(*sequences).sampling


def test_a_row_has_the_whole_table_and_the_last_token(pool):
    state = placed(sequence(pool, 3, range(10, 19)), sequence(pool, 1, [7]))
    assert state.last_token.tolist() == [0, 7, 0, 18, 0]
    assert state.tables.tolist() == [[0] * 6, [4, 0, 0, 0, 0, 0], [0] * 6, [1, 2, 3, 0, 0, 0], [0] * 6]


def test_other_rows_stay_as_they_were_padding_or_not(pool):
    before = placed(sequence(pool, 0, temperature=1.0), sequence(pool, 4, top_k=3), sequence(pool, 2))
    after = placed(sequence(pool, 2, [9] * 9, temperature=0.5), state=before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[[0, 1, 3, 4]], new[[0, 1, 3, 4]])
    assert after.sampling.temperature[2] == 0.5


def test_a_row_is_written_over_as_a_whole(pool):
    state = placed(sequence(pool, 1, range(20), temperature=1.0, min_tokens=4, stop=[3], seed=9))
    state = placed(sequence(pool, 1, [5]), state=state)
    fresh = placed(sequence(pool, 1, [5]))
    for old, new in zip(jax.tree.leaves(fresh.sampling), jax.tree.leaves(state.sampling), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
    assert (state.tables[1] > 0).sum() == 1


@pytest.mark.parametrize(
    ("given", "kept"), [(0.7, np.float32(0.7)), (1e-300, TINY), (1e300, 1 / TINY), (0, 0)]
)
def test_a_temperature_keeps_its_bits_and_stays_what_it_is(given, kept, pool):
    """Neither does a low one become greedy, nor a high one infinite."""
    temperature = sampling(sequence(pool, temperature=given)).temperature
    assert temperature.dtype == np.float32
    assert temperature[0] == kept


@pytest.mark.parametrize(("given", "kept"), [(0.9, np.float32(0.9)), (1, 1), (1e-300, TINY)])
def test_a_top_p_keeps_its_bits_and_never_becomes_zero(given, kept, pool):
    assert sampling(sequence(pool, top_p=given)).top_p[0] == kept


@pytest.mark.parametrize(
    ("given", "kept"), [(5, 5), (0, 0), (-1, -1), (2**31, 2**31 - 1), (10**20, 2**31 - 1)]
)
def test_a_top_k_past_every_vocabulary_is_only_large(given, kept, pool):
    assert sampling(sequence(pool, top_k=given)).top_k[0] == kept


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_64_bits(seed, pool):
    high, low = sampling(sequence(pool, seed=seed)).seed[0].tolist()
    assert (high << 32) + low == seed


def test_a_sample_index_is_the_rows_own(pool):
    assert sampling(sequence(pool, 0, index=7), sequence(pool, 1, index=2)).sample[:2].tolist() == [7, 2]


@pytest.mark.parametrize(("wanted", "kept"), [(None, -1), (0, 0), (20, 20)])
def test_no_logprobs_differ_from_the_chosen_tokens_alone(wanted, kept, pool):
    assert sampling(sequence(pool, logprobs=wanted)).num_logprobs[0] == kept


def test_end_ids_are_suppressed_up_to_min_tokens_after_the_prompt(pool):
    state = sampling(sequence(pool, 1, range(12), prompt=8, min_tokens=6, stop=[9, 2, 500]))
    assert state.min_position[1] == 14
    assert state.suppressed[1, :3].tolist() == [2, 9, 500]
    rest = state.suppressed[1, 3:]
    assert len(set(rest.tolist())) == MAX_SUPPRESSED_IDS - 3
    assert (rest > 2**31 - 100).all()


def test_without_min_tokens_nothing_is_suppressed(pool):
    state = sampling(sequence(pool, 1, stop=range(500)))
    assert state.min_position[1] == 0
    assert (state.suppressed[1] > 2**31 - 100).all()


def test_an_id_that_no_int32_holds_is_no_token_and_left_out(pool):
    state = sampling(sequence(pool, 0, min_tokens=1, stop=[4, 2**40]))
    assert state.suppressed[0, 0] == 4
    assert (state.suppressed[0, 1:] > 2**31 - 100).all()


def test_a_row_out_of_range_is_greedy_and_wants_nothing(pool):
    options = {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_tokens": 5, "stop": [1], "logprobs": 4}
    every = [sequence(pool, row, **options) for row in range(3)]
    state = placing(allocate_rows(NUM_ROWS, MAX_BLOCKS), packed(*every))
    absent = sampling_of(state.sampling, np.array([0, NUM_ROWS, NUM_ROWS + 9], np.int32))
    assert absent.temperature.tolist() == [1, 0, 0]
    assert absent.top_k.tolist() == [3, 0, 0]
    assert absent.top_p.tolist() == [0.5, 1, 1]
    assert absent.min_position.tolist() == [8, 0, 0]
    assert absent.num_logprobs.tolist() == [4, -1, -1]


def test_the_array_is_fresh_each_time_and_padding_rows_have_places_of_their_own(pool):
    one = sequence(pool, 2)
    first, second = packed(one), packed(one)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, second)
    assert first[:, 0].tolist() == [2, NUM_ROWS + 1, NUM_ROWS + 2]
