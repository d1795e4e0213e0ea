"""Causal attention of packed new tokens over their sequences' paged cache, in XLA.

A tile of queries belongs to one sequence. Tiles go in order, so that one may spill over its sequence's end:
the next sequence's tile writes those rows again.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.gather import gather_blocks
from pallas_kernels.online_softmax import OnlineSoftmax, cap, dot
from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_attention, check_int32

TILE_Q = 16  # queries
TILE_K = 64  # tokens


@jax.named_scope("paged_prefill_attention")
def paged_prefill_attention(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> jax.Array:
    """Returns causal softmax(scale * q K^T) V, packed like q: [num_tokens, num_heads, head_dim] in q's dtype.

    q: [num_tokens, num_heads, head_dim], floating; heads map to kv heads as in paged_decode_attention.
    block_tables: int32 [num_seqs, max_blocks], each id a block of the pool; padding entries are 0.
    seq_lens: int32 [num_seqs], tokens in the pool, the queries' own included.
    query_start: int32 [num_seqs + 1], ascending from 0. Rows query_start[s]:query_start[s + 1] of q are the
        last tokens of sequence s, any number of them, none included; rows after query_start[-1] are padding
        and give zeros.
    scale, soft_cap, sliding_window: as in paged_decode_attention; a query at position i sees positions j with
        i - sliding_window < j <= i.

    Multiplies in the wider of q's and the pool's dtypes, accumulates in float32. Nothing in a slot that holds
    no visible token reaches the result, NaN included. Work follows the lengths, not max_blocks. Raises
    ValueError when shapes, dtypes or options do not fit.
    """
    check_attention(
        q, pool, block_tables, seq_lens, rows="num_tokens", soft_cap=soft_cap, sliding_window=sliding_window
    )
    num_seqs = seq_lens.shape[0]
    check_int32("query_start", query_start, "num_seqs+1", (num_seqs + 1,))
    num_tokens, num_heads, head_dim = q.shape
    heads, block_size = pool.num_kv_heads, pool.block_size
    group = num_heads // heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    dtype = jnp.promote_types(q.dtype, pool.k.dtype)
    tile_q = min(TILE_Q, num_tokens)
    tile_blocks = max(1, min(TILE_K // block_size, block_tables.shape[1]))
    tile_k = tile_blocks * block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % tile_blocks)))
    packed = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    num_queries = query_start[1:] - query_start[:-1]
    tiles_end = jnp.cumsum((num_queries + tile_q - 1) // tile_q)

    def attend_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tiles_end <= tile)
        before = (tile - jnp.where(seq > 0, tiles_end[seq - 1], 0)) * tile_q
        row = query_start[seq] + before
        seq_len = seq_lens[seq]
        begin = seq_len - num_queries[seq] + before
        position = begin + jnp.arange(tile_q, dtype=jnp.int32)
        end = jnp.minimum(begin + tile_q, seq_len)
        first = jnp.int32(0) if sliding_window is None else jnp.maximum(begin - sliding_window + 1, 0)
        rows = jax.lax.dynamic_slice_in_dim(packed, row, tile_q).reshape(tile_q, heads, group, head_dim)
        rows = rows.transpose(1, 2, 0, 3).reshape(heads, group * tile_q, head_dim).astype(dtype)

        def add_tile(i: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
            ids = jax.lax.dynamic_slice(tables, (seq, i * tile_blocks), (1, tile_blocks))
            key = i * tile_k + jnp.arange(tile_k, dtype=jnp.int32)
            visible = (key <= position[:, None]) & (key < end)
            if sliding_window is not None:
                visible &= key > position[:, None] - sliding_window
            k, v = gather_blocks(pool, ids, key[::block_size], first[None], end[None], dtype)
            scores = dot("hqd,hkd->hqk", rows, k[0]) * scale
            return softmax.add(cap(scores, soft_cap), jnp.tile(visible, (group, 1)), v[0])

        stop = (end + tile_k - 1) // tile_k
        softmax = jax.lax.fori_loop(first // tile_k, stop, add_tile, OnlineSoftmax.empty(rows.shape))
        new = softmax.mean().reshape(heads, group, tile_q, head_dim).transpose(2, 0, 1, 3)
        new = jnp.where((position < seq_len)[:, None, None], new.reshape(tile_q, num_heads, head_dim), 0)
        return jax.lax.dynamic_update_slice_in_dim(out, new.astype(out.dtype), row, axis=0)

    out = jax.lax.fori_loop(0, tiles_end[-1], attend_tile, jnp.zeros_like(packed))
    return out[:num_tokens]
