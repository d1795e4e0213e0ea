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

TILE_Q = 16  # queries
TILE_K = 64  # tokens


def prefill_attention_xla(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float | None,
    soft_cap: float | None,
    sliding_window: int | None,
) -> jax.Array:
    """As paged_prefill_attention; checks nothing itself."""
    num_tokens, num_heads, head_dim = q.shape
    heads, block_size = pool.num_kv_heads, pool.block_size
    group = num_heads // heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    single_byte = pool.k.dtype.itemsize == 1  # jax promotes no 8-bit floats
    dtype = q.dtype if single_byte else jnp.promote_types(q.dtype, pool.k.dtype)
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
