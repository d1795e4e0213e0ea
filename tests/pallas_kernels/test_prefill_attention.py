"""paged_prefill_attention against the oracle, and against decode."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paged_cache import assert_matches_oracle, paged


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32])
def test_whole_prompts_around_the_block_size(ops, block_size):
    b = block_size
    lengths = [1, max(b - 1, 1), b, b + 1, 2 * b, 5 * b, 131]
    assert_matches_oracle(ops.prefill, paged(lengths, queries=lengths, padding=5, block_size=b))


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (5, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_groups(ops, heads, dtype):
    case = paged([3, 40, 90], queries=[2, 40, 70], padding=3, heads=heads, dtype=dtype)
    assert_matches_oracle(ops.prefill, case)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(1, "float32"), (64, "float32"), (80, "float32"), (96, "bfloat16"), (128, "float32"), (128, "bfloat16")],
)
def test_head_dims(ops, head_dim, dtype):
    case = paged([17, 80], queries=[17, 40], head_dim=head_dim, dtype=dtype)
    assert_matches_oracle(ops.prefill, case)


@pytest.mark.parametrize(("q_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_mixed_dtypes(ops, q_dtype, dtype):
    case = paged([5, 90], queries=[5, 33], heads=(9, 3), q_dtype=q_dtype, dtype=dtype)
    assert_matches_oracle(ops.prefill, case)


def test_queries_on_top_of_cached_tokens(ops):
    assert_matches_oracle(ops.prefill, paged([200, 65, 300, 8], queries=[1, 2, 130, 7], padding=9))


def test_sequences_without_queries(ops):
    assert_matches_oracle(ops.prefill, paged([0, 30, 12, 0, 50, 9], queries=[0, 30, 0, 0, 4, 0], padding=2))


def test_nothing_but_padding_is_zero(ops):
    case = paged([0, 7], queries=[0, 0], padding=12)
    assert not np.asarray(ops.prefill(*case)).any()


def test_many_short_prompts(ops):
    lengths = [1 + (7 * s) % 13 for s in range(24)]
    assert_matches_oracle(ops.prefill, paged(lengths, queries=lengths, padding=1))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"soft_cap": 2.0},
        {"sliding_window": 1},
        {"sliding_window": 7},
        {"sliding_window": 100},
        {"scale": 2.0, "soft_cap": 5.0, "sliding_window": 130},
    ],
)
def test_options(ops, options):
    assert_matches_oracle(ops.prefill, paged([20, 233, 150], queries=[20, 80, 150]), **options)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", None), ("float32", 20)])
def test_slots_that_hold_no_token_never_reach_the_result(ops, poison, dtype, window):
    lengths, queries = [0, 1, 21, 64, 300], [0, 1, 20, 3, 70]
    first = None
    if window:
        first = [max(0, n - m - window + 1) for n, m in zip(lengths, queries, strict=True)]
    case = paged(lengths, queries=queries, padding=4, dtype=dtype, poison=poison, readable_from=first)
    assert_matches_oracle(ops.prefill, case, sliding_window=window)


def test_padding_is_exactly_zero_whatever_its_query(ops):
    case = paged([9, 30], queries=[9, 30], padding=40)
    out = np.asarray(ops.prefill(case.q.at[39:].set(jnp.nan), *case[1:]))
    assert not out[39:].any()
    assert np.isfinite(out).all()


def test_the_last_row_equals_decode(ops):
    lengths = [1, 40, 129, 77]
    case = paged(lengths, queries=[1, 30, 129, 2], heads=(9, 3), head_dim=64, block_size=16)
    last = case.query_start[1:] - 1
    decoded = ops.decode(case.q[last], *case[1:4])
    np.testing.assert_allclose(ops.prefill(*case)[last], decoded, rtol=1e-5, atol=1e-5)


@settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_shape(ops, data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=5))
    queries = [data.draw(st.integers(0, n)) for n in lengths]
    case = paged(
        lengths,
        queries=queries,
        padding=data.draw(st.integers(1, 70)),
        heads=(kv_heads * group, kv_heads),
        head_dim=data.draw(st.sampled_from([4, 10, 32])),
        block_size=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        seed=data.draw(st.integers(0, 99)),
    )
    window = data.draw(st.none() | st.integers(1, 110))
    assert_matches_oracle(ops.prefill, case, sliding_window=window)
