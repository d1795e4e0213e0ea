"""From the options of an LLM to an engine: weights loaded, pool sized and allocated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_allocator import BlockAllocator
from paged_jax.buckets import Buckets
from paged_jax.capacity import (
    GIB,
    KVShape,
    PoolSize,
    check_pool_holds,
    longest_sequence,
    size_pool,
)
from paged_jax.compilation_cache import enable_compilation_cache
from paged_jax.engine import Engine
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidArgument
from paged_jax.kv_cache import allocate_cache, check_memory_for, kv_bytes_by_default, kv_dtype
from paged_jax.loader import load_model
from paged_jax.model_runner import ModelRunner
from paged_jax.preemption import Preemption, PreemptionCosts
from paged_jax.prefix_cache import PrefixCache
from paged_jax.programs import WarmUp
from paged_jax.progress import track_programs, track_weights
from paged_jax.scheduler import Scheduler

if TYPE_CHECKING:
    from models.loading import LoadedModel

MAX_PREFILL_SEQS = 16
"""Prompts that share one prefill call at most."""

INVARIANT_CHUNK = 256
"""Prompt tokens of the one prefill shape under batch_invariant, rounded to whole blocks."""

NOMINAL_RATES = {"cpu": (1e11, 5e9), "gpu": (2e14, 2e10)}
"""FLOP/s, and bytes/s between device and host, that preemption's estimate reckons with."""


class BuiltEngine(NamedTuple):
    """An engine, the model that it runs, its pool's size, and what was compiled ahead, if it was."""

    engine: Engine
    loaded: LoadedModel
    kv_shape: KVShape
    pool: PoolSize
    warm_up: WarmUp | None


def build_engine(
    model: str | os.PathLike[str], options: EngineOptions, *, show_progress: bool
) -> BuiltEngine:
    """Load the model and lay out its cache."""
    if not isinstance(model, str | os.PathLike):
        raise InvalidArgument.of("model", model, "a path, or a hub id org/name")
    enable_compilation_cache()
    with track_weights(show_progress) as progress:
        loaded = load_model(
            model,
            dtype=lambda stated: weights_dtype(options.dtype, stated),
            implementation=options.implementation,
            progress=progress,
        )
    config = loaded.config
    limit = config.max_position_embeddings
    longest = longest_sequence(
        options.max_model_len, limit, num_blocks=options.num_blocks, block_size=options.block_size
    )
    dtype = loaded.decoder.embed.embedding.dtype
    cache_dtype = kv_dtype(dtype)
    kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, cache_dtype.itemsize)
    chunk = _invariant_chunk(options) if options.batch_invariant else None
    max_prefill_seqs = min(MAX_PREFILL_SEQS, options.max_num_seqs) if chunk is None else 1
    buckets = Buckets(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_seqs=max_prefill_seqs,
        max_model_len=longest,
        block_size=options.block_size,
        # XLA's CPU backend takes several times longer over one bfloat16 row than over eight.
        min_rows=8 if jax.default_backend() == "cpu" and dtype != jnp.float32 else 1,
        batch_invariant=options.batch_invariant,
        prefill_chunk=chunk,
    )
    runner = ModelRunner(loaded.decoder, buckets, options.implementation, logprobs_mode=options.logprobs_mode)
    pool = size_pool(
        asked_len=options.max_model_len,
        limit=limit,
        num_blocks=options.num_blocks,
        kv_cache_gib=options.kv_cache_gib,
        default_bytes=lambda: _default_bytes(runner, kv, options.block_size, cache_dtype),
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        kv=kv,
    )
    num_blocks, block_bytes = pool.num_blocks, pool.block_bytes
    check_pool_holds(num_blocks, options.block_size, pool.max_model_len)
    check_memory_for(pool.num_bytes)
    allocator = BlockAllocator(num_blocks, options.block_size, audit=options.kv_audit)
    num_host_blocks = (
        0 if options.preemption_mode == "recompute" else int(options.swap_space_gib * GIB) // block_bytes
    )
    if options.batch_invariant:  # what is set back must find room there, whatever its size
        num_host_blocks = max(num_host_blocks, num_blocks)
    runner.allocate(
        allocate_cache(kv, num_blocks=num_blocks, block_size=options.block_size, dtype=cache_dtype),
        num_host_blocks,
    )
    flops, bandwidth = NOMINAL_RATES.get(jax.default_backend(), NOMINAL_RATES["gpu"])
    preemption = Preemption(
        allocator,
        mode=options.preemption_mode,
        num_host_blocks=num_host_blocks,
        costs=PreemptionCosts.of(
            num_parameters=runner.num_parameters,
            block_bytes=block_bytes,
            flops_per_second=flops,
            bytes_per_second=bandwidth,
        ),
    )
    scheduler = Scheduler(
        allocator,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_seqs=max_prefill_seqs,
        prefix_cache=PrefixCache(allocator, chunk=chunk) if options.enable_prefix_caching else None,
        preemption=preemption,
        prefill_chunk=chunk,
    )
    engine = Engine(
        runner,
        scheduler,
        loaded.tokenizer,
        vocab_size=config.vocab_size,
        max_model_len=pool.max_model_len,
        eos_ids=loaded.generation.eos_ids,
        seed=options.seed,
    )
    warm_up = None
    if options.warm_up:
        with track_programs(show_progress) as programs_progress:
            warm_up = runner.warm_up(programs_progress)
    return BuiltEngine(engine, loaded, kv, pool, warm_up)


def _invariant_chunk(options: EngineOptions) -> int:
    """Tokens of a prefill chunk under batch_invariant: whole blocks, within the budget of a step."""
    wanted = min(INVARIANT_CHUNK, options.max_num_batched_tokens)
    chunk = max(wanted // options.block_size, 1) * options.block_size
    if chunk > options.max_num_batched_tokens:
        raise InvalidArgument(
            f"max_num_batched_tokens={options.max_num_batched_tokens}: with batch_invariant, expected"
            f" block_size={options.block_size} at least, since chunks of prompts are whole blocks then."
        )
    return chunk


def weights_dtype(asked: str, stated: str) -> jnp.dtype:
    """The dtype to load weights in: asked, or what "auto" means for a checkpoint that states this one.

    float32 on a CPU; elsewhere float16 where the checkpoint states it, otherwise bfloat16.
    """
    if asked == "auto":
        if jax.default_backend() == "cpu":
            asked = "float32"
        else:
            asked = "float16" if stated == "float16" else "bfloat16"
    return jnp.dtype(asked)


def _default_bytes(runner: ModelRunner, kv: KVShape, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes for the pool where no size was given."""
    temporaries = 0
    if jax.default_backend() != "cpu":  # they do not depend on the pool's size, so a tiny one tells them
        probe = jax.eval_shape(lambda: allocate_cache(kv, num_blocks=2, block_size=block_size, dtype=dtype))
        temporaries = runner.largest_temporaries(probe)
    return kv_bytes_by_default(temporaries)
