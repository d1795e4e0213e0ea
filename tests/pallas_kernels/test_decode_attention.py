"""paged_decode_attention against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paged_cache import assert_matches_oracle, paged


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32])
def test_lengths_around_the_block_size(ops, block_size):
    b = block_size
    case = paged([0, 1, max(b - 1, 1), b, b + 1, 2 * b, 5 * b, 129, 301], block_size=b)
    assert_matches_oracle(ops.decode, case)


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (5, 1), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_groups(ops, heads, dtype):
    assert_matches_oracle(ops.decode, paged([3, 0, 40, 150], heads=heads, dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(1, "float32"), (64, "float32"), (80, "float32"), (96, "bfloat16"), (128, "float32"), (128, "bfloat16")],
)
def test_head_dims(ops, head_dim, dtype):
    assert_matches_oracle(ops.decode, paged([17, 140], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(("q_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_mixed_dtypes(ops, q_dtype, dtype):
    assert_matches_oracle(ops.decode, paged([5, 90], heads=(9, 3), q_dtype=q_dtype, dtype=dtype))


@pytest.mark.parametrize("num_seqs", [1, 9, 33])
def test_batch_sizes(ops, num_seqs):
    lengths = [(37 * s) % 200 for s in range(num_seqs - 1)] + [200]
    assert_matches_oracle(ops.decode, paged(lengths, block_size=16))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"soft_cap": 2.0},
        {"sliding_window": 1},
        {"sliding_window": 7},
        {"sliding_window": 1000},
        {"scale": 2.0, "soft_cap": 5.0, "sliding_window": 130},
    ],
)
def test_options(ops, options):
    assert_matches_oracle(ops.decode, paged([0, 1, 7, 8, 133, 290]), **options)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", None), ("float32", 20)])
def test_slots_that_hold_no_token_never_reach_the_result(ops, poison, dtype, window):
    lengths = [0, 1, 21, 64, 300]
    first = [max(0, n - window) for n in lengths] if window else None
    case = paged(lengths, dtype=dtype, poison=poison, readable_from=first)
    assert_matches_oracle(ops.decode, case, sliding_window=window)


def test_padded_rows_are_exactly_zero_whatever_their_query(ops):
    case = paged([0, 9, 0])
    out = ops.decode(case.q.at[0].set(jnp.nan).at[2].set(jnp.inf), *case[1:4])
    assert not np.asarray(out[0]).any()
    assert not np.asarray(out[2]).any()
    assert np.isfinite(out[1]).all()


def test_a_batch_of_padded_rows_alone_is_zero(ops):
    case = paged([0, 0])
    assert not np.asarray(ops.decode(*case[:4])).any()


def test_scores_far_from_zero_neither_overflow_nor_vanish(ops):
    case = paged([4, 200], head_dim=8)
    for scale in (100.0, -100.0):
        assert_matches_oracle(ops.decode, case._replace(q=case.q * 3), scale=scale)


def test_sequences_may_share_blocks(ops):
    case = paged([40, 40, 24], block_size=8)
    shared = case.block_tables.at[1, :3].set(case.block_tables[0, :3]).at[2, :3].set(case.block_tables[0, :3])
    assert_matches_oracle(ops.decode, case._replace(block_tables=shared))


def test_the_width_of_the_table_changes_nothing(ops):
    narrow = paged([5, 130, 0], extra_columns=0)
    wide = narrow._replace(block_tables=jnp.pad(narrow.block_tables, ((0, 0), (0, 61))))
    np.testing.assert_allclose(ops.decode(*narrow[:4]), ops.decode(*wide[:4]), rtol=1e-6, atol=1e-6)


@settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_shape(ops, data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    case = paged(
        data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=9)),
        heads=(kv_heads * group, kv_heads),
        head_dim=data.draw(st.sampled_from([4, 10, 32])),
        block_size=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        extra_columns=data.draw(st.integers(1, 5)),
        seed=data.draw(st.integers(0, 99)),
    )
    window = data.draw(st.none() | st.integers(1, 160))
    assert_matches_oracle(ops.decode, case, sliding_window=window)
