"""The cache on the device: one pool a layer, and how large it is where nobody said."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.capacity import KVShape, default_kv_bytes, format_bytes
from paged_jax.errors import InvalidArgument
from pallas_kernels import KVPool

Cache = tuple[KVPool, ...]


def kv_dtype(weights_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values: the weights', except on a CPU.

    There XLA turns bfloat16 operands into float32 ones first: a bfloat16 pool made a decode step three
    times slower.
    """
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else weights_dtype


def allocate_cache(kv: KVShape, *, num_blocks: int, block_size: int, dtype: jnp.dtype) -> Cache:
    """Zeroed pools, each K and V [num_blocks, num_kv_heads, block_size, head_dim]."""
    shape = (num_blocks, kv.num_kv_heads, block_size, kv.head_dim)

    def pool() -> Array:
        return jnp.zeros(shape, dtype)

    return tuple(KVPool(pool(), pool()) for _ in range(kv.num_layers))


def kv_bytes_by_default(largest_temporaries: int) -> int:
    """Bytes for the pool on the default device when no size was given; see capacity.default_kv_bytes."""
    stats = jax.devices()[0].memory_stats() or {}
    return default_kv_bytes(
        device_limit=stats.get("bytes_limit"),
        device_in_use=stats.get("bytes_in_use", 0),
        largest_temporaries=largest_temporaries,
        free_ram=free_ram(),
    )


def check_memory_for(num_bytes: int) -> None:
    """InvalidArgument where the device has less memory left than a pool of that size takes."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    left = free_ram() if limit is None else limit - stats.get("bytes_in_use", 0)
    if num_bytes > left:
        raise InvalidArgument(
            f"the pool would take {format_bytes(num_bytes)}, expected {format_bytes(left)} at most, which is"
            " what the device has left: lower num_blocks or kv_cache_gib."
        )


def free_ram() -> int:
    """Bytes of RAM that a new allocation can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # No such file off Linux: half of the physical memory is the nearest that the standard library tells.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
