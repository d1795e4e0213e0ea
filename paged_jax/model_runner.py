"""Runs steps on the device: holds the weights and the cache, and the jitted programs over them."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged_jax.batch import Batch, BatchShape, Variant, pack, unpack
from paged_jax.capacity import blocks_for_tokens
from paged_jax.kv_cache import Cache
from paged_jax.sampler import sample
from paged_jax.scheduler import Schedule
from pallas_kernels import Implementation, Metadata, copy_blocks_of_layers


class Decoder(Protocol):
    """What an nnx module must offer to be run."""

    def __call__(self, tokens: Array, cache: Cache, metadata: Metadata) -> tuple[Array, Cache]:
        """int32 [num_tokens] -> hidden [num_tokens, hidden_size], and the cache with their K/V."""
        ...

    def logits(self, hidden: Array) -> Array:
        """[num_seqs, hidden_size] -> float32 [num_seqs, vocab_size]."""
        ...


class Buckets:
    """The static shapes that steps are padded to, so that a handful of programs serves every batch."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_seqs: int,
        max_model_len: int,
        block_size: int,
        min_rows: int = 1,
    ) -> None:
        # One row reads the weights once and is worth a program of its own; from 8 on, padding costs little.
        self.decode = _sizes([1, 8, 32, 64, 128, 256, 512, 1024], max_num_seqs, min_rows)
        self.prefill = _sizes([32 << i for i in range(16)], max_num_batched_tokens, min_rows)
        self.prefill_seqs = max(max_prefill_seqs, min_rows)
        self.max_blocks = blocks_for_tokens(max_model_len, block_size)

    def shape(self, schedule: Schedule) -> BatchShape:
        """The smallest shape that holds a schedule."""
        num_tokens = sum(entry.num_tokens for entry in schedule.entries)
        if schedule.phase == "decode":
            rows = next(size for size in self.decode if size >= num_tokens)
            return BatchShape("decode", rows, rows, self.max_blocks)
        padded = next(size for size in self.prefill if size >= num_tokens)
        return BatchShape("prefill", padded, self.prefill_seqs, self.max_blocks)

    @property
    def largest_prefill(self) -> BatchShape:
        """The shape whose program needs the most memory beside its arguments."""
        return BatchShape("prefill", self.prefill[-1], self.prefill_seqs, self.max_blocks)


def _sizes(steps: list[int], largest: int, smallest: int) -> list[int]:
    return [*(size for size in steps if smallest <= size < largest), max(largest, smallest)]


class ModelRunner:
    """One decoder on the default device. The cache is handed over by `allocate`."""

    def __init__(self, decoder: Decoder, buckets: Buckets, implementation: Implementation = "auto") -> None:
        self.buckets = buckets
        # Split once: a call with flat leaves costs a fraction of one with an nnx module.
        self._graphdef, state = nnx.split(decoder)
        self._leaves, self._structure = jax.tree.flatten(state)
        self._cache: Cache = ()
        self._num_slots = 0
        self._step = jax.jit(self._run, static_argnames=("shape", "variant"), donate_argnames=("cache",))
        copy = partial(_copy_blocks, implementation=implementation)
        self._copy = jax.jit(copy, donate_argnames=("cache",))

    @property
    def weight_bytes(self) -> int:
        """Bytes that the parameters take on the device."""
        return sum(leaf.nbytes for leaf in self._leaves)

    @property
    def cache(self) -> Cache:
        """The pools as the last step left them."""
        return self._cache

    def allocate(self, cache: Cache) -> None:
        """Take over the pools; from now on they belong to the runner's steps."""
        self._cache = cache
        num_blocks, _, block_size, _ = cache[0].k.shape
        self._num_slots = num_blocks * block_size

    def execute(self, schedule: Schedule) -> list[int]:
        """Compute a step; returns the token sampled for each of its entries.

        After a failure the pools are there, but nothing that a running sequence has in them counts.
        """
        batch = pack(schedule, self.buckets.shape(schedule), num_slots=self._num_slots)
        try:
            self._copy_first(schedule.copies)
            tokens = self._launch(batch)
            return np.asarray(tokens)[: len(schedule.entries)].tolist()
        except BaseException:
            self._cache = jax.tree.map(_unless_lost, self._cache)
            raise

    def trace(self, cache: Cache, shape: BatchShape, variant: Variant) -> jax.stages.Traced:
        """The program that a step of this shape runs over such a cache; weights and cache may be abstract."""
        packed = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        return self._step.trace(self._leaves, cache, packed, shape=shape, variant=variant)

    def trace_copies(self, cache: Cache, num_pairs: int) -> jax.stages.Traced:
        """The program that copies so many blocks in every layer; the cache may be abstract."""
        return self._copy.trace(cache, jax.ShapeDtypeStruct((2, num_pairs), jnp.int32))

    def largest_temporaries(self, cache: Cache) -> int:
        """Bytes that the largest program needs beside weights, cache and packed array."""
        program = self.trace(cache, self.buckets.largest_prefill, "filtered").lower().compile()
        analysis = program.memory_analysis()
        if analysis is None:
            return 0
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes

    def close(self) -> None:
        """Give the device's memory back."""
        for leaf in [*self._leaves, *jax.tree.leaves(self._cache)]:
            leaf.delete()
        self._leaves, self._cache = [], ()

    def _copy_first(self, copies: list[tuple[int, int]]) -> None:
        """Copy-on-write: all of a step's copies in one call, before anything of the step is written."""
        if not copies:
            return
        num_blocks = self._cache[0].k.shape[0]
        size = 1 << (len(copies) - 1).bit_length()
        # Padding pairs copy the null block to places past the pool's end, each its own: nowhere.
        pairs = np.zeros((2, size), np.int32)
        pairs[1] = num_blocks + np.arange(size)
        pairs[:, : len(copies)] = np.array(copies, np.int32).T
        self._cache = self._copy(self._cache, jnp.asarray(pairs))

    def _launch(self, batch: Batch) -> Array:
        packed = jnp.asarray(batch.packed)
        tokens, self._cache = self._step(
            self._leaves, self._cache, packed, shape=batch.shape, variant=batch.variant
        )
        return tokens

    def _run(
        self, leaves: list[Array], cache: Cache, packed: Array, *, shape: BatchShape, variant: Variant
    ) -> tuple[Array, Cache]:
        state = jax.tree.unflatten(self._structure, leaves)
        decoder: Decoder = nnx.merge(self._graphdef, state)
        tokens, metadata, last, sampling = unpack(packed, shape)
        hidden, cache = decoder(tokens, cache, metadata)
        return sample(decoder.logits(hidden[last]), sampling, variant), cache


def _copy_blocks(cache: Cache, pairs: Array, *, implementation: Implementation) -> Cache:
    return copy_blocks_of_layers(cache, pairs[0], pairs[1], implementation=implementation)


def _unless_lost(pool: Array) -> Array:
    """The pool, or an empty one where a step took it as donated and then failed."""
    return jnp.zeros(pool.shape, pool.dtype) if pool.is_deleted() else pool
