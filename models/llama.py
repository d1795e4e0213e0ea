"""The Llama family as one decoder: Llama, Mistral and Qwen2 differ only in their configs.

The module is written once and run two ways: `decoder(tokens, cache, metadata)` through a paged cache, and
`decoder.full_logits(tokens)` over whole sequences, which is the model's own definition and the first
thing to compare the paged path with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from pallas_kernels import Implementation, KVPool, Metadata, paged_attention

from .config import DecoderConfig
from .layers import DecoderLayer, Linear, RMSNorm, project
from .rope import inverse_frequencies, rotation

Cache = tuple[KVPool, ...]
"""One pool a layer."""


class Embedding(nnx.Module):
    """A table [vocab_size, hidden_size]; row t is token t's vector."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, dtype))

    def __call__(self, tokens: Array) -> Array:
        """int32 [...] -> [..., hidden_size]."""
        return self.embedding[...][tokens]


class LlamaDecoder(nnx.Module):
    """A decoder-only transformer. Parameters are random until weights are loaded into them.

    implementation: of the paged attention, see pallas_kernels.dispatch.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        implementation: Implementation = "auto",
    ) -> None:
        self.config = config
        self.implementation = implementation
        self.embed = Embedding(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens: Array, cache: Cache, metadata: Metadata) -> tuple[Array, Cache]:
        """One step over a paged cache.

        tokens: int32 [num_tokens], as metadata describes them. Returns the hidden states
        [num_tokens, hidden_size], after the final norm, and the cache with the tokens' K/V in it.
        """
        pools = list(cache)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            out, pools[layer] = paged_attention(
                q,
                k,
                v,
                pools[layer],
                metadata,
                sliding_window=self.config.layer_windows[layer],
                implementation=self.implementation,
            )
            return out

        hidden = self._forward(tokens, metadata.positions, attend)
        return hidden, tuple(pools)

    def logits(self, hidden: Array) -> Array:
        """[..., hidden_size] -> float32 [..., vocab_size]."""
        weight = self.embed.embedding if self.head is None else self.head.weight
        with jax.named_scope("head"):
            return project(hidden, weight[...])

    def full_logits(self, tokens: Array) -> Array:
        """Logits at every position of whole sequences, without a cache.

        tokens: int32 [num_seqs, seq_len]. Returns float32 [num_seqs, seq_len, vocab_size].
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return causal_attention(q, k, v, sliding_window=self.config.layer_windows[layer])

        return self.logits(self._forward(tokens, positions, attend))

    def _forward(
        self, tokens: Array, positions: Array, attend: Callable[[int, Array, Array, Array], Array]
    ) -> Array:
        cos, sin = rotation(positions, inverse_frequencies(self.config))
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, cos, sin, partial(attend, index))
        return self.norm(x)


def causal_attention(q: Array, k: Array, v: Array, *, sliding_window: int | None) -> Array:
    """Plain causal attention of whole sequences.

    q: [num_seqs, seq_len, num_heads, head_dim]; k, v: [num_seqs, seq_len, num_kv_heads, head_dim].
    """
    num_seqs, seq_len, _, head_dim = q.shape
    groups = q.reshape(num_seqs, seq_len, k.shape[2], -1, head_dim).astype(jnp.float32)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k, precision=lax.Precision.HIGHEST)
    query, key = jnp.arange(seq_len)[:, None], jnp.arange(seq_len)[None, :]
    visible = key <= query
    if sliding_window is not None:
        visible &= key > query - sliding_window
    weights = jax.nn.softmax(jnp.where(visible, scores / math.sqrt(head_dim), -jnp.inf), axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
