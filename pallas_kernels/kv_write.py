"""Writes new tokens' keys and values into a layer's pool. Touches the named slots and nothing else.

A scatter of XLA's on every device. Compiled for a GPU it needs no atomics and no temporary, and takes in what
comes before it (the rotation, the cast, the split of the projection): two launches a layer, which wait for
the projection alone. A kernel of ours wrote both arrays in one launch, but needed two to lay out its inputs:
a Llama-3-8B layer took 14 launches with it and 13 without.
"""

import jax

from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_floating, check_int32, check_pool


@jax.named_scope("write_kv")
def write_kv(pool: KVPool, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVPool:
    """Returns `pool` with token t's key and value in slot `slots[t]`, cast to the pool's dtype.

    k, v: [num_tokens, num_kv_heads, head_dim], floating.
    slots: int32 [num_tokens], each `block * block_size + offset`, no two alike. A padding token carries an
        out-of-range slot of its own (>= num_blocks * block_size) and is dropped. A negative slot is not
        padding: it would wrap to the pool's end.

    In place where the pool is donated; but XLA's CPU backend scatters no bfloat16 and converts such a pool
    to float32 and back, so use a float32 or float16 pool there.

    Raises ValueError when shapes or dtypes do not fit.
    """
    check_pool(pool)
    shape = (None, pool.num_kv_heads, pool.head_dim)
    check_floating("k", k, "num_tokens num_kv_heads head_dim", shape)
    check_floating("v", v, "num_tokens num_kv_heads head_dim", (k.shape[0], *shape[1:]))
    check_int32("slots", slots, "num_tokens", (k.shape[0],))
    block, offset = slots // pool.block_size, slots % pool.block_size

    def write(into: jax.Array, new: jax.Array) -> jax.Array:
        at = into.at[block, :, offset]
        return at.set(new.astype(into.dtype), mode="drop", unique_indices=True)

    return KVPool(write(pool.k, k), write(pool.v, v))
