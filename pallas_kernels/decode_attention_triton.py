"""The decode attention kernel: one new token a sequence, split over the context.

A program is one (sequence, kv head, split). It walks its share of the sequence's tiles, `tile_k` tokens each,
fetched through the block table by a vector of block ids, so that several small blocks make one tile and the
copies of the next tiles are in flight meanwhile. The query heads of a kv head are the rows of one product.
With several splits, each leaves a partial mean and its log-sum-exp, and a second kernel combines them
(flash-decoding, Dao et al. 2023). Block tables as in PagedAttention (Kwon et al., arXiv:2309.06180).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.pool import KVPool
from pallas_kernels.triton_tile import (
    KeyTile,
    Ref,
    RunningSoftmax,
    compute_dtype,
    grid2d,
    logits,
    padded,
    within,
)
from pallas_kernels.tuning import DecodeSettings, decode_settings


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "sliding_window", "settings", "interpret"))
def decode_attention_triton(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    settings: DecodeSettings | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As paged_decode_attention, for shapes that dispatch.supports_triton accepts; checks nothing itself.

    Products in the pool's dtype, sums in float32. settings: None takes tuning's. interpret: runs the kernel
    as a JAX program, on any device. Jitted so that the layers of a model share one trace.
    """
    num_seqs, num_heads, head_dim = q.shape
    heads, block_size = pool.num_kv_heads, pool.block_size
    if settings is None:
        settings = decode_settings(
            compute_dtype(q.dtype, pool.k.dtype),
            head_dim,
            group=num_heads // heads,
            programs=num_seqs * heads,
            context=block_tables.shape[1] * block_size,
        )
    splits = settings.splits
    kernel = functools.partial(
        _attend,
        tile_k=settings.tile_k,
        splits=splits,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
    )
    f32 = jnp.float32
    partial_means = jax.ShapeDtypeStruct((num_seqs, num_heads, splits, head_dim), f32)
    partial_sums = jax.ShapeDtypeStruct((num_seqs, num_heads, splits), f32)
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    out = pl.pallas_call(
        kernel,
        grid=(num_seqs, heads, splits),
        out_shape=[whole] if splits == 1 else [partial_means, partial_sums],
        compiler_params=plgpu.CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, block_tables, seq_lens, pool.k, pool.v)
    if splits == 1:
        return out[0]
    return pl.pallas_call(
        _combine,
        grid=(num_seqs, num_heads),
        out_shape=whole,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(*out)


def _attend(
    q_ref: Ref,
    tables_ref: Ref,
    lens_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    sums_ref: Ref | None = None,
    *,
    tile_k: int,
    splits: int,
    scale: float,
    soft_cap: float | None,
    sliding_window: int | None,
) -> None:
    seq, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block_size, head_dim = k_ref.shape[2:]
    group = q_ref.shape[1] // k_ref.shape[1]
    dtype = compute_dtype(q_ref.dtype, k_ref.dtype)
    row, column = grid2d(padded(group), padded(head_dim))
    mask = within(column, head_dim, row < group)
    at = (seq, head * group + row)
    q = plgpu.load(q_ref.at[*at, column], mask=mask, other=jnp.zeros((), q_ref.dtype)).astype(dtype)

    end = jnp.minimum(lens_ref[seq], tables_ref.shape[1] * block_size)
    first = jnp.int32(0) if sliding_window is None else jnp.maximum(end - sliding_window, 0)
    first_tile = lax.div(first, tile_k)
    num_tiles = lax.div(end + (tile_k - 1), tile_k)
    share = lax.div(num_tiles - first_tile + (splits - 1), splits)
    start = first_tile + split * share
    stop = jnp.minimum(start + share, num_tiles)

    def add_tile(tile: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        keys = KeyTile.of(tables_ref, seq, tile, (first, end), tile_k=tile_k, block_size=block_size)
        scores = logits(q, keys.load(k_ref, head, dtype), scale, soft_cap)
        return softmax.add(scores, keys.readable[None, :], keys.load(v_ref, head, dtype))

    softmax = lax.fori_loop(start, stop, add_tile, RunningSoftmax.empty(*row.shape))
    if sums_ref is None:
        plgpu.store(out_ref.at[*at, column], softmax.mean().astype(out_ref.dtype), mask=mask)
        return
    plgpu.store(out_ref.at[*at, split, column], softmax.mean(), mask=mask)
    rows = lax.iota(jnp.int32, row.shape[0])
    plgpu.store(sums_ref.at[seq, head * group + rows, split], softmax.log_sum_exp(), mask=rows < group)


def _combine(means_ref: Ref, sums_ref: Ref, out_ref: Ref) -> None:
    """The splits' means, weighted by their sums: one program a (sequence, query head)."""
    seq, head = pl.program_id(0), pl.program_id(1)
    splits, head_dim = means_ref.shape[2:]
    row, column = grid2d(pl.next_power_of_2(splits), padded(head_dim))
    split = lax.iota(jnp.int32, row.shape[0])
    sums = plgpu.load(sums_ref.at[seq, head, split], mask=split < splits, other=-jnp.inf)
    means = plgpu.load(
        means_ref.at[seq, head, row, column], mask=within(column, head_dim, row < splits), other=0.0
    )
    weights = jnp.exp2(sums - sums.max())
    out = (means * weights[:, None]).sum(0) / weights.sum()
    columns = lax.iota(jnp.int32, column.shape[1])
    plgpu.store(out_ref.at[seq, head, columns], out.astype(out_ref.dtype), mask=columns < head_dim)
