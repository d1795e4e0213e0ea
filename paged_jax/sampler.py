"""The next tokens, chosen on the device from a batch's logits.

Random choices use the Gumbel-max trick: the most likely token after adding independent Gumbel noise to the
log-probabilities is a sample from them. The noise of a token depends on (seed, sample index, position) and
the token alone, so neither the row, nor the batch, nor the program variant can change what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.buckets import Variant
from paged_jax.logprobs import LogprobArrays, no_logprobs, token_logprobs
from paged_jax.rows import Sampling, padding_ids

LogprobsMode = Literal["raw", "processed"]
"""raw: of the model's own logits. processed: of what a token is drawn from, after min_tokens, temperature,
top_k and top_p; of greedy rows, after min_tokens alone."""

_T = TypeVar("_T")


def sample(
    logits: Array,
    sampling: Sampling,
    position: Array,
    variant: Variant,
    *,
    logprobs_mode: LogprobsMode = "raw",
    capturable: bool = False,
) -> tuple[Array, LogprobArrays | None]:
    """Choose a token for each row: int32 [num_seqs], and with the variant "full" what is known of it.

    logits: float32 [num_seqs, vocab_size]; sampling: a row each; position: int32 [num_seqs], tokens that the
    sequence has. Rows of temperature 0 get the most likely token (the lowest id where several are), in every
    variant. `variant` must serve every row: "temperature" leaves out all but the temperature, "greedy" that
    too. Logprobs may be zeros where no row wants any.
    capturable: no loops and no conditionals, for a CUDA graph; else work that no row needs is not done.
    """

    def where_needed(need: Array, work: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        return work() if capturable else lax.cond(jnp.any(need), work, otherwise)

    is_drawn = sampling.temperature > 0
    is_young = position < sampling.min_position
    is_filtered = is_drawn & ((sampling.top_k > 0) | (sampling.top_p < 1))

    def kept(allowed: Array) -> Array:
        scaled = _scaled(allowed, sampling)
        if variant == "temperature":
            return scaled
        return where_needed(is_filtered, lambda: _filtered(scaled, sampling, capturable), lambda: scaled)

    def draw(allowed: Array) -> Array:
        drawn = _best(kept(allowed) + _noise(sampling, position, logits.shape[1]))
        return jnp.where(is_drawn, drawn, _best(allowed))

    def distribution(allowed: Array) -> Array:
        if logprobs_mode == "raw":
            return logits
        return where_needed(
            is_drawn, lambda: jnp.where(is_drawn[:, None], kept(allowed), allowed), lambda: allowed
        )

    with jax.named_scope("sample"):
        if variant == "greedy":
            return _best(logits), None
        if variant == "temperature":
            return draw(logits), None
        allowed = where_needed(
            is_young, lambda: _without(logits, sampling.suppressed, is_young), lambda: logits
        )
        tokens = where_needed(is_drawn, lambda: draw(allowed), lambda: _best(allowed))
        logprobs = where_needed(
            sampling.num_logprobs >= 0,
            lambda: token_logprobs(distribution(allowed), tokens, capturable=capturable),
            lambda: no_logprobs(logits),
        )
        return tokens, logprobs


def _best(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _without(logits: Array, suppressed: Array, is_young: Array) -> Array:
    """The logits, with the suppressed ids of young rows out of reach."""
    num_rows, width = suppressed.shape
    ids = jnp.where(is_young[:, None], suppressed, padding_ids(width))
    at = logits.at[jnp.arange(num_rows)[:, None], ids]
    return at.set(-jnp.inf, mode="drop", unique_indices=True)


def _scaled(logits: Array, sampling: Sampling) -> Array:
    """Divided by the temperature, but for greedy rows."""
    # Relative to the best, which stays 0 under any temperature: the lowest would make it infinite.
    relative = logits - logits.max(axis=-1, keepdims=True)
    return relative / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]


def _filtered(scaled: Array, sampling: Sampling, unroll: bool) -> Array:
    """-inf for what top_k and top_p remove."""
    return jnp.where(scaled >= _threshold(scaled, sampling, unroll)[:, None], scaled, -jnp.inf)


def _threshold(scaled: Array, sampling: Sampling, unroll: bool) -> Array:
    """The lowest value of each row that top_k, then top_p, keep: float32 [num_seqs].

    Tokens as likely as the last one kept are kept too. Nucleus sampling: Holtzman et al., arXiv:1904.09751.
    No sort: the threshold is searched bit by bit, 32 reductions for each of the two, which a CPU does seven
    times faster than sorting 49k logits.
    """
    vocab_size = scaled.shape[1]
    keys = _ordered_bits(scaled)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)
    kth = _search(lambda key: (keys >= key[:, None]).sum(axis=-1) >= top_k, len(scaled), unroll)
    weights = jnp.where(keys >= kth[:, None], jnp.exp(scaled), 0)
    mass = weights.sum(axis=-1) * sampling.top_p
    nucleus = _search(
        lambda key: jnp.where(keys >= key[:, None], weights, 0).sum(axis=-1) >= mass, len(scaled), unroll
    )
    # Rounding must not cost a row that wants all of the mass its tail.
    nucleus = jnp.where(sampling.top_p >= 1, 0, nucleus)
    lowest = jnp.maximum(kth, nucleus)
    return jnp.where(keys >= lowest[:, None], scaled, jnp.inf).min(axis=-1)


def _ordered_bits(x: Array) -> Array:
    """uint32 that compare as the float32 do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _search(holds: Callable[[Array], Array], num_rows: int, unroll: bool) -> Array:
    """The largest uint32 of each row for which holds is true; it is true for 0 and false from some key on.

    unroll: a loop cannot be captured in a CUDA graph; on a CPU, unrolling it only takes longer to compile.
    """

    def bit(i: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, bit, jnp.zeros(num_rows, jnp.uint32), unroll=unroll)


def _noise(sampling: Sampling, position: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise, float32 [num_seqs, vocab_size]."""

    def row(seed: Array, sample: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return _gumbel(jax.random.bits(key, (vocab_size,), jnp.uint32))

    return jax.vmap(row)(sampling.seed, sampling.sample, position)


def _gumbel(bits: Array) -> Array:
    """uint32 -> float32, falling as the bits rise.

    Small bits give the large values, because that is where float32 is fine: up to 22.9, where
    jax.random.gumbel ends at 16 and never draws a token of a probability under 1e-7.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
