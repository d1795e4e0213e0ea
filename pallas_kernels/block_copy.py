"""Copies whole blocks inside a layer's pool: the device side of copy-on-write."""

import jax

from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_int32, check_pool


@jax.named_scope("copy_blocks")
def copy_blocks(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
    """Returns `pool` with block `src[i]` copied over block `dst[i]`, all pairs at once.

    src, dst: int32 [num_pairs]. Every source is read before any destination is written, so (a, b) with
        (b, a) swaps two blocks. No destination occurs twice. A padding pair has source 0 and an out-of-range
        destination of its own (>= num_blocks), and changes nothing.

    In place where the pool is donated (bfloat16 on CPU excepted, see write_kv), beside num_pairs blocks of
    temporary memory. Raises ValueError when shapes or
    dtypes do not fit.
    """
    check_pool(pool)
    check_int32("src", src, "num_pairs", (None,))
    check_int32("dst", dst, "num_pairs", (src.shape[0],))

    def copy(blocks: jax.Array) -> jax.Array:
        sources = blocks.at[src].get(mode="promise_in_bounds")
        return blocks.at[dst].set(sources, mode="drop", unique_indices=True)

    return KVPool(copy(pool.k), copy(pool.v))
