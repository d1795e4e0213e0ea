"""The least time that memory allows: bytes that must move, over the bandwidth. Plain arithmetic, no jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeShape:
    """One layer's decode attention: every sequence has `context` tokens in the cache."""

    num_seqs: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        """Keys and values, each read once."""
        return 2 * self.num_seqs * self.context * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def num_bytes(self) -> int:
        """What must move: the keys and values, the queries, the result."""
        return self.kv_bytes + 2 * self.num_seqs * self.num_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class PrefillShape:
    """One layer's causal attention of whole prompts of `context` tokens."""

    num_seqs: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def num_bytes(self) -> int:
        """Keys and values read once, queries and the result."""
        rows = self.num_seqs * self.context * self.head_dim * self.itemsize
        return 2 * rows * (self.num_heads + self.num_kv_heads)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products over the visible half of the scores."""
        pairs = self.num_seqs * self.context * (self.context + 1) // 2
        return 4 * pairs * self.num_heads * self.head_dim


def microseconds(num_bytes: float, bandwidth: float) -> float:
    """The time that `num_bytes` take at `bandwidth` bytes a second."""
    return num_bytes / bandwidth * 1e6
