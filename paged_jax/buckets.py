"""The static shapes that steps are padded to: each of them is one compiled program."""

from __future__ import annotations

import math
from collections import deque
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
    prefill_call_tokens: int
    """What a further prefill call costs, in prompt tokens of computing."""
    capturable: bool
    """Whether programs must do without conditionals and loops."""
    free_rows: int | None
    """Decode rows that cost no more than one, as reading the weights takes longer; None: each row costs."""


PLANS = {
    # A conditional costs a CPU nothing, so one variant does; and a call costs little, so few copies a call.
    "cpu": Plan(
        ("full",),
        decode_sizes=5,
        prefill_sizes=7,
        copy_pairs=8,
        prefill_call_tokens=64,
        capturable=False,
        free_rows=None,
    ),
    # A CUDA graph does not capture conditionals; calls cost more than the copies that pad them, and each
    # reads every weight, which takes an H100 as long as computing some 300 tokens of bfloat16.
    "cuda": Plan(
        ("greedy", "temperature", "full"),
        decode_sizes=3,
        prefill_sizes=3,
        copy_pairs=64,
        prefill_call_tokens=320,
        capturable=True,
        free_rows=256,
    ),
}
PLACED_ROWS = 16
"""Rows that one call places."""


class Buckets:
    """The shapes of every program that a runner may need: 16 programs or fewer.

    A GPU has further decode sizes for max_num_seqs beyond 256, where padding is no longer free.

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
        self._prefill_call_tokens = plan.prefill_call_tokens
        self.capturable = plan.capturable
        self.placed_rows = min(PLACED_ROWS, max_num_seqs)
        self.decode = _decode_sizes(max_num_seqs, min_rows, plan)
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

        A call that would be padded by more than a further call costs ends where the next smaller program
        does, amid a chunk if need be. Chunks of one sequence stay in order, so that a later one finds the
        keys of the earlier.
        """
        waiting = deque(chunks)
        while waiting:
            call: list[Chunk] = []
            room = self.prefill[-1]
            while waiting and len(call) < self.prefill_seqs and waiting[0].num_tokens <= room:
                call.append(waiting.popleft())
                room -= call[-1].num_tokens
            if not call:
                raise ValueError(f"a chunk of {waiting[0].num_tokens} tokens; prefills hold {room}")
            tokens = self.prefill[-1] - room
            over = tokens - self._filled(tokens)
            while over > 0:
                last = call.pop()
                kept = max(last.num_tokens - over, 0)
                if kept:
                    call.append(Chunk(last.sequence, last.start, kept))
                waiting.appendleft(Chunk(last.sequence, last.start + kept, last.num_tokens - kept))
                over -= last.num_tokens - kept
            yield call

    def _filled(self, num_tokens: int) -> int:
        """How many of a call's tokens to compute in it: all, or those that fill the next smaller program."""
        lower = max((size for size in self.prefill if size < num_tokens), default=0)
        split = lower + self._prefill_call_tokens + self.prefill_size(num_tokens - lower)
        return lower if lower and split <= self.prefill_size(num_tokens) else num_tokens

    def program_keys(self, swap_blocks: int = 0) -> list[ProgramKey]:
        """Every program, those that take longest to compile first; swap_blocks: of a call, 0 for no swaps."""
        keys = [ProgramKey("prefill", size) for size in reversed(self.prefill)]
        keys += [ProgramKey("decode", size, v) for size in reversed(self.decode) for v in self.variants]
        keys += [ProgramKey("place", self.placed_rows), ProgramKey("copy", self.copy_pairs)]
        if swap_blocks:
            keys += [ProgramKey("swap_out", swap_blocks), ProgramKey("swap_in", swap_blocks)]
        return keys


def _decode_sizes(largest: int, smallest: int, plan: Plan) -> list[int]:
    """A plan's number at most, growing by about equal factors: that is how much a step is padded at worst.

    One row reads the weights once and is worth a program of its own; from 8 on, padding costs little, up to
    the rows that are free. Beyond those, more sizes, none over four times the one before.
    """
    most, free = plan.decode_sizes, plan.free_rows
    if free is not None and largest > free:
        more = math.ceil(math.log(largest / free, 4))
        above = [int(free * (largest / free) ** (i / more)) // 8 * 8 for i in range(more)]
        return _sizes([1, 32, *above], largest, smallest)
    sizes = _sizes([1, *(8 << i for i in range(16))], largest, smallest)
    if len(sizes) <= most:
        return sizes
    factor = (largest / 2) ** (1 / (most - 1))
    steps = [max(8, int(2 * factor**i) // 8 * 8) for i in range(1, most - 1)]
    return _sizes(sorted({1, *steps}), largest, smallest)


def _sizes(steps: list[int], largest: int, smallest: int) -> list[int]:
    return [*(size for size in steps if smallest <= size < largest), max(largest, smallest)]


def _thinned(sizes: list[int], most: int) -> list[int]:
    """At most so many of them, evenly chosen; the smallest and the largest stay."""
    if len(sizes) <= most:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)]
