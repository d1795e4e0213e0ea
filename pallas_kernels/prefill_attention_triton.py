"""The prefill attention kernel: packed new tokens of many sequences over their paged cache.

A program is one (tile of queries, kv head). A tile's rows are the query heads of `rows // group` tokens of
one sequence, so that the keys and values it walks serve the whole group. Which tokens a tile covers is worked
out once a step by a few XLA operations and read from an array. FlashAttention (Dao et al., arXiv:2205.14135)
over block tables (PagedAttention, Kwon et al., arXiv:2309.06180).
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
from pallas_kernels.tuning import PrefillSettings, prefill_settings


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "sliding_window", "settings", "interpret"))
def prefill_attention_triton(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    settings: PrefillSettings | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As paged_prefill_attention, for shapes that dispatch.supports_triton accepts; checks nothing itself.

    Products in the pool's dtype, sums in float32. settings: None takes tuning's. interpret: runs the kernel
    as a JAX program, on any device. Jitted so that the layers of a model share one trace.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // pool.num_kv_heads
    if settings is None:
        queries = -(-num_tokens // seq_lens.shape[0])
        dtype = compute_dtype(q.dtype, pool.k.dtype)
        settings = prefill_settings(dtype, head_dim, group=group, queries=queries)
    tiles = query_tiles(seq_lens, query_start, num_tokens, settings.rows // group)
    kernel = functools.partial(
        _attend,
        rows=settings.rows,
        tile_k=settings.tile_k,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.shape[0], pool.num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages),
        interpret=interpret,
        name="paged_prefill_attention",
    )(q, block_tables, tiles, pool.k, pool.v)


def query_tiles(seq_lens: jax.Array, query_start: jax.Array, num_tokens: int, tile_q: int) -> jax.Array:
    """Cuts the packed tokens into tiles: int32 [num_tiles, 4], each (sequence, row, tokens, position).

    A tile covers rows row:row + tokens of q, the first at `position` in its sequence. Rows past
    query_start[-1] are tiles too, at a position that makes the kernel see no key and write zeros. Tiles come
    last first: late ones see most keys. Those too many have no tokens.
    """
    num_seqs = seq_lens.shape[0]
    num_tiles = min(num_tokens, (num_tokens + (num_seqs + 1) * (tile_q - 1)) // tile_q)
    starts = jnp.append(query_start, jnp.int32(num_tokens))
    num_queries = starts[1:] - starts[:-1]
    tiles_end = jnp.cumsum((num_queries + tile_q - 1) // tile_q)
    tile = jnp.arange(num_tiles - 1, -1, -1, dtype=jnp.int32)
    seq = jnp.sum(tiles_end[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, num_seqs)
    before = (tile - jnp.where(seq > 0, tiles_end[seq - 1], 0)) * tile_q
    tokens = jnp.clip(num_queries[seq] - before, 0, tile_q)
    position = jnp.append(seq_lens, jnp.int32(0))[seq] - num_queries[seq] + before
    padding = seq == num_seqs
    position = jnp.where(padding, -tile_q, position)
    return jnp.stack([jnp.where(padding, 0, seq), starts[seq] + before, tokens, position], axis=1)


def _attend(
    q_ref: Ref,
    tables_ref: Ref,
    tiles_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    *,
    rows: int,
    tile_k: int,
    scale: float,
    soft_cap: float | None,
    sliding_window: int | None,
) -> None:
    tile, head = pl.program_id(0), pl.program_id(1)
    seq, begin, tokens, position = (tiles_ref[tile, i] for i in range(4))
    block_size, head_dim = k_ref.shape[2:]
    group = q_ref.shape[1] // k_ref.shape[1]
    dtype = compute_dtype(q_ref.dtype, k_ref.dtype)

    def tile_at(begin: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        row, column = grid2d(rows, padded(head_dim))
        token = lax.div(row, group)
        mask = within(column, head_dim, token < tokens)
        return (begin + token, head * group + lax.rem(row, group), column), mask

    at, mask = tile_at(begin)
    q = plgpu.load(q_ref.at[*at], mask=mask, other=jnp.zeros((), q_ref.dtype)).astype(dtype)

    query = position + lax.div(lax.iota(jnp.int32, rows), group)
    end = jnp.minimum(position + tokens, tables_ref.shape[1] * block_size)
    first = jnp.int32(0) if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)
    stop = jnp.where(tokens > 0, lax.div(end + (tile_k - 1), tile_k), 0)

    def add_tile(i: jax.Array, carry: tuple[RunningSoftmax, jax.Array]) -> tuple[RunningSoftmax, jax.Array]:
        softmax, begin = carry
        keys = KeyTile.of(tables_ref, seq, i, (first, end), tile_k=tile_k, block_size=block_size)
        scores = logits(q, keys.load(k_ref, head, dtype), scale, soft_cap)
        visible = keys.position[None, :] <= query[:, None]
        if sliding_window is not None:
            visible &= keys.position[None, :] > query[:, None] - sliding_window
        softmax = softmax.add(scores, visible, keys.load(v_ref, head, dtype))
        return softmax, jnp.minimum(begin, q_ref.shape[0])

    # `begin` goes round the loop, unchanged, so that the addresses to store at depend on its end: computed
    # before it, they would take the registers that a tile of 128 rows needs.
    carry = (RunningSoftmax.empty(rows, padded(head_dim)), begin)
    softmax, begin = lax.fori_loop(lax.div(first, tile_k), stop, add_tile, carry)
    at, mask = tile_at(begin)
    plgpu.store(out_ref.at[*at], softmax.mean().astype(out_ref.dtype), mask=mask)
