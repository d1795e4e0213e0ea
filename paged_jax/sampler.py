"""The next tokens, chosen on the device from a batch's logits.

Random choices use the Gumbel-max trick: the most likely token after adding independent Gumbel noise to the
log-probabilities is a sample from them. The noise of a token depends on (seed, sample index, position) and
the token alone, so neither the row, nor the batch, nor the program variant can change what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.batch import SamplingState, Variant


def sample(logits: Array, state: SamplingState, variant: Variant) -> Array:
    """Choose a token for each row.

    logits: float32 [num_seqs, vocab_size]. Returns int32 [num_seqs]. Rows of temperature 0 get the most
    likely token (the lowest id where several are), in every variant. `variant` must serve every row's
    parameters: "temperature" leaves top_k and top_p out, "greedy" all of them.
    """
    with jax.named_scope("sample"):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if variant == "greedy":
            return best
        is_greedy = state.temperature == 0
        # Relative to the best, which stays 0 under any temperature: the lowest would make it infinite.
        relative = logits - logits.max(axis=-1, keepdims=True)
        scaled = relative / jnp.where(is_greedy, 1.0, state.temperature)[:, None]
        if variant == "filtered":
            scaled = jnp.where(scaled >= _threshold(scaled, state)[:, None], scaled, -jnp.inf)
        drawn = jnp.argmax(scaled + _noise(state, logits.shape[1]), axis=-1).astype(jnp.int32)
        return jnp.where(is_greedy, best, drawn)


def _threshold(scaled: Array, state: SamplingState) -> Array:
    """The lowest value of each row that top_k, then top_p, keep: float32 [num_seqs].

    Tokens as likely as the last one kept are kept too. Nucleus sampling: Holtzman et al., arXiv:1904.09751.
    No sort: the threshold is searched bit by bit, 32 reductions for each of the two, which a CPU does seven
    times faster than sorting 49k logits.
    """
    vocab_size = scaled.shape[1]
    keys = _ordered_bits(scaled)
    top_k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, vocab_size), vocab_size)
    kth = _search(lambda key: (keys >= key[:, None]).sum(axis=-1) >= top_k, len(scaled))
    weights = jnp.where(keys >= kth[:, None], jnp.exp(scaled), 0)
    mass = weights.sum(axis=-1) * state.top_p
    nucleus = _search(
        lambda key: jnp.where(keys >= key[:, None], weights, 0).sum(axis=-1) >= mass, len(scaled)
    )
    # Rounding must not cost a row that wants all of the mass its tail.
    nucleus = jnp.where(state.top_p >= 1, 0, nucleus)
    lowest = jnp.maximum(kth, nucleus)
    return jnp.where(keys >= lowest[:, None], scaled, jnp.inf).min(axis=-1)


def _ordered_bits(x: Array) -> Array:
    """uint32 that compare as the float32 do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _search(holds: Callable[[Array], Array], num_rows: int) -> Array:
    """The largest uint32 of each row for which holds is true; it is true for 0 and false from some key on."""

    def bit(i: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    def loop(found: Array, unroll: bool) -> Array:
        return lax.fori_loop(0, 32, bit, found, unroll=unroll)

    # A loop cannot be captured in a CUDA graph; on a CPU, unrolling it only takes longer to compile.
    return lax.platform_dependent(
        jnp.zeros(num_rows, jnp.uint32), cuda=partial(loop, unroll=True), default=partial(loop, unroll=False)
    )


def _noise(state: SamplingState, vocab_size: int) -> Array:
    """Standard Gumbel noise, float32 [num_seqs, vocab_size]."""

    def row(seed: Array, sample: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return _gumbel(jax.random.bits(key, (vocab_size,), jnp.uint32))

    return jax.vmap(row)(state.seed, state.sample, state.position)


def _gumbel(bits: Array) -> Array:
    """uint32 -> float32, falling as the bits rise.

    Small bits give the large values, because that is where float32 is fine: up to 22.9, where
    jax.random.gumbel ends at 16 and never draws a token of a probability under 1e-7.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
