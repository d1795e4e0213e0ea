"""Wrong shapes and dtypes raise while tracing, in words that give the shapes."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.paged_cache import paged

from pallas_kernels import KVPool


def int32(*values):
    return jnp.asarray(values, jnp.int32)


DECODE = paged([3, 9])
PREFILL = paged([3, 9], queries=[3, 2])
SMALL = DECODE.pool._replace(v=DECODE.pool.v[:, :1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 16))}, r"q must be \[num_seqs, num_heads, head_dim\], of rank 3.*\(2, 16\)"),
        ({"q": jnp.ones((2, 4, 8))}, r"head_dim = 16; got shape \(2, 4, 8\)"),
        ({"q": jnp.ones((2, 3, 16))}, r"multiple of num_kv_heads.*\(2, 3, 16\).*3 heads.*2 kv heads"),
        ({"q": jnp.ones((3, 4, 16))}, r"q must be.*num_seqs = 2; got shape \(3, 4, 16\)"),
        ({"q": jnp.ones((2, 4, 16), jnp.int32)}, r"q must be floating point; got int32"),
        ({"pool": SMALL}, r"one shape and dtype; got k float32\[.*\] and v float32"),
        ({"pool": DECODE.pool._replace(k=DECODE.pool.k[0])}, r"pool.k must be.*of rank 4"),
        ({"block_tables": jnp.zeros((3, 4), jnp.int32)}, r"block_tables.*num_seqs = 2.*\(3, 4\)"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, r"block_tables.*max_blocks = 1 or more.*\(2, 0\)"),
        ({"block_tables": int32(1, 2)}, r"block_tables.*of rank 2; got shape \(2,\)"),
        ({"block_tables": jnp.zeros((2, 4))}, r"block_tables must be int32; got float32 of shape \(2, 4\)"),
        ({"seq_lens": jnp.zeros((2, 1), jnp.int32)}, r"seq_lens.*of rank 1; got shape \(2, 1\)"),
    ],
)
def test_decode_refuses(ops, change, message):
    with pytest.raises(ValueError, match=message):
        ops.decode(*DECODE._replace(**change)[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start": int32(0, 5)}, r"query_start.*num_seqs\+1 = 3; got shape \(2,\)"),
        ({"query_start": jnp.zeros(3)}, r"query_start must be int32; got float32"),
        ({"q": jnp.ones((5, 3, 16))}, r"multiple of num_kv_heads"),
        ({"block_tables": jnp.zeros((1, 4), jnp.int32)}, r"block_tables.*num_seqs = 2.*\(1, 4\)"),
    ],
)
def test_prefill_refuses(ops, change, message):
    with pytest.raises(ValueError, match=message):
        ops.prefill(*PREFILL._replace(**change))


@pytest.mark.parametrize("options", [{"sliding_window": 0}, {"soft_cap": 0.0}, {"soft_cap": -1.0}])
def test_attention_refuses_meaningless_options(ops, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        ops.decode(*DECODE[:4], **options)
    with pytest.raises(ValueError, match=name):
        ops.prefill(*PREFILL, **options)


@pytest.mark.parametrize(
    ("k", "v", "slots", "message"),
    [
        ((5, 2, 8), (5, 2, 8), int32(1, 2, 3, 4, 5), r"k must be.*head_dim = 16; got shape \(5, 2, 8\)"),
        ((5, 4, 16), (5, 4, 16), int32(1, 2, 3, 4, 5), r"k must be.*num_kv_heads = 2"),
        ((5, 2, 16), (4, 2, 16), int32(1, 2, 3, 4, 5), r"v must be.*num_tokens = 5; got shape \(4, 2, 16\)"),
        ((5, 2, 16), (5, 2, 16), int32(1, 2), r"slots.*num_tokens = 5; got shape \(2,\)"),
        ((1, 2, 16), (1, 2, 16), jnp.ones(1), r"slots must be int32"),
    ],
)
def test_write_refuses(ops, k, v, slots, message):
    with pytest.raises(ValueError, match=message):
        ops.write_kv(DECODE.pool, jnp.ones(k), jnp.ones(v), slots)


def test_copy_refuses_pairs_that_do_not_match(ops):
    with pytest.raises(ValueError, match=r"dst.*num_pairs = 2; got shape \(3,\)"):
        ops.copy_blocks(DECODE.pool, int32(1, 2), int32(1, 2, 3))
    with pytest.raises(ValueError, match=r"src must be int32"):
        ops.copy_blocks(DECODE.pool, jnp.ones(2), int32(1, 2))


def test_a_pool_knows_its_extents():
    pool = KVPool(*np.zeros((2, 5, 2, 8, 16)))
    assert (pool.num_blocks, pool.num_kv_heads, pool.block_size, pool.head_dim) == (5, 2, 8, 16)
