"""What requests of given lengths ask of a pool: tokens held, blocks, waste, and how many run at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_jax.request_trace import Trace
from paged_jax.tail_waste import TailWaste

ADMITTED_SHARE = 0.99
"""Of the requests, that the smallest sensible reservation of a maximum admits."""


@dataclass(frozen=True)
class Demand:
    """The sums over a trace. A request's last token is sampled but never written: it has no slot."""

    trace: Trace

    @property
    def mean_tokens(self) -> float:
        """Of a request, prompt and answer."""
        return float(self.trace.total_tokens.mean())

    @property
    def mean_held_tokens(self) -> float:
        """Tokens that a running request holds, averaged over the steps in which it generates.

        An answer of n tokens takes n steps, in which its request holds prompt, prompt + 1, ... tokens.
        """
        prompt, steps = self.trace.prompt_tokens, self.trace.output_tokens
        return float((steps * (prompt + (steps - 1) / 2)).sum() / steps.sum())

    def mean_held_blocks(self, block_size: int) -> float:
        """The same in blocks, each whole however little of it is in use."""
        first, last = self.trace.prompt_tokens - 1, self.final_tokens
        blocks = _sum_of_blocks(last, block_size) - _sum_of_blocks(first, block_size)
        return float(blocks.sum() / self.trace.output_tokens.sum())

    @property
    def final_tokens(self) -> NDArray[np.int64]:
        """int64 [n]: slots that each request uses when it ends."""
        return self.trace.total_tokens - 1

    def final_blocks(self, block_size: int) -> NDArray[np.int64]:
        """int64 [n]: blocks that each request holds when it ends."""
        return -(-self.final_tokens // block_size)

    def tail_waste(self, block_size: int) -> float:
        """Share of all slots that stays empty when the requests end: 1 - sum of tokens / sum of slots."""
        return TailWaste.of(self.final_tokens, block_size).aggregate

    def peak_blocks(self, concurrency: int, block_size: int) -> int:
        """The most blocks that so many requests, one after the other in the trace, hold at their ends."""
        blocks = self.final_blocks(block_size)
        together = min(concurrency, len(blocks))
        sums = np.concatenate(([0], np.cumsum(blocks)))
        peak = int((sums[together:] - sums[:-together]).max())
        # A trace shorter than the concurrency is repeated as often as it takes.
        return peak if together == concurrency else -(-peak * concurrency // together)

    def reservation(self) -> int:
        """Tokens of the smallest reservation that is enough for 99 % of the requests."""
        return int(np.quantile(self.trace.total_tokens, ADMITTED_SHARE, method="inverted_cdf"))

    def at_once(
        self, seconds_per_step: Callable[[int], float], *, busy_share: float, most: int
    ) -> int | None:
        """Requests in flight at the fullest moment, if each is served from its arrival on; None: over `most`.

        seconds_per_step: of a decode step of so many sequences. busy_share: of the device's time that prompts
        take, which decode steps wait for. More at once make steps longer, so the number is raised until it
        agrees with itself.
        """
        if busy_share >= 1:
            return None
        found, tried = 1, 0
        while found > tried:
            if found > most:
                return None
            tried = found
            found = self._fullest(seconds_per_step(tried) / (1 - busy_share))
        return tried

    def _fullest(self, seconds_per_token: float) -> int:
        """The most requests in flight at one moment, where each token takes so long."""
        starts = self.trace.arrival_s
        ends = np.sort(starts + self.trace.output_tokens * seconds_per_token)
        ended = np.searchsorted(ends, starts, side="right")
        return int((np.arange(1, len(starts) + 1) - ended).max())


def _sum_of_blocks(tokens: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Blocks that hold 1, 2, ... up to so many tokens, summed."""
    whole, rest = np.divmod(tokens, block_size)
    return block_size * whole * (whole + 1) // 2 + rest * (whole + 1)
