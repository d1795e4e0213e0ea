"""Causal attention of packed new tokens over their sequences' paged cache, in XLA."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import Softmax, gather_heads, scores
from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_attention, check_int32

TILE_Q = 64
TILE_K = 128


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
    """Returns [num_tokens, num_heads, head_dim] in q's dtype."""
    check_attention(
        q, pool, block_tables, seq_lens, rows="num_tokens", soft_cap=soft_cap, sliding_window=sliding_window
    )
    num_seqs = seq_lens.shape[0]
    check_int32("query_start", query_start, "num_seqs+1", (num_seqs + 1,))
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pool.num_kv_heads
    group = num_heads // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    tile_q = min(TILE_Q, num_tokens)
    blocks = max(1, min(TILE_K // pool.block_size, block_tables.shape[1]))
    tile_k = blocks * pool.block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks)))
    q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))

    num_queries = query_start[1:] - query_start[:-1]
    tiles_end = jnp.cumsum((num_queries + tile_q - 1) // tile_q)

    def attend_tile(t: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tiles_end <= t)
        local = (t - jnp.where(seq > 0, tiles_end[seq - 1], 0)) * tile_q
        row = query_start[seq] + local
        q_tile = jax.lax.dynamic_slice_in_dim(q, row, tile_q)
        q_tile = q_tile.reshape(tile_q, num_kv_heads, group, head_dim)
        q_tile = q_tile.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * tile_q, head_dim)
        seq_len = seq_lens[seq]
        begin = seq_len - num_queries[seq] + local
        position = begin + jnp.arange(tile_q)
        end = jnp.minimum(begin + tile_q, seq_len)
        first = 0 if sliding_window is None else jnp.maximum(begin - sliding_window + 1, 0)

        def step(i: jax.Array, acc: Softmax) -> Softmax:
            ids = jax.lax.dynamic_slice(tables, (seq, i * blocks), (1, blocks))[0]
            key = i * tile_k + jnp.arange(tile_k)
            mask = (key <= position[:, None]) & (key < end)
            if sliding_window is not None:
                mask &= key > position[:, None] - sliding_window
            k = gather_heads(pool.k, ids)
            v = jnp.where(((key >= first) & (key < end))[:, None], gather_heads(pool.v, ids), 0)
            return acc.update(scores(q_tile, k, scale, soft_cap), jnp.tile(mask, (group, 1)), v)

        acc = jax.lax.fori_loop(
            first // tile_k, (end + tile_k - 1) // tile_k, step, Softmax.zeros(q_tile.shape)
        )
        new = acc.result().reshape(num_kv_heads, group, tile_q, head_dim).transpose(2, 0, 1, 3)
        new = jnp.where((position < seq_len)[:, None, None], new.reshape(tile_q, num_heads, head_dim), 0)
        return jax.lax.dynamic_update_slice_in_dim(out, new.astype(out.dtype), row, axis=0)

    out = jax.lax.fori_loop(0, tiles_end[-1], attend_tile, jnp.zeros_like(q))
    return out[:num_tokens]
