"""From the options of an LLM to an engine: weights loaded, pool sized and allocated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.audit import AuditLog
from paged_jax.block_allocator import BlockAllocator
from paged_jax.capacity import (
    GIB,
    KVShape,
    blocks_for_bytes,
    blocks_for_tokens,
    check_block_size,
    check_pool_holds,
    max_tokens_of_pool,
)
from paged_jax.compilation_cache import enable_compilation_cache
from paged_jax.engine import Engine
from paged_jax.errors import InvalidArgument
from paged_jax.kv_cache import allocate_cache, kv_bytes_by_default, kv_dtype
from paged_jax.loader import load_model
from paged_jax.model_runner import Buckets, ModelRunner
from paged_jax.progress import track_weights
from paged_jax.scheduler import Scheduler

if TYPE_CHECKING:
    from models.loading import LoadedModel

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
MAX_PREFILL_SEQS = 16
"""Prompts that share one prefill call at most: the rows of its head and of its tables."""


class BuiltEngine(NamedTuple):
    """An engine, the model that it runs, and what a token of it takes."""

    engine: Engine
    loaded: LoadedModel
    kv_shape: KVShape


def build_engine(
    model: str | os.PathLike[str],
    *,
    dtype: str,
    max_model_len: int | None,
    block_size: int,
    num_blocks: int | None,
    kv_cache_gib: float | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_audit: AuditLog | None,
    seed: int | None,
    show_progress: bool,
) -> BuiltEngine:
    """Check the options, load the model and lay out its cache; see LLM for what each option means."""
    check_block_size(block_size)
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        _check_positive(name, value)
    for name, size in (("max_model_len", max_model_len), ("num_blocks", num_blocks)):
        if size is not None:
            _check_positive(name, size)
    if kv_cache_gib is not None:
        if (
            isinstance(kv_cache_gib, bool)
            or not isinstance(kv_cache_gib, int | float)
            or not kv_cache_gib > 0
        ):
            raise InvalidArgument.of("kv_cache_gib", kv_cache_gib, "a number of GiB above 0, or None")
        if num_blocks is not None:
            raise InvalidArgument(
                f"num_blocks={num_blocks} and kv_cache_gib={kv_cache_gib}: both size the pool; give one."
            )
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgument.of("dtype", dtype, f'"auto", {", ".join(map(repr, DTYPES))}')
    enable_compilation_cache()

    with track_weights(show_progress) as progress:
        loaded = load_model(model, dtype=lambda stated: _weights_dtype(dtype, stated), progress=progress)
    config = loaded.config
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise InvalidArgument.of(
            "max_model_len", max_model_len, f"{config.max_position_embeddings} at most, the model's own limit"
        )
    limit = max_model_len or config.max_position_embeddings
    weights_dtype = loaded.decoder.embed.embedding.dtype
    cache_dtype = kv_dtype(weights_dtype)
    kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, cache_dtype.itemsize)

    on_cpu = jax.default_backend() == "cpu"
    max_prefill_seqs = min(MAX_PREFILL_SEQS, max_num_seqs)
    buckets = Buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_seqs=max_prefill_seqs,
        max_model_len=limit,
        block_size=block_size,
        # XLA's CPU backend takes several times longer over one bfloat16 row than over eight.
        min_rows=8 if on_cpu and weights_dtype != jnp.float32 else 1,
    )
    runner = ModelRunner(loaded.decoder, buckets)
    if num_blocks is None:
        num_blocks = _num_blocks(runner, kv, kv_cache_gib, block_size, max_num_seqs, limit)
    if max_model_len is None:
        limit = min(limit, max_tokens_of_pool(num_blocks, block_size))
    check_pool_holds(num_blocks, block_size, limit)
    allocator = BlockAllocator(num_blocks, block_size, audit=kv_audit)
    runner.allocate(allocate_cache(kv, num_blocks=num_blocks, block_size=block_size, dtype=cache_dtype))
    scheduler = Scheduler(
        allocator,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_seqs=max_prefill_seqs,
        max_model_len=limit,
    )
    engine = Engine(
        runner,
        scheduler,
        loaded.tokenizer,
        vocab_size=config.vocab_size,
        max_model_len=limit,
        eos_ids=loaded.generation.eos_ids,
        seed=seed,
    )
    return BuiltEngine(engine, loaded, kv)


def _num_blocks(
    runner: ModelRunner,
    kv: KVShape,
    kv_cache_gib: float | None,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Blocks for the size that was asked for, or for the default one, which no batch can outgrow."""
    if kv_cache_gib is not None:
        kv_bytes = int(kv_cache_gib * GIB)
        return blocks_for_bytes(kv_bytes, block_size=block_size, bytes_per_token=kv.bytes_per_token)
    temporaries = 0
    if jax.default_backend() != "cpu":
        probe = jax.eval_shape(
            lambda: allocate_cache(kv, num_blocks=2, block_size=block_size, dtype=jnp.dtype(jnp.bfloat16))
        )
        temporaries = runner.largest_temporaries(probe)
    fits = blocks_for_bytes(
        kv_bytes_by_default(temporaries), block_size=block_size, bytes_per_token=kv.bytes_per_token
    )
    return min(fits, max_num_seqs * blocks_for_tokens(max_model_len, block_size) + 1)


def _weights_dtype(asked: str, stated: str) -> jnp.dtype:
    if asked == "auto":
        asked = "float32" if jax.default_backend() == "cpu" else stated
        if asked == "float32" and jax.default_backend() != "cpu":
            asked = "bfloat16"
    return jnp.dtype(DTYPES[asked])


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument.of(name, value, "an integer >= 1")
