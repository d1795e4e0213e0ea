"""Attention of one new token a sequence over its paged cache, in XLA."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import Softmax, gather_heads, scores
from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_array, check_attention

TILE_K = 128


@jax.named_scope("paged_decode_attention")
def paged_decode_attention(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> jax.Array:
    """Returns [num_seqs, num_heads, head_dim] in q's dtype."""
    check_attention(
        q, pool, block_tables, seq_lens, rows="num_seqs", soft_cap=soft_cap, sliding_window=sliding_window
    )
    check_array("q", q, "num_seqs num_heads head_dim", (seq_lens.shape[0], None, None))
    num_seqs, num_heads, head_dim = q.shape
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    blocks = max(1, min(TILE_K // pool.block_size, block_tables.shape[1]))
    tile_k = blocks * pool.block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks)))
    q = q.reshape(num_seqs, pool.num_kv_heads, -1, head_dim)
    first = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        first = jnp.maximum(seq_lens - sliding_window, 0)
    start = jnp.min(jnp.where(seq_lens > 0, first, jnp.iinfo(jnp.int32).max)) // tile_k
    stop = (jnp.max(seq_lens) + tile_k - 1) // tile_k

    def step(i: jax.Array, acc: Softmax) -> Softmax:
        ids = jax.lax.dynamic_slice_in_dim(tables, i * blocks, blocks, axis=1)
        position = i * tile_k + jnp.arange(tile_k)
        mask = (position >= first[:, None]) & (position < seq_lens[:, None])
        k = gather_heads(pool.k, ids)
        v = jnp.where(mask[:, None, :, None], gather_heads(pool.v, ids), 0)
        s = scores(q, k, scale, soft_cap)
        return acc.update(s, mask[:, None, None], v)

    acc = jax.lax.fori_loop(start, stop, step, Softmax.zeros(q.shape))
    return acc.result().reshape(num_seqs, num_heads, head_dim).astype(pool_dtype(q))


def pool_dtype(q: jax.Array) -> jnp.dtype:
    return q.dtype
