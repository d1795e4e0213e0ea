"""Blocks' bytes off the device: the host's side of swapping, and the device's gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.kv_cache import Cache
from pallas_kernels import KVPool

MOST_SWAP_BLOCKS = 32
MOST_STAGING_BYTES = 64 << 20
"""A call swaps so many blocks at most, and so many bytes."""


def block_shape(cache: Cache) -> tuple[int, ...]:
    """Of one block in every layer: [num_layers, 2 (K and V), num_kv_heads, block_size, head_dim]."""
    return (len(cache), 2, *cache[0].k.shape[1:])


def swap_blocks(cache: Cache) -> int:
    """Blocks that one call swaps."""
    num_bytes = int(np.prod(block_shape(cache))) * cache[0].k.dtype.itemsize
    return min(MOST_SWAP_BLOCKS, max(1, MOST_STAGING_BYTES // num_bytes))


class HostPool:
    """Blocks in the host's memory, in the device's dtype. Memory is taken at the first write."""

    def __init__(self, num_blocks: int, cache: Cache) -> None:
        self.num_blocks = num_blocks
        self._shape = (num_blocks, *block_shape(cache))
        self._dtype = np.dtype(cache[0].k.dtype)
        self._blocks: np.ndarray | None = None

    def read(self, host_blocks: Seq[int], size: int) -> np.ndarray:
        """A fresh array [size, ..]: the blocks, at most `size` of them, then anything."""
        staged = np.empty((size, *self._shape[1:]), self._dtype)
        staged[: len(host_blocks)] = self._memory()[list(host_blocks)]
        return staged

    def write(self, host_blocks: Seq[int], staged: np.ndarray) -> None:
        """Keep the first len(host_blocks) of the staged blocks."""
        self._memory()[list(host_blocks)] = staged[: len(host_blocks)]

    def _memory(self) -> np.ndarray:
        if self._blocks is None:
            self._blocks = np.empty(self._shape, self._dtype)
        return self._blocks


def pack_ids(blocks: Seq[int], *, size: int, num_blocks: int) -> np.ndarray:
    """Fresh, int32 [size]: the blocks, at most `size`, then ids past the pool's end, each its own."""
    packed = np.arange(num_blocks, num_blocks + size, dtype=np.int32)
    packed[: len(blocks)] = blocks
    return packed


def gather_blocks(cache: Cache, blocks: Array) -> Array:
    """Inside the program: [len(blocks), ..], each block of every layer; padding is anything."""
    with jax.named_scope("swap_out"):
        arrays = [array.at[blocks].get(mode="clip") for pool in cache for array in pool]
        stacked = jnp.stack(arrays, axis=1)
        return stacked.reshape(len(blocks), len(cache), 2, *stacked.shape[2:])


def scatter_blocks(cache: Cache, blocks: Array, staged: Array) -> Cache:
    """Inside the program: the cache with staged blocks in it, what gather_blocks gave."""

    def write(into: Array, new: Array) -> Array:
        return into.at[blocks].set(new, mode="drop", unique_indices=True)

    with jax.named_scope("swap_in"):
        return tuple(
            KVPool(write(pool.k, staged[:, layer, 0]), write(pool.v, staged[:, layer, 1]))
            for layer, pool in enumerate(cache)
        )
