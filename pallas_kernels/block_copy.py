"""Copies whole blocks inside pools: the device side of copy-on-write."""

from collections.abc import Sequence

import jax

from pallas_kernels.block_copy_triton import copy_blocks_triton
from pallas_kernels.dispatch import Implementation, dispatch, pool_reason
from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_int32, check_pool


@jax.named_scope("copy_blocks")
def copy_blocks(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
    """Returns `pool` with block `src[i]` copied over block `dst[i]`, all pairs at once.

    src, dst: int32 [num_pairs]. Every source is read before any destination is written, so (a, b) with
        (b, a) swaps two blocks. No destination occurs twice. A padding pair has source 0 and an out-of-range
        destination of its own (>= num_blocks), and changes nothing.

    In place where the pool is donated (bfloat16 on CPU excepted, see write_kv), beside num_pairs blocks of
    temporary memory. Raises ValueError when shapes or dtypes do not fit.
    """
    _check(pool, src, dst)
    return KVPool(*_copy_xla(pool, src, dst))


@jax.named_scope("copy_blocks")
def copy_blocks_of_layers(
    pools: Sequence[KVPool], src: jax.Array, dst: jax.Array, *, implementation: Implementation = "auto"
) -> tuple[KVPool, ...]:
    """copy_blocks in the pools of all layers, which have one shape and dtype.

    On a GPU the whole cache takes two launches; XLA takes one for each array's scatter and a few for the
    gathers: 9 for four layers, 66 for 32. implementation: see dispatch. Raises ValueError as copy_blocks
    does, and where pools differ.
    """
    for pool in pools:
        _check(pool, src, dst)
        if pool.k.shape != pools[0].k.shape or pool.k.dtype != pools[0].k.dtype:
            raise ValueError(
                "the layers' pools must have one shape and dtype; got "
                f"{pools[0].k.dtype}{list(pools[0].k.shape)} and {pool.k.dtype}{list(pool.k.shape)}"
            )
    arrays = [array for pool in pools for array in pool]
    reason = pool_reason(pools[0]) if pools else "there are no pools"
    copied = dispatch(implementation, reason, copy_blocks_triton, _copy_xla, arrays, src, dst)
    return tuple(KVPool(k, v) for k, v in zip(copied[::2], copied[1::2], strict=True))


def _check(pool: KVPool, src: jax.Array, dst: jax.Array) -> None:
    check_pool(pool)
    check_int32("src", src, "num_pairs", (None,))
    check_int32("dst", dst, "num_pairs", (src.shape[0],))


def _copy_xla(arrays: Sequence[jax.Array], src: jax.Array, dst: jax.Array) -> list[jax.Array]:
    sources = [array.at[src].get(mode="promise_in_bounds") for array in arrays]
    return [
        array.at[dst].set(blocks, mode="drop", unique_indices=True)
        for array, blocks in zip(arrays, sources, strict=True)
    ]
