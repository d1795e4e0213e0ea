"""A step as packed int32 arrays: what goes in comes out, and padding touches nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.steps import make_sequence

from paged_jax import BlockAllocator
from paged_jax.batch import decode_inputs, pack_decode, pack_prefill, prefill_inputs, variant_of
from paged_jax.rows import allocate_rows, pack_rows, place
from paged_jax.schedule import Chunk
from pallas_kernels import KVPool

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS = 32, 4, 6, 6
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
PAGED = KVPool(*[jax.ShapeDtypeStruct((NUM_BLOCKS, 1, BLOCK_SIZE, 8), jnp.float32)] * 2)


@pytest.fixture
def pool():
    return BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)


def sequence(pool, row, tokens, computed=None, **options):
    """With slots for so many tokens, all unless told."""
    made = make_sequence(pool, tokens, row, **options)
    made.table.append(len(tokens) if computed is None else computed)
    return made


def rows_of(*sequences):
    packed = pack_rows(sequences, size=8, num_rows=NUM_ROWS, max_blocks=MAX_BLOCKS)
    return place(allocate_rows(NUM_ROWS, MAX_BLOCKS), packed)


def decoded(*sequences, state=None, size=4):
    """What a decode program sees, unpacked inside jit as there."""
    state = rows_of(*sequences) if state is None else state
    packed = pack_decode(sequences, size=size, num_rows=NUM_ROWS)
    unpacked = jax.jit(partial(decode_inputs, pool=PAGED))(packed, state)
    return jax.tree.map(np.asarray, unpacked)


def prefilled(chunks, size=16, num_seqs=3):
    state = rows_of(*(chunk.sequence for chunk in chunks))
    packed = pack_prefill(chunks, size=size, num_seqs=num_seqs, num_rows=NUM_ROWS)
    unpacked = jax.jit(partial(prefill_inputs, pool=PAGED, num_seqs=num_seqs))(packed, state.tables)
    return jax.tree.map(np.asarray, unpacked)


def test_a_decode_step_comes_out_as_it_went_in(pool):
    rows, tokens, metadata, _ = decoded(sequence(pool, 4, [5, 6, 7, 8, 9]), sequence(pool, 1, [3]))
    assert rows[:2].tolist() == [4, 1]
    assert tokens.tolist() == [9, 3, 0, 0]
    assert metadata.positions[:2].tolist() == [4, 0]
    assert metadata.slots[:2].tolist() == [2 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert metadata.seq_lens.tolist() == [5, 1, 0, 0]
    assert metadata.block_tables.tolist() == [
        *([1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [0] * 6, [0] * 6)  # null blocks after the table's end
    ]


def test_a_new_block_enters_the_rows_table_and_no_other(pool):
    grown, other = sequence(pool, 4, range(4)), sequence(pool, 1, [3])
    state = rows_of(grown, other)
    grown.table.append(1)
    inputs = decoded(grown, state=state)
    assert inputs.metadata.block_tables[0].tolist() == [1, 3, 0, 0, 0, 0]
    assert inputs.metadata.slots[0] == 3 * BLOCK_SIZE
    expected = np.asarray(state.tables).copy()
    expected[4, 1] = 3
    np.testing.assert_array_equal(inputs.tables, expected)


def test_a_copied_block_replaces_the_one_that_was_shared(pool):
    parent = sequence(pool, 0, range(6))
    child = make_sequence(pool, range(6), 1)
    child.table = parent.table.fork("child")
    state = rows_of(parent, child)
    child.table.append(1)
    assert decoded(child, state=state).tables[:2].tolist() == [[1, 2, 0, 0, 0, 0], [1, 3, 0, 0, 0, 0]]


def test_forks_that_share_their_last_token_write_it_once(pool):
    leader = sequence(pool, 0, range(6))
    sibling = make_sequence(pool, range(6), 1)
    sibling.table = leader.table.fork("sibling")
    packed = pack_decode([leader, sibling], size=2, num_rows=NUM_ROWS)
    assert packed.tolist() == [[0, 1], [5, 5], [2, 0]]


def test_a_row_of_block_0_writes_nothing_and_changes_no_table_but_reads_its_own(pool):
    leader = sequence(pool, 0, range(6))
    sibling = make_sequence(pool, range(6), 1)
    sibling.table = leader.table.fork("sibling")
    inputs = decoded(leader, sibling)
    assert inputs.metadata.slots[1] >= NUM_SLOTS
    assert inputs.metadata.seq_lens[:2].tolist() == [6, 6]
    assert inputs.metadata.block_tables[:2].tolist() == [[1, 2, 0, 0, 0, 0]] * 2
    assert inputs.tables[:2].tolist() == [[1, 2, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_padding_rows_have_slots_and_rows_of_their_own_and_write_no_table(count, pool):
    sequences = [sequence(pool, row, [row]) for row in range(count)]
    state = rows_of(*(sequence(pool, row, range(20)) for row in range(NUM_ROWS)[count:]), *sequences)
    inputs = decoded(*sequences, state=state, size=6)
    assert (inputs.metadata.slots[count:] >= NUM_SLOTS).all()
    assert len(set(inputs.metadata.slots.tolist())) == 6
    assert (inputs.rows[count:] >= NUM_ROWS).all()
    assert len(set(inputs.rows.tolist())) == 6
    assert not inputs.metadata.block_tables[count:].any()
    np.testing.assert_array_equal(inputs.tables, state.tables)


def test_a_prefill_comes_out_as_it_went_in(pool):
    first = sequence(pool, 3, [10, 11, 12, 13, 14, 15], computed=5)
    second = sequence(pool, 0, [20, 21, 22], computed=2)
    tokens, metadata = prefilled([Chunk(first, 2, 3), Chunk(second, 0, 2)])
    assert tokens[:5].tolist() == [12, 13, 14, 20, 21]
    assert metadata.positions[:5].tolist() == [2, 3, 4, 0, 1]
    assert metadata.slots[:5].tolist() == [6, 7, 8, 12, 13]
    assert metadata.query_start.tolist() == [0, 3, 5, 5]
    assert metadata.seq_lens.tolist() == [5, 2, 0]
    assert metadata.block_tables.tolist() == [[1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [0] * 6]


@pytest.mark.parametrize("lengths", [[], [3], [1, 1, 1], [16], [7, 9]])
def test_padding_tokens_have_slots_of_their_own_outside_the_pool(lengths, pool):
    chunks = [Chunk(sequence(pool, i, range(n)), 0, n) for i, n in enumerate(lengths)]
    _, metadata = prefilled(chunks)
    padding = metadata.slots[sum(lengths) :]
    assert (padding >= NUM_SLOTS).all()
    assert len(set(metadata.slots.tolist())) == 16
    assert ((metadata.positions >= 0) & (metadata.positions < 16)).all()


def test_arrays_are_fresh_each_time_and_hold_no_one_elses_memory(pool):
    one = sequence(pool, 0, [1, 2])
    for pack in (
        lambda: pack_decode([one], size=4, num_rows=NUM_ROWS),
        lambda: pack_prefill([Chunk(one, 0, 1)], size=8, num_seqs=2, num_rows=NUM_ROWS),
    ):
        first, second = pack(), pack()
        assert not np.shares_memory(first, second)
        assert first.base is None
        assert first.dtype == np.int32
        np.testing.assert_array_equal(first, second)


def test_a_sequence_without_a_row_is_not_packed(pool):
    with pytest.raises(TypeError):
        pack_decode([sequence(pool, None, [1])], size=1, num_rows=NUM_ROWS)


GREEDY, PLAIN = {"temperature": 0}, {"temperature": 1.0}


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ([], "greedy"),
        ([GREEDY, GREEDY], "greedy"),
        ([GREEDY, PLAIN], "temperature"),
        ([PLAIN, PLAIN | {"top_k": 3}], "full"),
        ([GREEDY, PLAIN | {"top_p": 0.5}], "full"),
        ([GREEDY | {"top_k": 3}], "greedy"),
        ([GREEDY, GREEDY | {"logprobs": 0}], "full"),
        ([GREEDY | {"min_tokens": 2}], "full"),
    ],
)
def test_the_cheapest_sampling_that_serves_all_is_chosen(params, variant, pool):
    assert variant_of([sequence(pool, 0, [1], **options) for options in params]) == variant


@pytest.mark.parametrize(("generated", "variant"), [(0, "full"), (1, "full"), (2, "greedy")])
def test_min_tokens_cost_nothing_once_they_are_there(generated, variant, pool):
    assert variant_of([sequence(pool, 0, [1] * (3 + generated), prompt=3, min_tokens=2)]) == variant
