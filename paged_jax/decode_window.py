"""Many decode steps at once: until a request arrives or ends where somebody waits, nothing is to be decided.

In such a stretch every running sequence gets one token a step, and takes a block whenever it has filled its
last one. So each table appends all of its tokens in one call, and what every step held is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from paged_jax.sequence import Sequence
from paged_jax.step_time import StepTime

MAX_ELEMENTS = 1 << 18
"""Sequences x steps of one window."""
SHORTEST = 3
"""Windows of fewer steps are not worth their arithmetic."""


@dataclass(frozen=True)
class DecodeWindow:
    """What so many steps will do. steps: how many of them each sequence takes part in, in order.

    [num_steps] each: seconds; running, sequences; more_blocks, than there were before the window; empty, free
    slots of last blocks, over the sequences that run.
    """

    steps: np.ndarray
    seconds: np.ndarray
    running: np.ndarray
    more_blocks: np.ndarray
    empty: np.ndarray

    @property
    def num_steps(self) -> int:
        """How many steps it is."""
        return len(self.seconds)


def plan_window(
    sequences: Seq[Sequence],
    *,
    may_end: bool,
    registers: bool,
    free_blocks: int,
    block_size: int,
    until: float | None,
    step_time: StepTime,
) -> DecodeWindow | None:
    """The longest window from here; None where it is not worth it.

    Each sequence lacks a slot for its last token alone, and is the only holder of its last block. may_end:
    whether it may go on when a sequence ends. registers: whether full blocks go into a prefix cache, which
    must happen before the next blocks are taken, since those may evict others. free_blocks: more than those
    it does not take. until: seconds to the next arrival; the window ends with the step in which those are
    over.
    """
    left = np.array([s.request.max_new_tokens - s.num_output_tokens for s in sequences])
    longest = int(left.max()) if may_end else int(left.min()) - 1
    longest = min(longest, MAX_ELEMENTS // len(sequences))
    if until is not None:
        longest = min(longest, int(until / step_time.fixed) + 1)
    if longest < SHORTEST:
        return None
    tokens = np.array([s.table.num_tokens for s in sequences])
    at = np.arange(longest)
    runs = at < left[:, None]
    slots = tokens[:, None] + at
    new = runs & (slots % block_size == 0)
    new_blocks = new.sum(axis=0)
    running = runs.sum(axis=0)
    read = ((slots + 1) * runs).sum(axis=0)
    seconds = step_time.fixed + step_time.per_token * running + step_time.per_kv_token * read
    num_steps = int(np.searchsorted(np.cumsum(new_blocks), free_blocks, side="right"))
    if until is not None:
        num_steps = min(num_steps, int(np.searchsorted(np.cumsum(seconds), until)) + 1)
    if registers and (later := np.flatnonzero(new_blocks[1:])).size:
        num_steps = min(num_steps, int(later[0]) + 1)
    if num_steps < SHORTEST:
        return None
    num_steps = min(num_steps, longest)
    empty = (-(slots + 1) % block_size * runs).sum(axis=0)
    given_back = np.zeros(longest + 1, np.int64)
    ended = left <= longest
    np.add.at(given_back, left[ended], -(-(tokens + left)[ended] // block_size))
    more_blocks = np.cumsum(new_blocks) - np.cumsum(given_back)[:longest]
    return DecodeWindow(
        np.minimum(left, num_steps),
        seconds[:num_steps],
        running[:num_steps],
        more_blocks[:num_steps],
        empty[:num_steps],
    )
