"""What is known of a sampled token: its log-probability, its rank, and the most likely tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax.sampling_params import MAX_LOGPROBS
from paged_jax.schedule import RowScores
from paged_jax.sequence import Sequence, TokenLogprobs


class LogprobArrays(NamedTuple):
    """logprob: float32 [num_seqs]; rank: int32 [num_seqs]; top_ids int32, top float32 [num_seqs, 20].

    top: best first, equals in order of their ids; -inf for tokens that cannot be drawn. Fewer columns where
    the vocabulary has fewer tokens.
    """

    logprob: Array
    rank: Array
    top_ids: Array
    top: Array


def token_logprobs(values: Array, tokens: Array, *, capturable: bool = False) -> LogprobArrays:
    """Of the tokens int32 [num_seqs] under the distribution softmax(values), float32 [num_seqs, vocab_size].

    rank: 1 + how many tokens are more likely. capturable: without a sort, see sampler.sample.
    """
    with jax.named_scope("logprobs"):
        peak = values.max(axis=-1, keepdims=True)
        log_mass = peak + jnp.log(jnp.exp(values - peak).sum(axis=-1, keepdims=True))
        chosen = jnp.take_along_axis(values, tokens[:, None], axis=-1, mode="promise_in_bounds")
        count = min(MAX_LOGPROBS, values.shape[1])
        top, top_ids = _top_by_reductions(values, count) if capturable else lax.top_k(values, count)
        return LogprobArrays(
            logprob=(chosen - log_mass)[:, 0],
            rank=1 + (values > chosen).sum(axis=-1, dtype=jnp.int32),
            top_ids=top_ids,
            top=top - log_mass,
        )


def no_logprobs(values: Array) -> LogprobArrays:
    """Zeros of token_logprobs' shapes."""
    num_seqs, count = len(values), min(MAX_LOGPROBS, values.shape[1])
    zeros, ids = jnp.zeros((num_seqs, count), jnp.float32), jnp.zeros((num_seqs, count), jnp.int32)
    return LogprobArrays(zeros[:, 0], ids[:, 0], ids, zeros)


def _top_by_reductions(values: Array, count: int) -> tuple[Array, Array]:
    """As lax.top_k: each is the best of what comes after the one before it.

    On a GPU more than 16 take a sort of the whole vocabulary, and this reads it `count` times.
    """
    ids = jnp.arange(values.shape[1], dtype=jnp.int32)
    best = jnp.full((len(values), 1), jnp.inf, values.dtype)
    last = jnp.full((len(values), 1), -1, jnp.int32)
    found = []
    for _ in range(count):
        left = (values < best) | ((values == best) & (ids > last))
        rest = jnp.where(left, values, -jnp.inf)
        last = jnp.argmax(rest, axis=-1, keepdims=True).astype(jnp.int32)
        best = jnp.max(rest, axis=-1, keepdims=True)
        found.append((best, last))
    return jnp.concatenate([b for b, _ in found], axis=1), jnp.concatenate([i for _, i in found], axis=1)


def want_logprobs(sequences: Seq[Sequence]) -> bool:
    """Whether any of them asked for some."""
    return any(sequence.request.num_logprobs >= 0 for sequence in sequences)


def unpack_logprobs(sequences: Seq[Sequence], tokens: Seq[int], arrays: LogprobArrays) -> list[TokenLogprobs]:
    """For each sequence, as many of the most likely tokens as its request asked for.

    A sequence that asked for none has its token's numbers and an empty `top` all the same.
    """
    logprobs, ranks, top_ids, top = (np.asarray(array) for array in arrays)
    unpacked = []
    for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
        count = max(sequence.request.num_logprobs, 0)
        pairs = zip(top_ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
        likely = [(token_id, logprob) for token_id, logprob in pairs if logprob != -np.inf]
        unpacked.append(TokenLogprobs(token, float(logprobs[row]), int(ranks[row]), likely))
    return unpacked


def row_scores(arrays: LogprobArrays, logits: Array) -> RowScores:
    """What the host needs to rank every next token; the logits come to it when they are first called for."""
    found: list[np.ndarray] = []

    def of_row(place: int) -> np.ndarray:
        if not found:
            found.append(np.asarray(logits))  # all at once: to cut a row out would be one more program
        return found[0][place]

    return RowScores(np.asarray(arrays.top_ids), np.asarray(arrays.top), of_row)
