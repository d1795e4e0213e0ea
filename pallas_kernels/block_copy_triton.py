"""Block copies in every layer's pool by two kernels: all sources to a staging array, then on to the pools.

The copies are simultaneous because no destination is written before the second kernel starts. Each kernel
takes all pools as arguments of its own; a program picks the one that its number names.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton_tile import Ref

CHUNK = 2048  # elements of a block that one program moves
_PARAMS = plgpu.CompilerParams(num_warps=4, num_stages=1)


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks_triton(
    arrays: Sequence[jax.Array], src: jax.Array, dst: jax.Array, *, interpret: bool = False
) -> list[jax.Array]:
    """`arrays`, each [num_blocks, ...] of one shape and dtype, with src[i] copied over dst[i]; in place."""
    shape, dtype = arrays[0].shape, arrays[0].dtype
    flat = [array.reshape(shape[0], -1) for array in arrays]
    width = flat[0].shape[1]
    chunk = min(CHUNK, pl.next_power_of_2(width))
    grid = (pl.cdiv(width, chunk), src.shape[0], len(arrays))
    staging = pl.pallas_call(
        functools.partial(_gather, chunk=chunk),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((len(arrays), src.shape[0], width), dtype),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="copy_blocks_gather",
    )(src, dst, *flat)
    copied = pl.pallas_call(
        functools.partial(_scatter, chunk=chunk),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(array.shape, dtype) for array in flat],
        input_output_aliases={2 + i: i for i in range(len(arrays))},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="copy_blocks_scatter",
    )(dst, staging, *flat)
    return [array.reshape(shape) for array in copied]


def _gather(src_ref: Ref, dst_ref: Ref, *refs: Ref, chunk: int) -> None:
    *pools, staging_ref = refs
    pair, number, column, mask = _place(dst_ref, pools[0], chunk)
    for i, pool in enumerate(pools):

        @pl.when(number == i)
        def _(i: int = i, pool: Ref = pool) -> None:
            block = plgpu.load(pool.at[src_ref[pair], column], mask=mask)
            plgpu.store(staging_ref.at[i, pair, column], block, mask=mask)


def _scatter(dst_ref: Ref, staging_ref: Ref, *refs: Ref, chunk: int) -> None:
    pools = refs[len(refs) // 2 :]  # the first half are the inputs that these alias
    pair, number, column, mask = _place(dst_ref, pools[0], chunk)
    block = plgpu.load(staging_ref.at[number, pair, column], mask=mask)
    for i, pool in enumerate(pools):

        @pl.when(number == i)
        def _(pool: Ref = pool) -> None:
            plgpu.store(pool.at[dst_ref[pair], column], block, mask=mask)


def _place(dst_ref: Ref, pool: Ref, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The program's pair, the number of its pool, its columns, and which of them take part in a copy."""
    pair = pl.program_id(1)
    column = pl.program_id(0) * chunk + lax.iota(jnp.int32, chunk)
    dst = dst_ref[pair]
    return pair, pl.program_id(2), column, (column < pool.shape[1]) & (dst >= 0) & (dst < pool.shape[0])
