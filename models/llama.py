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

RunLayer = Callable[[int, Array, Array, Array], Array]
"""(layer, x [..., hidden_size], cos, sin) -> like x."""


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

        def run(index: int, x: Array, cos: Array, sin: Array) -> Array:
            graphdef, state = nnx.split(self.layers[index])
            x, change, pools[index] = _paged_layer(
                state,
                x,
                cos,
                sin,
                pools[index],
                metadata,
                graphdef=graphdef,
                sliding_window=self.config.layer_windows[index],
                implementation=self.implementation,
            )
            return x + change

        hidden = self._forward(tokens, metadata.positions, run)
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

        def run(index: int, x: Array, cos: Array, sin: Array) -> Array:
            attend = partial(causal_attention, sliding_window=self.config.layer_windows[index])
            return self.layers[index](x, cos, sin, attend)

        return self.logits(self._forward(tokens, positions, run))

    def _forward(self, tokens: Array, positions: Array, run: RunLayer) -> Array:
        cos, sin = rotation(positions, inverse_frequencies(self.config))
        x = self.embed(tokens)
        for index in range(self.config.num_layers):
            with jax.named_scope(f"layer_{index}"):
                x = run(index, x, cos, sin)
        return self.norm(x)


@partial(jax.jit, static_argnames=("graphdef", "sliding_window", "implementation"))
def _paged_layer(
    state: nnx.State,
    x: Array,
    cos: Array,
    sin: Array,
    pool: KVPool,
    metadata: Metadata,
    *,
    graphdef: nnx.GraphDef[DecoderLayer],
    sliding_window: int | None,
    implementation: Implementation,
) -> tuple[Array, Array, KVPool]:
    """One layer of a step over its pool: the two terms of its result, and the pool.

    Jitted so that alike layers share one trace and one lowering; XLA inlines the calls, and the compiled
    program is that of layers traced one by one. The last sum is the caller's for that reason: returned from
    here, in a tuple, the CPU backend would round it to bfloat16 on its way to the next layer's float32 norm.
    """

    def attend(q: Array, k: Array, v: Array) -> Array:
        nonlocal pool
        out, pool = paged_attention(
            q, k, v, pool, metadata, sliding_window=sliding_window, implementation=implementation
        )
        return out

    x, change = nnx.merge(graphdef, state).terms(x, cos, sin, attend)
    return x, change, pool


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
