"""The jitted functions that a step is made of, over the weights, the cache and the rows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import jax
from flax import nnx
from jax import Array

from paged_jax.batch import decode_inputs, prefill_inputs
from paged_jax.buckets import Variant
from paged_jax.host_pool import gather_blocks, scatter_blocks
from paged_jax.kv_cache import Cache
from paged_jax.logprobs import LogprobArrays
from paged_jax.rows import RowState, place, sampling_of
from paged_jax.sampler import LogprobsMode, sample
from pallas_kernels import Implementation, Metadata, copy_blocks_of_layers


class Decoder(Protocol):
    """What an nnx module must offer to be run."""

    def __call__(self, tokens: Array, cache: Cache, metadata: Metadata) -> tuple[Array, Cache]:
        """int32 [num_tokens] -> hidden [num_tokens, hidden_size], and the cache with their K/V."""
        ...

    def logits(self, hidden: Array) -> Array:
        """[num_seqs, hidden_size] -> float32 [num_seqs, vocab_size]."""
        ...


class StepScores(NamedTuple):
    """What a decode step of the variant "full" says beside the tokens.

    logits: float32 [num_seqs, vocab_size], the model's own.
    """

    logprobs: LogprobArrays
    logits: Array


class DeviceStep:
    """decode, prefill, place, copy, swap_out and swap_in; cache and rows are donated where they change.

    capturable: see sampler.sample.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        prefill_seqs: int,
        implementation: Implementation,
        logprobs_mode: LogprobsMode,
        capturable: bool,
    ) -> None:
        # Split once: a call with flat leaves costs a fraction of one with an nnx module.
        self._graphdef, state = nnx.split(decoder)
        leaves, self._structure = jax.tree.flatten(state)
        self.leaves: list[Array] = leaves
        self._sample = partial(sample, logprobs_mode=logprobs_mode, capturable=capturable)
        self._prefill_seqs = prefill_seqs
        self._implementation = implementation
        self.decode = jax.jit(self._decode, static_argnames="variant", donate_argnames=("cache", "state"))
        self.prefill = jax.jit(self._prefill, donate_argnames="cache")
        self.place = jax.jit(place, donate_argnames="state")
        self.copy = jax.jit(self._copy, donate_argnames="cache")
        self.swap_out = jax.jit(gather_blocks)
        self.swap_in = jax.jit(scatter_blocks, donate_argnames="cache")

    def _decoder(self, leaves: list[Array]) -> Decoder:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._structure, leaves))

    def _decode(
        self, leaves: list[Array], cache: Cache, state: RowState, packed: Array, *, variant: Variant
    ) -> tuple[Array, StepScores | None, Cache, RowState]:
        """The next token of each row int32 [num_seqs], what is known of it, the cache and the rows."""
        decoder = self._decoder(leaves)
        rows, tokens, metadata, tables = decode_inputs(packed, state, cache[0])
        hidden, cache = decoder(tokens, cache, metadata)
        logits = decoder.logits(hidden)
        sampled, logprobs = self._sample(
            logits, sampling_of(state.sampling, rows), metadata.positions + 1, variant
        )
        with jax.named_scope("rows"):
            last = state.last_token.at[rows].set(sampled, mode="drop", unique_indices=True)
        scores = None if logprobs is None else StepScores(logprobs, logits)
        return sampled, scores, cache, RowState(tables, last, state.sampling)

    def _prefill(self, leaves: list[Array], cache: Cache, tables: Array, packed: Array) -> Cache:
        """Keys and values alone; the compiler drops what the last layer computes beyond them."""
        tokens, metadata = prefill_inputs(packed, tables, cache[0], self._prefill_seqs)
        return self._decoder(leaves)(tokens, cache, metadata)[1]

    def _copy(self, cache: Cache, pairs: Array) -> Cache:
        """pairs: int32 [2, num_pairs], sources and destinations."""
        return copy_blocks_of_layers(cache, pairs[0], pairs[1], implementation=self._implementation)
