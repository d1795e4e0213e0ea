"""What the partly filled last blocks of sequences waste, beside two rules for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TailWaste:
    """Shares of all slots in blocks of one size, when every request has its last token.

    aggregate: 1 - tokens / slots, over all requests together; per_request: the mean of each one's own share,
    which short requests raise. rule: block_size / (2 x mean length); closer_rule: (block_size - 1) /
    (2 x mean length + block_size - 1). Both rules are of the aggregate.
    """

    block_size: int
    aggregate: float
    per_request: float
    rule: float
    closer_rule: float

    @classmethod
    def of(cls, lengths: np.ndarray, block_size: int) -> TailWaste:
        """lengths: tokens that each request has stored, int [n]."""
        slots = -(-lengths // block_size) * block_size
        mean = float(lengths.mean())
        return cls(
            block_size=block_size,
            aggregate=1 - float(lengths.sum() / slots.sum()),
            per_request=float((1 - lengths / slots).mean()),
            rule=block_size / (2 * mean),
            closer_rule=(block_size - 1) / (2 * mean + block_size - 1),
        )
