"""Which block size suits requests of some length: the waste of large blocks, the cost of small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paged_jax.capacity import KVShape, blocks_for_tokens

BLOCK_SIZES = (8, 16, 32, 64, 128)
MOST_WASTE = 0.035
"""Share of the slots that a recommended block size may leave empty."""
ASSUMED_MEAN = 500
"""Tokens of a request, prompt and answer, where no lengths are given."""

Efficiency = Literal["poor", "fair", "good"]
_GOOD_RUN, _FAIR_RUN = 4096, 2048


@dataclass(frozen=True)
class BlockSizeChoice:
    """What a block size comes to.

    expected_waste: of slots, by the mean length, (B - 1) / (2 x mean + B - 1); rule_of_thumb: B / (2 x mean).
    measured_waste: over the requests themselves, where there are some. run_bytes: contiguous bytes of a block
    for one KV head; efficiency: how well a kernel streams runs of that length. table_bytes: of the block
    tables on the device, int32, one row a sequence.
    """

    block_size: int
    expected_waste: float
    rule_of_thumb: float
    measured_waste: float | None
    run_bytes: int
    efficiency: Efficiency
    table_bytes: int

    @property
    def waste(self) -> float:
        """The measured one where there is one."""
        return self.expected_waste if self.measured_waste is None else self.measured_waste


def expected_waste(block_size: int, mean_tokens: float) -> float:
    """Share of a pool's used slots that stays empty: (B - 1) / 2 slots on average in each last block."""
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)


def efficiency_of(run_bytes: int) -> Efficiency:
    """By the bytes that lie together. Reckoned from memory transactions, not measured."""
    if run_bytes >= _GOOD_RUN:
        return "good"
    return "fair" if run_bytes >= _FAIR_RUN else "poor"


def table_bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Of the block tables on the device: int32, a row a sequence, as wide as the longest one needs."""
    return 4 * max_num_seqs * blocks_for_tokens(max_model_len, block_size)


def block_size_choices(
    kv: KVShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    mean_tokens: float,
    measured_waste: Callable[[int], float] | None,
) -> tuple[BlockSizeChoice, ...]:
    """Every block size of BLOCK_SIZES. mean_tokens: of a whole request."""
    choices = []
    for size in BLOCK_SIZES:
        run = size * kv.head_dim * kv.itemsize
        choices.append(
            BlockSizeChoice(
                block_size=size,
                expected_waste=expected_waste(size, mean_tokens),
                rule_of_thumb=min(size / (2 * mean_tokens), 1.0),
                measured_waste=measured_waste(size) if measured_waste else None,
                run_bytes=run,
                efficiency=efficiency_of(run),
                table_bytes=table_bytes(max_num_seqs, max_model_len, size),
            )
        )
    return tuple(choices)


def recommend(choices: tuple[BlockSizeChoice, ...]) -> tuple[int, str]:
    """The largest block size that wastes little, and why."""
    fine = [choice for choice in choices if choice.waste <= MOST_WASTE]
    if not fine:
        best = choices[0]
        return best.block_size, (
            f"{best.waste:.1%} of the slots stay empty: such short requests waste more in larger blocks"
        )
    best = fine[-1]
    larger = choices[choices.index(best) + 1 :]
    return best.block_size, (
        f"{best.waste:.1%} of the slots stay empty"
        + (f", with {larger[0].block_size} {larger[0].waste:.1%}" if larger else "")
        + f"; of those that waste {MOST_WASTE:.1%} at most it has the shortest tables and the longest reads"
        f" ({best.run_bytes / 1024:g} KiB, {best.efficiency}); smaller blocks share prefixes more finely"
    )
