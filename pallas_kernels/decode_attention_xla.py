"""Attention of one new token a sequence over its paged cache, in XLA.

Sequences go in groups small enough that a tile of their blocks, once gathered, stays in the processor's
cache; each group's loop ends with its own longest sequence. `scripts/bench_ops.py` measures what it reaches.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.gather import gather_blocks
from pallas_kernels.online_softmax import OnlineSoftmax, cap, dot
from pallas_kernels.pool import KVPool

GROUP = 4  # sequences
TILE_K = 128  # tokens
MATVEC_HEADS = 4  # up to here a product for each query head beats one product for all of a kv head's


def decode_attention_xla(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None,
    soft_cap: float | None,
    sliding_window: int | None,
) -> jax.Array:
    """As paged_decode_attention; checks nothing itself."""
    num_seqs, _, head_dim = q.shape
    num_groups = -(-num_seqs // GROUP)
    size = -(-num_seqs // num_groups)
    tile_blocks = max(1, min(TILE_K // pool.block_size, block_tables.shape[1]))
    extra = num_groups * size - num_seqs
    tables = jnp.pad(block_tables, ((0, extra), (0, -block_tables.shape[1] % tile_blocks)))
    ends = jnp.pad(seq_lens, (0, extra))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    rows = jnp.pad(q.astype(jnp.float32) * scale, ((0, extra), (0, 0), (0, 0)))
    rows = rows.reshape(num_groups * size, pool.num_kv_heads, -1, head_dim)

    def attend_group(group: jax.Array, out: jax.Array) -> jax.Array:
        at = group * size
        q_group = jax.lax.dynamic_slice_in_dim(rows, at, size)
        end = jax.lax.dynamic_slice_in_dim(ends, at, size)
        new = _attend(q_group, pool, tables, at, end, tile_blocks, soft_cap, sliding_window)
        return jax.lax.dynamic_update_slice_in_dim(out, new, at, axis=0)

    out = jnp.zeros_like(rows)
    out = (
        attend_group(jnp.int32(0), out)
        if num_groups == 1
        else jax.lax.fori_loop(0, num_groups, attend_group, out)
    )
    return out[:num_seqs].reshape(q.shape).astype(q.dtype)


def _attend(
    q: jax.Array,
    pool: KVPool,
    tables: jax.Array,
    at: jax.Array,
    end: jax.Array,
    tile_blocks: int,
    soft_cap: float | None,
    sliding_window: int | None,
) -> jax.Array:
    """A group's attention: q, scaled already, and the result are [size, num_kv_heads, group, head_dim]."""
    block_size = pool.block_size
    tile_k = tile_blocks * block_size
    first = jnp.zeros_like(end) if sliding_window is None else jnp.maximum(end - sliding_window, 0)
    start = jnp.min(jnp.where(end > 0, first, jnp.iinfo(jnp.int32).max)) // tile_k

    def add_tile(tile: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        ids = jax.lax.dynamic_slice(tables, (at, tile * tile_blocks), (q.shape[0], tile_blocks))
        position = tile * tile_k + jnp.arange(tile_k, dtype=jnp.int32)
        visible = (position >= first[:, None]) & (position < end[:, None])
        k, v = gather_blocks(pool, ids, position[::block_size], first, end, jnp.float32)
        return softmax.add(cap(_scores(q, k), soft_cap), visible[:, None, None], v)

    stop = (jnp.max(end) + tile_k - 1) // tile_k
    return jax.lax.fori_loop(start, stop, add_tile, OnlineSoftmax.empty(q.shape)).mean()


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k^T: [size, num_kv_heads, group, keys]."""
    if q.shape[2] > MATVEC_HEADS:
        return dot("shgd,shkd->shgk", q, k)
    heads = [dot("shd,shkd->shk", q[:, :, g], k) for g in range(q.shape[2])]
    return jnp.stack(heads, axis=2)
