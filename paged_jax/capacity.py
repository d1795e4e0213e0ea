"""How many blocks fit: the arithmetic between bytes, tokens and blocks, and the default size of a pool.

The engine sizes its pool with it, and the planner the one that the engine would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_jax.errors import InvalidArgument, PoolTooSmall

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

    @property
    def written_out(self) -> str:
        """The sum behind bytes_per_token: "32 layers x 2 x 32 heads x 128 x 2 bytes = 512 KiB"."""
        return (
            f"{self.num_layers} layers x 2 x {self.num_kv_heads} heads x {self.head_dim} x {self.itemsize}"
            f" bytes = {self.bytes_per_token / 1024:g} KiB"
        )


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


def blocks_for_samples(prompt_tokens: int, output_tokens: int, width: int, block_size: int) -> int:
    """Blocks that so many sequences over one prompt hold in the end, its full blocks shared.

    Each one's last token is sampled and never written.
    """
    whole = blocks_for_tokens(prompt_tokens + output_tokens - 1, block_size)
    shared = prompt_tokens // block_size if width > 1 else 0
    return shared + width * (whole - shared)


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


@dataclass(frozen=True)
class PoolSize:
    """A pool and what it holds. num_blocks counts the null block, which holds nothing."""

    num_blocks: int
    block_size: int
    kv: KVShape
    max_model_len: int
    """Tokens that one sequence may have, prompt and answer."""

    @property
    def usable_blocks(self) -> int:
        """All but the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def block_bytes(self) -> int:
        """Of one block, keys and values of every layer."""
        return self.block_size * self.kv.bytes_per_token

    @property
    def num_bytes(self) -> int:
        """What the pool takes, the null block included."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the usable blocks hold."""
        return self.usable_blocks * self.block_size

    @property
    def longest_at_once(self) -> float:
        """Sequences of max_model_len tokens that fit at once."""
        return self.usable_blocks / max(blocks_for_tokens(self.max_model_len, self.block_size), 1)

    def describe(self, weight_bytes: int) -> str:
        """The ledger of a start, in a line."""
        return (
            f"weights {format_bytes(weight_bytes)}; KV cache {self.kv.written_out} a token,"
            f" {self.usable_blocks:,} blocks of {self.block_size} tokens = {self.num_tokens:,} tokens,"
            f" {format_bytes(self.usable_blocks * self.block_bytes)}: {self.longest_at_once:,.1f} sequences"
            f" of max_model_len={self.max_model_len:,} tokens at once"
        )


def longest_sequence(asked: int | None, limit: int, *, num_blocks: int | None, block_size: int) -> int:
    """max_model_len before the pool is sized: as asked, else the model's limit, or a given pool's if less."""
    if asked is not None and asked > limit:
        raise InvalidArgument.of("max_model_len", asked, f"{limit} at most, the model's own limit")
    if asked is None and num_blocks is not None:
        return min(limit, max_tokens_of_pool(num_blocks, block_size))
    return asked or limit


def size_pool(
    *,
    asked_len: int | None,
    limit: int,
    num_blocks: int | None,
    kv_cache_gib: float | None,
    default_bytes: Callable[[], int],
    max_num_seqs: int,
    block_size: int,
    kv: KVShape,
) -> PoolSize:
    """The pool of an engine with these options, and the longest sequence that goes with it.

    asked_len: the option max_model_len; limit: the model's own. A size that was given gets no headroom:
    num_blocks as it is, or what fits into kv_cache_gib. Otherwise it is what fits into default_bytes(), and
    no more than max_num_seqs sequences of the longest length need. check_pool_holds tells whether it will do.
    """
    longest = longest_sequence(asked_len, limit, num_blocks=num_blocks, block_size=block_size)
    if num_blocks is None:
        kv_bytes = default_bytes() if kv_cache_gib is None else int(kv_cache_gib * GIB)
        num_blocks = blocks_for_bytes(kv_bytes, block_size=block_size, bytes_per_token=kv.bytes_per_token)
        if kv_cache_gib is None:
            num_blocks = min(num_blocks, max_num_seqs * blocks_for_tokens(longest, block_size) + 1)
    if asked_len is None:
        longest = max(0, min(longest, max_tokens_of_pool(num_blocks, block_size)))
    return PoolSize(num_blocks, block_size, kv, longest)
