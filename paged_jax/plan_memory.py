"""Where the memory goes in a plan: weights, activations, and the pool that the engine would have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged_jax.capacity import (
    HEADROOM,
    KVShape,
    PoolSize,
    blocks_for_bytes,
    blocks_for_tokens,
    check_pool_holds,
    default_kv_bytes,
    format_bytes,
    size_pool,
)
from paged_jax.demand import Demand
from paged_jax.errors import PoolTooSmall
from paged_jax.model_shape import ModelShape
from paged_jax.plan_options import PlanOptions


@dataclass(frozen=True)
class Memory:
    """What a device's memory is for. limit_bytes: what the process may have; None: no device was given.

    activation_bytes: an estimate of what the largest program needs beside weights and cache.
    """

    weight_bytes: int
    activation_bytes: int
    limit_bytes: int | None

    @property
    def left_bytes(self) -> int | None:
        """For keys and values, headroom included; never below 0."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.weight_bytes - self.activation_bytes)

    @property
    def pool_bytes(self) -> int:
        """Of left_bytes, what a pool takes by default, as the engine reckons it."""
        return default_kv_bytes(
            device_limit=self.limit_bytes or 0,
            device_in_use=self.weight_bytes,
            largest_temporaries=self.activation_bytes,
            free_ram=0,
        )

    @property
    def weights_fit(self) -> bool:
        """Whether the weights fit, or no device was given."""
        return self.limit_bytes is None or self.weight_bytes <= self.limit_bytes


@dataclass(frozen=True)
class PlannedPool:
    """A pool and how it came about.

    source: "given": its size was; "device": what weights and activations leave, less the headroom; "demand":
    what the requests need. fitting_blocks: that fit, before the cap at what the sequences can use; of a given
    pool, its own. headroom: share that was left free. problems: why the engine would refuse it.
    """

    size: PoolSize
    source: Literal["given", "device", "demand"]
    fitting_blocks: int
    headroom: float
    problems: tuple[str, ...]


def activation_bytes(shape: ModelShape, itemsize: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """An estimate of the largest program's temporaries.

    Prefill: 8 bytes of each token's feed-forward, gate and up in float32 (12 with float32 weights, which keep
    their product beside them), and 4 of its hidden state. Decode: 20 bytes of each row's every logit, which
    full sampling sorts. Of the programs compiled for an A100 and an H200 (Llama 3 8B, 2,048 tokens, 64 rows)
    the largest have 277 and 228 MB; this says 268.
    """
    per_token = shape.widest_layer * (12 if itemsize == 4 else 8) + 4 * shape.hidden_size
    return max(max_num_batched_tokens * per_token, 20 * max_num_seqs * shape.vocab_size)


def with_headroom(blocks: int) -> int:
    """num_blocks, the null block included, of which so many are the share that headroom leaves."""
    return -int(-blocks // HEADROOM) + 1


def plan_pool(
    options: PlanOptions,
    memory: Memory,
    kv: KVShape,
    *,
    limit: int,
    longest: int,
    concurrency: int,
    demand: Demand | None,
) -> PlannedPool:
    """The pool that LLM would have with these options.

    limit: the model's context; longest: tokens of a sequence, before the pool is known.
    """
    source: Literal["given", "device", "demand"] = "device"
    num_blocks = options.num_blocks
    if num_blocks is not None or options.kv_cache_gib is not None:
        source = "given"
    elif memory.limit_bytes is None:
        source = "demand"
        num_blocks = concurrency * blocks_for_tokens(longest, options.block_size) + 1
        if demand is not None:
            num_blocks = with_headroom(demand.peak_blocks(concurrency, options.block_size))
    size = size_pool(
        asked_len=options.max_model_len,
        limit=limit,
        num_blocks=num_blocks,
        kv_cache_gib=options.kv_cache_gib,
        default_bytes=lambda: memory.pool_bytes,
        max_num_seqs=concurrency,
        block_size=options.block_size,
        kv=kv,
    )
    fitting = size.num_blocks
    if source == "device":
        fitting = blocks_for_bytes(
            memory.pool_bytes, block_size=size.block_size, bytes_per_token=kv.bytes_per_token
        )
    spared = source == "device" or (source == "demand" and demand is not None)
    headroom = round(1 - HEADROOM, 6) if spared else 0.0
    return PlannedPool(size, source, fitting, headroom, tuple(_problems(size, memory, source)))


def _problems(pool: PoolSize, memory: Memory, source: str) -> list[str]:
    """Why an engine with this pool would not start."""
    limit = memory.limit_bytes
    if limit is not None and not memory.weights_fit:
        return [
            f"the weights take {format_bytes(memory.weight_bytes)}, larger than the device's"
            f" {format_bytes(limit)}: they would need {-(-memory.weight_bytes // limit)} such devices at"
            " least, and this engine runs on one"
        ]
    problems = []
    if source == "given" and limit is not None and memory.weight_bytes + pool.num_bytes > limit:
        problems.append(
            f"the pool takes {format_bytes(pool.num_bytes)} and the weights"
            f" {format_bytes(memory.weight_bytes)}: together more than the device's {format_bytes(limit)}"
        )
    try:
        check_pool_holds(pool.num_blocks, pool.block_size, pool.max_model_len)
    except PoolTooSmall as error:
        problems.append(str(error))
    return problems
