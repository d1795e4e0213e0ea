"""Pieces of the attention kernels: what happens to one tile of keys and values. Runs inside kernels alone.

Every array in a kernel has power-of-two extents and is indexed by int32 arrays under a mask, the one spelling
that Pallas' Triton backend accepts from jax 0.10 to 0.12. The softmax is that of FlashAttention (Dao et al.,
arXiv:2205.14135), with logits in base 2: the hardware's exponential is exp2.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Ref: TypeAlias = Any
"""An array in the device's memory, as a kernel sees it; jax has no public name for the type."""

LOG2E = math.log2(math.e)
LOWEST = -1e30  # finite: the difference of two of them is 0, not NaN
MIN_DOT = 16  # rows, columns and depth that a tensor core takes at least


def padded(extent: int) -> int:
    """The power of two, MIN_DOT or more, that holds `extent`."""
    return max(MIN_DOT, pl.next_power_of_2(extent))


def grid2d(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers, int32 [rows, columns] each."""
    shape = (rows, columns)
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def within(columns: jax.Array, extent: int, mask: jax.Array) -> jax.Array:
    """`mask`, and `columns < extent` where the padded columns [rows, padded] are more than `extent`."""
    return mask if columns.shape[1] == extent else mask & (columns < extent)


def dot(lhs: jax.Array, rhs: jax.Array, *, transposed: bool = False) -> jax.Array:
    """lhs [m, k] times rhs [k, n] (or [n, k], transposed), in float32; float32 is not rounded to TF32."""
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32)


class KeyTile(NamedTuple):
    """Where a tile's tokens are and which of them may be read; int32 or bool [tile_k]."""

    position: jax.Array
    readable: jax.Array
    block: jax.Array
    offset: jax.Array

    @classmethod
    def of(
        cls,
        tables: Ref,
        seq: jax.Array,
        tile: jax.Array,
        readable_range: tuple[jax.Array, jax.Array],
        *,
        tile_k: int,
        block_size: int,
    ) -> "KeyTile":
        """Tile number `tile` of sequence `seq`; readable_range: (first, end) positions."""
        first, end = readable_range
        position = tile * tile_k + lax.iota(jnp.int32, tile_k)
        readable = (position >= first) & (position < end)
        block = plgpu.load(tables.at[seq, lax.div(position, block_size)], mask=readable, other=0)
        return cls(position, readable, block, lax.rem(position, block_size))

    def load(self, pool: Ref, head: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Keys or values of one kv head, [tile_k, padded(head_dim)] in `dtype`: 0 where nothing is readable.

        pool: a ref [num_blocks, num_kv_heads, block_size, head_dim]. What is masked is never fetched, so
        that garbage, NaN included, cannot meet a weight of 0.
        """
        head_dim = pool.shape[3]
        rows, columns = grid2d(self.position.shape[0], padded(head_dim))
        whole = jnp.zeros_like(rows)
        at = pool.at[self.block[:, None] + whole, head, self.offset[:, None] + whole, columns]
        mask = within(columns, head_dim, self.readable[:, None] & (whole == 0))
        return plgpu.load(at, mask=mask, other=jnp.zeros((), pool.dtype)).astype(dtype)


def logits(q: jax.Array, k: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """The scores of q [rows, dim] against k [tile_k, dim], soft-capped, times log2(e): [rows, tile_k]."""
    scores = dot(q, k, transposed=True)
    if soft_cap is None:
        return scores * (scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + e^2x), which has the right limits at both ends.
    return (soft_cap * LOG2E) * (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2E * scale / soft_cap))))


class RunningSoftmax(NamedTuple):
    """What the tiles so far amount to, in float32.

    top: [rows] the largest logit; total: [rows] the sum of 2^(logit - top); values: [rows, dim] the values'
    sum with those weights.
    """

    top: jax.Array
    total: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, rows: int, dim: int) -> "RunningSoftmax":
        """Before any tile."""
        f32 = jnp.float32
        return cls(jnp.full((rows,), LOWEST, f32), jnp.zeros((rows,), f32), jnp.zeros((rows, dim), f32))

    def add(self, logits: jax.Array, visible: jax.Array, v: jax.Array) -> "RunningSoftmax":
        """Adds a tile: logits [rows, tile_k], of which `visible` count; v [tile_k, dim], all finite.

        A row that has seen nothing yet weighs hidden keys by 1, and its first visible key takes that back:
        it multiplies them by 2^(LOWEST - top), which is 0. So a row must see a key in the end.
        """
        logits = jnp.where(visible, logits, LOWEST)
        top = jnp.maximum(self.top, logits.max(1))
        weights = jnp.exp2(logits - top[:, None])
        decay = jnp.exp2(self.top - top)
        values = self.values * decay[:, None] + dot(weights.astype(v.dtype), v)
        return RunningSoftmax(top, self.total * decay + weights.sum(1), values)

    def mean(self) -> jax.Array:
        """The values' weighted mean [rows, dim]; 0 where no tile came."""
        return self.values / jnp.where(self.total > 0, self.total, 1)[:, None]

    def log_sum_exp(self) -> jax.Array:
        """In base 2, [rows]; LOWEST where no tile came."""
        seen = self.total > 0
        return jnp.where(seen, self.top + jnp.log2(jnp.where(seen, self.total, 1)), LOWEST)


def compute_dtype(q_dtype: jnp.dtype, pool_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products are taken in: the pool's, or q's where the pool's elements are single bytes."""
    return q_dtype if pool_dtype.itemsize == 1 else pool_dtype
