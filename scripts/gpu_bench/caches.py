"""Caches to attend to: paged with shuffled blocks, contiguous, and in the layout of JAX's bundled op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import KVPool


def values(shape: tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> jax.Array:
    """Random numbers along the last two axes, the same for all others: the time does not depend on them."""
    tile = jax.random.normal(jax.random.key(seed), shape[-2:], jnp.float32).astype(dtype)
    return jax.jit(lambda tile: jnp.broadcast_to(tile, shape) + jnp.zeros((), dtype))(tile)


def shuffled_tables(num_seqs: int, blocks_each: int) -> tuple[jax.Array, int]:
    """Tables int32 [num_seqs, blocks_each] over blocks in random order, and how many blocks there are."""
    num_blocks = num_seqs * blocks_each + 1
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    return jnp.asarray(blocks.reshape(num_seqs, blocks_each)), num_blocks


def pools(
    count: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: DTypeLike
) -> list[KVPool]:
    """Pools as the decoder has them, one a layer."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return [KVPool(values(shape, dtype, 2 * i), values(shape, dtype, 2 * i + 1)) for i in range(count)]


def contiguous(
    count: int, num_seqs: int, context: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [num_seqs, context, num_kv_heads, head_dim] without any paging."""
    shape = (num_seqs, context, num_kv_heads, head_dim)
    return [(values(shape, dtype, 2 * i), values(shape, dtype, 2 * i + 1)) for i in range(count)]
