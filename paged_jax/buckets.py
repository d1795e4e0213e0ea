"""The static shapes that steps are padded to: each of them is one compiled program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from paged_jax.capacity import blocks_for_tokens
from paged_jax.schedule import Chunk

Variant = Literal["greedy", "temperature", "full"]
"""What the sampling of a decode step must be able to do; "full" can do everything."""

Kind = Literal["decode", "prefill", "place", "copy", "swap_out", "swap_in"]


class ProgramKey(NamedTuple):
    """Names one program. size: rows, tokens, placed rows, copied pairs or swapped blocks of a call."""

    kind: Kind
    size: int
    variant: Variant = "full"
    """Of a decode program; the others have one variant."""


@dataclass(frozen=True)
class Plan:
    """How many programs a platform gets, and of which kind."""

    variants: tuple[Variant, ...]
    decode_sizes: int
    prefill_sizes: int
    copy_pairs: int
    capturable: bool
    """Whether programs must do without conditionals and loops."""


PLANS = {
    # A conditional costs a CPU nothing, so one variant does; and a call costs little, so few copies a call.
    "cpu": Plan(("full",), decode_sizes=5, prefill_sizes=7, copy_pairs=8, capturable=False),
    # A CUDA graph does not capture conditionals; calls cost more than the copies that pad them.
    "cuda": Plan(
        ("greedy", "temperature", "full"), decode_sizes=3, prefill_sizes=3, copy_pairs=64, capturable=True
    ),
}
PLACED_ROWS = 16
"""Rows that one call places."""


class Buckets:
    """The shapes of every program that a runner may need: 16 programs or fewer.

    min_rows: decode steps and prefills have that many rows at least. batch_invariant: one decode shape, one
    variant and one prefill shape, of prefill_chunk tokens of one sequence (max_num_batched_tokens unless
    given); elsewhere prefill_chunk has no effect. platform: "cpu" or "cuda"; JAX's default one unless given.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_seqs: int,
        max_model_len: int,
        block_size: int,
        min_rows: int = 1,
        prefill_chunk: int | None = None,
        batch_invariant: bool = False,
        platform: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        if platform is None:
            platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
        plan = PLANS[platform]
        self.max_num_seqs = max_num_seqs
        self.max_blocks = blocks_for_tokens(max_model_len, block_size)
        self.variants: tuple[Variant, ...] = plan.variants
        self.copy_pairs = plan.copy_pairs
        self.capturable = plan.capturable
        self.placed_rows = min(PLACED_ROWS, max_num_seqs)
        # One row reads the weights once and is worth a program of its own; from 8 on, padding costs little.
        decode = _sizes([1, 8, 16, 32, 64, 128, 256, 512, 1024], max_num_seqs, min_rows)
        self.decode = _thinned(decode, plan.decode_sizes)
        prefill = _sizes([32 << i for i in range(16)], max_num_batched_tokens, min_rows)
        self.prefill = _thinned(prefill, plan.prefill_sizes)
        self.prefill_seqs = max_prefill_seqs
        if batch_invariant:
            self.variants = ("full",)
            self.decode = self.decode[-1:]
            self.prefill = [prefill_chunk or max_num_batched_tokens]
            self.prefill_seqs = 1

    def decode_size(self, num_seqs: int) -> int:
        """Rows of the smallest decode program that holds so many sequences."""
        return next(size for size in self.decode if size >= num_seqs)

    def prefill_size(self, num_tokens: int) -> int:
        """Tokens of the smallest prefill program that holds so many."""
        return next(size for size in self.prefill if size >= num_tokens)

    def prefill_calls(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks in order, as many in one call as its tokens and rows hold; ValueError if one is larger.

        Chunks of one sequence stay in order, so that a later one finds the keys of the earlier.
        """
        call: list[Chunk] = []
        tokens = 0
        for chunk in chunks:
            if chunk.num_tokens > self.prefill[-1]:
                raise ValueError(f"a chunk of {chunk.num_tokens} tokens; prefills hold {self.prefill[-1]}")
            if call and (len(call) == self.prefill_seqs or tokens + chunk.num_tokens > self.prefill[-1]):
                yield call
                call, tokens = [], 0
            call.append(chunk)
            tokens += chunk.num_tokens
        if call:
            yield call

    def program_keys(self, swap_blocks: int = 0) -> list[ProgramKey]:
        """Every program, those that take longest to compile first; swap_blocks: of a call, 0 for no swaps."""
        keys = [ProgramKey("prefill", size) for size in reversed(self.prefill)]
        keys += [ProgramKey("decode", size, v) for size in reversed(self.decode) for v in self.variants]
        keys += [ProgramKey("place", self.placed_rows), ProgramKey("copy", self.copy_pairs)]
        if swap_blocks:
            keys += [ProgramKey("swap_out", swap_blocks), ProgramKey("swap_in", swap_blocks)]
        return keys


def _sizes(steps: list[int], largest: int, smallest: int) -> list[int]:
    return [*(size for size in steps if smallest <= size < largest), max(largest, smallest)]


def _thinned(sizes: list[int], most: int) -> list[int]:
    """At most so many of them, evenly chosen; the smallest and the largest stay."""
    if len(sizes) <= most:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)]
