"""Runs steps on the device: holds the weights, the cache and the rows, and the programs over them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.batch import prefill_elements
from paged_jax.buckets import Buckets, ProgramKey
from paged_jax.device_step import Decoder, DeviceStep
from paged_jax.host_pool import HostPool, block_shape, swap_blocks
from paged_jax.kv_cache import Cache
from paged_jax.logprobs import LogprobArrays, row_scores, unpack_logprobs
from paged_jax.packed_step import PackedStep, Packer, batches
from paged_jax.programs import Programs, Progress, WarmUp
from paged_jax.rows import RowState, allocate_rows, packed_row
from paged_jax.sampler import LogprobsMode
from paged_jax.schedule import Sampled, Schedule
from pallas_kernels import Implementation


class LaunchedStep(NamedTuple):
    """What a step will have computed: arrays on the device, all but the logits on their way to the host."""

    staged: list[Array]
    tokens: Array | None = None
    logprobs: LogprobArrays | None = None
    logits: Array | None = None


class ModelRunner:
    """One decoder on the default device. The cache is handed over by `allocate`."""

    def __init__(
        self,
        decoder: Decoder,
        buckets: Buckets,
        implementation: Implementation = "auto",
        *,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        self.buckets = buckets
        self._step = DeviceStep(
            decoder,
            prefill_seqs=buckets.prefill_seqs,
            implementation=implementation,
            logprobs_mode=logprobs_mode,
            capturable=buckets.capturable,
        )
        self._cache: Cache = ()
        self._state: RowState | None = None
        self._host_pool: HostPool | None = None
        self._packer: Packer | None = None
        self._programs = Programs(lambda key: self.trace(key, self._cache))

    @property
    def weight_bytes(self) -> int:
        """Bytes that the parameters take on the device."""
        return sum(leaf.nbytes for leaf in self._step.leaves)

    @property
    def num_parameters(self) -> int:
        """Numbers that the model consists of."""
        return sum(leaf.size for leaf in self._step.leaves)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V of every layer."""
        return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self._cache))

    @property
    def cache(self) -> Cache:
        """The pools as the last step left them."""
        return self._cache

    @property
    def program_keys(self) -> list[ProgramKey]:
        """Every program that a step can need."""
        return self.buckets.program_keys(swap_blocks(self._cache) if self._host_pool else 0)

    @property
    def num_programs(self) -> int:
        """How many those are."""
        return len(self.program_keys)

    @property
    def compilations(self) -> int:
        """How many of them were compiled, ahead or when they were first needed."""
        return len(self._programs)

    def allocate(self, cache: Cache, num_host_blocks: int = 0) -> None:
        """Take over the pools, which from now on belong to the runner's steps; make rows for the sequences.

        num_host_blocks: of the swap space in the host's memory, which is taken when it is first used.
        """
        if self._cache and (cache[0].k.shape, len(cache)) != (self._cache[0].k.shape, len(self._cache)):
            self._programs.clear()
        self._cache = cache
        self._state = allocate_rows(self.buckets.max_num_seqs, self.buckets.max_blocks)
        self._host_pool = HostPool(num_host_blocks, cache) if num_host_blocks else None
        self._packer = Packer(
            self.buckets,
            num_blocks=cache[0].num_blocks,
            swap_blocks=swap_blocks(cache),
            host_pool=self._host_pool,
        )

    def warm_up(self, progress: Progress = lambda done, total, cache_hits: None) -> WarmUp:
        """Compile every program that a step can need: after it no step compiles."""
        return self._programs.warm_up(self.program_keys, progress)

    def execute(self, schedule: Schedule) -> Sampled:
        """Compute a step; returns the token sampled for each of its decode sequences.

        After a failure the pools and the rows are there, but nothing that a sequence has in them counts:
        sequences are to be computed again from their tokens, and their rows placed.
        """
        try:
            launched = self._launch(self._pack(schedule))
            return self._fetch(schedule, launched)
        except BaseException:
            self._recover()
            raise

    def trace(self, key: ProgramKey, cache: Cache) -> jax.stages.Traced:
        """A program over such a cache; weights and cache may be abstract."""
        step, state, size = self._step, self._abstract_rows(cache), key.size

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        match key.kind:
            case "decode":
                return step.decode.trace(step.leaves, cache, state, ints(3, size), variant=key.variant)
            case "prefill":
                packed = ints(prefill_elements(size, self.buckets.prefill_seqs))
                return step.prefill.trace(step.leaves, cache, state.tables, packed)
            case "place":
                return step.place.trace(state, ints(size, packed_row(self.buckets.max_blocks)))
            case "copy":
                return step.copy.trace(cache, ints(2, size))
            case "swap_out":
                return step.swap_out.trace(cache, ints(size))
            case "swap_in":
                staged = jax.ShapeDtypeStruct((size, *block_shape(cache)), cache[0].k.dtype)
                return step.swap_in.trace(cache, ints(size), staged)

    def largest_temporaries(self, cache: Cache) -> int:
        """Bytes that the largest program needs beside weights, cache, rows and packed array."""
        prefill = ProgramKey("prefill", self.buckets.prefill[-1])
        decode = ProgramKey("decode", self.buckets.decode[-1], "full")
        return max(_temporaries(self.trace(key, cache)) for key in (prefill, decode))

    def close(self) -> None:
        """Give the device's memory back, and the swap space."""
        for leaf in jax.tree.leaves((self._step.leaves, self._cache, self._state)):
            leaf.delete()
        self._step.leaves, self._cache, self._state, self._host_pool, self._packer = [], (), None, None, None
        self._programs.clear()

    def _abstract_rows(self, cache: Cache) -> RowState:
        """The rows' shapes, on the device where the cache is: not every program takes weights or cache."""
        rows = jax.eval_shape(lambda: allocate_rows(self.buckets.max_num_seqs, self.buckets.max_blocks))
        place = cache[0].k.sharding
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), rows)

    # -- a step, in three stages -------------------------------------------------------------------------

    def _pack(self, schedule: Schedule) -> PackedStep:
        """Everything that crosses to the device, as fresh arrays. Reads the swap space, changes nothing."""
        assert self._packer is not None, "allocate first"
        return self._packer.pack(schedule)

    def _launch(self, step: PackedStep) -> LaunchedStep:
        """Start every program, and the copies of their results to the host; waits for none."""
        leaves = self._step.leaves
        staged = [self._programs[key](self._cache, ids) for key, ids in step.swap_out]
        for array in staged:
            array.copy_to_host_async()
        for key, pairs in step.copies:
            self._cache = self._programs[key](self._cache, pairs)
        for (key, ids), blocks in step.swap_in:
            self._cache = self._programs[key](self._cache, ids, blocks)
        for key, rows in step.place:
            self._state = self._programs[key](self._rows, rows)
        for key, packed in step.prefill:
            self._cache = self._programs[key](leaves, self._cache, self._rows.tables, packed)
        if step.decode is None:
            return LaunchedStep(staged)
        key, packed = step.decode
        tokens, scores, self._cache, self._state = self._programs[key](
            leaves, self._cache, self._rows, packed
        )
        logprobs = scores.logprobs if scores is not None and step.wants_logprobs else None
        logits = scores.logits if scores is not None and step.has_beams else None
        for array in jax.tree.leaves((tokens, logprobs)):
            array.copy_to_host_async()
        return LaunchedStep(staged, tokens, logprobs, logits)

    def _fetch(self, schedule: Schedule, launched: LaunchedStep) -> Sampled:
        """Wait for what was launched: the swap space has its blocks, and the host the tokens."""
        if launched.staged:
            assert self._host_pool is not None, "allocated without a swap space"
            pairs_of_calls = batches(schedule.swap_out, swap_blocks(self._cache))
            for pairs, staged in zip(pairs_of_calls, launched.staged, strict=True):
                self._host_pool.write([host for _, host in pairs], np.asarray(staged))
        if launched.tokens is None:
            return Sampled([])
        tokens = np.asarray(launched.tokens)[: len(schedule.decode)].tolist()
        if launched.logprobs is None:
            return Sampled(tokens)
        logprobs = unpack_logprobs(schedule.decode, tokens, launched.logprobs)
        if launched.logits is None:
            return Sampled(tokens, logprobs)
        return Sampled(tokens, logprobs, row_scores(launched.logprobs, launched.logits))

    def _recover(self) -> None:
        """Zeros in the place of arrays that a failed step took, or whose value never came to be."""
        self._cache, self._state = jax.tree.map(_sound, (self._cache, self._state))

    @property
    def _rows(self) -> RowState:
        assert self._state is not None, "allocate first"
        return self._state


def _temporaries(traced: jax.stages.Traced) -> int:
    analysis = traced.lower().compile().memory_analysis()
    if analysis is None:
        return 0
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def _sound(array: Array) -> Array:
    """The array, or zeros where it is lost: taken as donated by a call that failed, or never computed."""
    shape, dtype = array.shape, array.dtype
    if not array.is_deleted():
        try:
            return array.block_until_ready()
        except Exception:  # whatever the device raises for a value that it could not compute
            array.delete()
    return jnp.zeros(shape, dtype)
