"""A step as one packed int32 array: what goes in comes out, and padding touches nothing."""

import jax
import numpy as np
import pytest

from paged_jax import BlockAllocator, BlockTable, SamplingParams
from paged_jax.batch import BatchShape, pack, unpack, variant_of
from paged_jax.scheduler import Schedule, ScheduledSequence
from paged_jax.sequence import Request, RequestMetrics, Sequence
from pallas_kernels import DecodeMetadata, PrefillMetadata

NUM_BLOCKS, BLOCK_SIZE = 32, 4
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
TINY = np.finfo(np.float32).tiny
DECODE = BatchShape("decode", num_tokens=4, num_seqs=4, max_blocks=6)
PREFILL = BatchShape("prefill", num_tokens=16, num_seqs=3, max_blocks=6)


@pytest.fixture
def pool():
    return BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)


def entry(pool, prompt, params=None, *, seed=0, index=0, computed=0, num_tokens=None):
    """A sequence of which `computed` tokens were written before, and num_tokens (all others) are now."""
    request = Request(
        request_id=str(prompt),
        prompt=None,
        prompt_token_ids=prompt,
        params=params or SamplingParams(temperature=0),
        max_new_tokens=1,
        stop_token_ids=frozenset(),
        seed=seed,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    sequence = Sequence(request, index, BlockTable(pool, str(prompt)))
    sequence.table.append(computed)
    num_tokens = len(prompt) - computed if num_tokens is None else num_tokens
    return ScheduledSequence(sequence, computed, num_tokens, sequence.table.append(num_tokens).slots)


def packed(entries, shape):
    return pack(Schedule(shape.phase, entries), shape, num_slots=NUM_SLOTS)


def round_trip(entries, shape):
    """What a program sees of the entries, unpacked inside jit as there."""
    unpacked = jax.jit(unpack, static_argnames="shape")(packed(entries, shape).packed, shape=shape)
    return jax.tree.map(np.asarray, unpacked)


def test_a_decode_step_comes_out_as_it_went_in(pool):
    entries = [entry(pool, [5, 6, 7, 8, 9], computed=4), entry(pool, [3])]
    tokens, metadata, last, sampling = round_trip(entries, DECODE)
    assert isinstance(metadata, DecodeMetadata)
    assert tokens[:2].tolist() == [9, 3]
    assert metadata.positions[:2].tolist() == [4, 0]
    assert metadata.slots[:2].tolist() == [entries[0].slots[0], entries[1].slots[0]]
    assert metadata.seq_lens.tolist() == [5, 1, 0, 0]
    assert metadata.block_tables.tolist() == [
        *([1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [0] * 6, [0] * 6)  # null blocks after the table's end
    ]
    assert last.tolist() == [0, 1, 2, 3]
    assert sampling.position.tolist() == [5, 1, 0, 0]


def test_a_prefill_step_comes_out_as_it_went_in(pool):
    entries = [entry(pool, [10, 11, 12, 13, 14, 15], computed=2, num_tokens=3), entry(pool, [20, 21])]
    tokens, metadata, last, _ = round_trip(entries, PREFILL)
    assert isinstance(metadata, PrefillMetadata)
    assert tokens[:5].tolist() == [12, 13, 14, 20, 21]
    assert metadata.positions[:5].tolist() == [2, 3, 4, 0, 1]
    assert metadata.slots[:5].tolist() == [6, 7, 8, 12, 13]
    assert metadata.query_start.tolist() == [0, 3, 5, 5]
    assert metadata.seq_lens.tolist() == [5, 2, 0]
    assert last[:2].tolist() == [2, 4]


@pytest.mark.parametrize("shape", [DECODE, PREFILL])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_padding_tokens_have_slots_of_their_own_outside_the_pool(shape, rows, pool):
    entries = [entry(pool, [i]) for i in range(rows)]
    _, metadata, last, _ = round_trip(entries, shape)
    padding = metadata.slots[rows:]
    assert (padding >= NUM_SLOTS).all()
    assert len(set(metadata.slots.tolist())) == shape.num_tokens
    assert ((last >= 0) & (last < shape.num_tokens)).all()


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0.7, np.float32(0.7)), (1e-300, TINY), (1e300, 1 / TINY), (0, 0)],
)
def test_a_temperature_keeps_its_bits_and_stays_what_it_is(given, kept, pool):
    """Neither does a low one become greedy, nor a high one infinite."""
    *_, sampling = round_trip([entry(pool, [1], SamplingParams(temperature=given))], DECODE)
    assert sampling.temperature.dtype == np.float32
    assert sampling.temperature[0] == kept


@pytest.mark.parametrize(("given", "kept"), [(0.9, np.float32(0.9)), (1, 1), (1e-300, TINY)])
def test_a_top_p_keeps_its_bits_and_never_becomes_zero(given, kept, pool):
    *_, sampling = round_trip([entry(pool, [1], SamplingParams(top_p=given))], DECODE)
    assert sampling.top_p[0] == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [(5, 5), (0, 0), (-1, -1), (2**31, 2**31 - 1), (10**20, 2**31 - 1)],
)
def test_a_top_k_past_every_vocabulary_is_only_large(given, kept, pool):
    *_, sampling = round_trip([entry(pool, [1], SamplingParams(top_k=given))], DECODE)
    assert sampling.top_k[0] == kept


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_64_bits(seed, pool):
    *_, sampling = round_trip([entry(pool, [1], seed=seed)], DECODE)
    high, low = sampling.seed[0].tolist()
    assert (high << 32) + low == seed


def test_rows_keep_their_sample_index_and_their_order(pool):
    entries = [entry(pool, [i], SamplingParams(top_k=i + 1), seed=i, index=7 - i) for i in range(4)]
    *_, sampling = round_trip(entries, DECODE)
    assert sampling.sample.tolist() == [7, 6, 5, 4]
    assert sampling.top_k.tolist() == [1, 2, 3, 4]
    assert sampling.seed[:, 1].tolist() == [0, 1, 2, 3]


def test_the_array_is_fresh_each_time_and_holds_no_one_elses_memory(pool):
    entries = [entry(pool, [1])]
    first, second = packed(entries, DECODE).packed, packed(entries, DECODE).packed
    assert not np.shares_memory(first, second)
    assert first.base is None
    assert (first.dtype, first.shape) == (np.int32, (DECODE.size,))
    np.testing.assert_array_equal(first, second)


GREEDY, PLAIN = SamplingParams(temperature=0), SamplingParams()


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ([], "greedy"),
        ([GREEDY, GREEDY], "greedy"),
        ([GREEDY, PLAIN], "temperature"),
        ([PLAIN, SamplingParams(top_k=3)], "filtered"),
        ([GREEDY, SamplingParams(top_p=0.5)], "filtered"),
        ([SamplingParams(temperature=0, top_k=3)], "greedy"),
    ],
)
def test_the_cheapest_sampling_that_serves_all_is_chosen(params, variant):
    assert variant_of(params) == variant


def test_a_row_that_does_not_sample_in_this_step_does_not_count(pool):
    dear = SamplingParams(top_k=3)
    unfinished = entry(pool, [1, 2, 3], dear, num_tokens=2)
    assert packed([unfinished, entry(pool, [4])], PREFILL).variant == "greedy"
    assert packed([entry(pool, [5], dear), entry(pool, [4])], PREFILL).variant == "filtered"
