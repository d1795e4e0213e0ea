"""Softmax over keys that arrive a tile at a time.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., FlashAttention (2022).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOWEST = -1e30  # finite: the difference of two of them is 0, not NaN


def dot(spec: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Einsum of two arrays of one dtype, accumulated in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return jnp.einsum(spec, lhs, rhs, precision=precision, preferred_element_type=jnp.float32)


def cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """`soft_cap * tanh(scores / soft_cap)`, or the scores themselves."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


class OnlineSoftmax(NamedTuple):
    """What the tiles so far amount to, in float32.

    top: [..., rows, 1] the largest score; total: [..., rows, 1] the sum of exp(score - top);
    values: [..., rows, head_dim] the values' sum with those weights.
    """

    top: jax.Array
    total: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "OnlineSoftmax":
        """Before any tile; shape: [..., rows, head_dim]."""
        row = (*shape[:-1], 1)
        return cls(jnp.full(row, _LOWEST), jnp.zeros(row), jnp.zeros(shape))

    def add(self, scores: jax.Array, visible: jax.Array, v: jax.Array) -> "OnlineSoftmax":
        """Adds a tile: scores [..., rows, keys] (masked by `visible`), v [..., keys, head_dim] finite."""
        scores = jnp.where(visible, scores, _LOWEST)
        top = jnp.maximum(self.top, scores.max(-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - top), 0)
        decay = jnp.exp(self.top - top)
        values = dot("...qk,...kd->...qd", weights.astype(v.dtype), v)
        total = self.total * decay + weights.sum(-1, keepdims=True)
        return OnlineSoftmax(top, total, self.values * decay + values)

    def mean(self) -> jax.Array:
        """The values' weighted mean [..., rows, head_dim]; 0 for a row that saw no key."""
        return self.values / jnp.where(self.total > 0, self.total, 1)
