"""The layers that decoders are made of: linear maps, RMS norm, attention, the gated feed-forward.

A layer sees attention only as a function `attend(q, k, v)`: whether it goes through a paged cache or over
whole sequences is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from .config import DecoderConfig
from .rope import rotate

Attend = Callable[[Array, Array, Array], Array]
"""(q [..., num_heads, head_dim], k and v [..., num_kv_heads, head_dim]) -> like q."""


def project(x: Array, weight: Array) -> Array:
    """x [..., in] times weight [out, in], accumulated in float32: [..., out] float32.

    Weights stand as [out, in], the order of the files: on a CPU a single float32 row takes 29 ms through
    the demo model's weights this way and 49 ms as [in, out]. HIGHEST keeps float32 from becoming TF32.
    """
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """A linear map with weight [out_features, in_features] and an optional bias [out_features]."""

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.weight = nnx.Param(
            nnx.initializers.normal(in_features**-0.5)(rngs.params(), (out_features, in_features), dtype)
        )
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: Array) -> Array:
        """[..., in_features] -> [..., out_features], in x's dtype."""
        y = project(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square layer normalisation (Zhang & Sennrich, arXiv:1910.07467), computed in float32."""

    def __init__(self, features: int, *, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """[..., features] -> the same shape and dtype."""
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with q, k and v in one projection."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size, width + 2 * kv_width, use_bias=config.attention_bias, dtype=dtype, rngs=rngs
        )
        self.out = Linear(
            width, config.hidden_size, use_bias=config.attention_out_bias, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend) -> Array:
        """[..., hidden_size] -> the same; cos, sin: [..., head_dim / 2] of the tokens' positions."""
        heads = self.qkv(x).reshape(*x.shape[:-1], -1, self.head_dim)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=-2)
        attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(attended.reshape(*x.shape[:-1], -1))


class GatedMLP(nnx.Module):
    """SwiGLU feed-forward (Shazeer, arXiv:2002.05202) with gate and up in one projection."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, 2 * width, use_bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(width, hidden, use_bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[..., hidden_size] -> the same."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend) -> Array:
        """[..., hidden_size] -> the same."""
        x, change = self.terms(x, cos, sin, attend)
        return x + change

    def terms(self, x: Array, cos: Array, sin: Array, attend: Attend) -> tuple[Array, Array]:
        """The result's two terms, each like x: x after attention, and what the feed-forward adds to it."""
        with jax.named_scope("attention"):
            x = x + self.attention(self.input_norm(x), cos, sin, attend)
        with jax.named_scope("mlp"):
            return x, self.mlp(self.post_attention_norm(x))
