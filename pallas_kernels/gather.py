"""Reads blocks of a pool into contiguous keys and values, with zeros where no token may be read."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.pool import KVPool


def gather_blocks(
    pool: KVPool, ids: jax.Array, positions: jax.Array, first: jax.Array, end: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns k, v: [num_seqs, num_kv_heads, num_ids * block_size, head_dim] in `dtype`.

    ids: int32 [num_seqs, num_ids], valid blocks; positions: int32 [num_ids], of each block's first token.
    first, end: int32 [num_seqs]; values outside first <= position < end are 0, whatever the pool holds there.
        Keys are as they are: their scores are to be masked.
    """
    num_blocks, heads, block_size, head_dim = pool.k.shape
    num_seqs, num_ids = ids.shape
    width = block_size * head_dim
    rows = ids[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    low = (first[:, None] - positions) * head_dim
    high = (end[:, None] - positions) * head_dim

    def read(blocks: jax.Array) -> jax.Array:
        by_head = blocks.reshape(num_blocks * heads, width)
        return by_head.at[rows].get(mode="promise_in_bounds").astype(dtype)

    def tile() -> tuple[jax.Array, jax.Array]:
        element = jnp.arange(width, dtype=jnp.int32)
        readable = (element >= low[:, None, :, None]) & (element < high[:, None, :, None])
        return read(pool.k), jnp.where(readable, read(pool.v), 0)

    def nothing() -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((num_seqs, heads, num_ids, width), dtype)
        return zeros, zeros

    # The branch keeps the reshape below out of the gather's fusion. Fused, the CPU backend's loop runs over
    # head_dim and is unrolled into scalar moves; over a whole block it is vectorised.
    k, v = jax.lax.cond(jnp.any(end > 0), tile, nothing)
    shape = (num_seqs, heads, num_ids * block_size, head_dim)
    return k.reshape(shape), v.reshape(shape)
