"""How many blocks fit: the arithmetic between bytes, tokens and blocks, and the default size of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from paged_jax.errors import PoolTooSmall

GIB = 1 << 30
HEADROOM = 0.8
"""Share of the memory that is left over which a pool takes unless its size was given."""
CPU_DEFAULT_BYTES = GIB
CPU_FREE_SHARE = 0.25
"""Where the backend reports no memory, a pool takes 1 GiB, or a quarter of the free RAM if that is less."""


@dataclass(frozen=True)
class KVShape:
    """The sizes that decide what a token's keys and values take."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) x layers x kv_heads x head_dim x itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


def blocks_for_bytes(kv_bytes: int, *, block_size: int, bytes_per_token: int) -> int:
    """max_num_blocks = kv_bytes / (block_size x bytes_per_token); 40 GiB, 32, 512 KiB -> 2,560."""
    return kv_bytes // (block_size * bytes_per_token)


def default_kv_bytes(
    *, device_limit: int | None, device_in_use: int, largest_temporaries: int, free_ram: int
) -> int:
    """Bytes that a pool takes when nothing was said.

    device_limit and device_in_use are the backend's own figures (weights are loaded by then),
    largest_temporaries what the largest program needs beside its arguments. None stands for a backend
    that reports no memory (the CPU).
    """
    if device_limit is None:
        return min(CPU_DEFAULT_BYTES, int(free_ram * CPU_FREE_SHARE))
    return max(0, int((device_limit - device_in_use - largest_temporaries) * HEADROOM))


def format_bytes(num_bytes: int) -> str:
    """In GiB from one GiB on, else in MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def max_tokens_of_pool(num_blocks: int, block_size: int) -> int:
    """Tokens that one sequence can have at most: every block but the null block."""
    return (num_blocks - 1) * block_size


def check_pool_holds(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """PoolTooSmall unless one sequence of max_model_len tokens fits, and a prompt with an answer at all."""
    if max_tokens_of_pool(num_blocks, block_size) < 2:
        raise PoolTooSmall(
            f"{num_blocks} blocks of {block_size} tokens, the null block included, can not hold one token of"
            " a prompt and one of an answer: raise num_blocks or kv_cache_gib."
        )
    needed = blocks_for_tokens(max_model_len, block_size)
    if needed > num_blocks - 1:
        raise PoolTooSmall(
            f"max_model_len={max_model_len} needs {needed} blocks of {block_size} tokens, the pool has"
            f" {num_blocks - 1} (num_blocks={num_blocks} less the null block): raise num_blocks or"
            f" kv_cache_gib, or lower max_model_len to {max_tokens_of_pool(num_blocks, block_size)}."
        )
