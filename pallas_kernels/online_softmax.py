"""Softmax over keys that arrive a tile at a time, and the two products around it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOWEST = -1e30  # finite, so that the difference of two of them is 0, not NaN


def dot(lhs: jax.Array, rhs: jax.Array, spec: str) -> jax.Array:
    """Contracts in the wider of the two dtypes and accumulates in float32."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return jnp.einsum(
        spec,
        lhs.astype(dtype),
        rhs.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def gather_heads(blocks: jax.Array, ids: jax.Array) -> jax.Array:
    """Blocks of a pool array as [..., num_kv_heads, len(ids) * block_size, head_dim], without a transpose.

    blocks: [num_blocks, num_kv_heads, block_size, head_dim]; ids: int32 [..., num_ids].
    """
    num_blocks, heads, block_size, head_dim = blocks.shape
    rows = ids[..., None, :] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    flat = blocks.reshape(num_blocks * heads, block_size, head_dim)
    return flat.at[rows].get(mode="clip").reshape(*ids.shape[:-1], heads, -1, head_dim)


def scores(q: jax.Array, k: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """float32 [..., rows, keys] of q [..., rows, head_dim] and k [..., keys, head_dim]."""
    s = dot(q, k, "...qd,...kd->...qk") * scale
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


class Softmax(NamedTuple):
    """Running sums over the tiles so far; float32."""

    top: jax.Array
    total: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Softmax":
        """No tile yet; shape: [..., rows, head_dim]."""
        row = (*shape[:-1], 1)
        return cls(jnp.full(row, _LOWEST), jnp.zeros(row), jnp.zeros(shape))

    def update(self, s: jax.Array, mask: jax.Array, v: jax.Array) -> "Softmax":
        """Adds a tile: s [..., rows, keys], mask broadcast to it, v [..., keys, head_dim] finite."""
        s = jnp.where(mask, s, _LOWEST)
        top = jnp.maximum(self.top, s.max(-1, keepdims=True))
        p = jnp.where(mask, jnp.exp(s - top), 0)
        old = jnp.exp(self.top - top)
        values = dot(p.astype(v.dtype), v, "...qk,...kd->...qd")
        return Softmax(top, self.total * old + p.sum(-1, keepdims=True), self.values * old + values)

    def result(self) -> jax.Array:
        """The weighted mean of the values; 0 where nothing was added."""
        return jnp.where(self.total > 0, self.values / jnp.where(self.total > 0, self.total, 1), 0)
