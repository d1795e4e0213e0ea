"""What one step does, as the scheduler decided it: the message from the host's books to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paged_jax.sequence import Request, Sequence, TokenLogprobs


class Chunk(NamedTuple):
    """A sequence's part in a prefill: compute the keys and values of its tokens start, start + 1, ..."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens with a slot once the step is done."""
        return self.start + self.num_tokens


@dataclass
class Schedule:
    """One step. Everything in it has its blocks already; nothing of it has happened on the device.

    On the device the order is: swap-out reads, copies (simultaneous), swap-ins, then rows are placed, then
    the prefill, then the decode.

    prefill: chunks whose keys and values are computed. decode: sequences whose last token is computed and
    the next one sampled; its slot is the table's last one. A sequence can end its prefill and decode in one
    step. placed: sequences whose row on the device must be written first (sampling state, whole table, last
    token), because they are new to it or their table changed by more than a decode step's one block.
    copies: (source, destination) of copy-on-write. swap_out: (block, host block); swap_in: (host block,
    block). preempted: requests set back by this step; resumed: requests whose blocks come back from the
    swap space in it. exhausted: sequences that this step ended, because they were alone and the pool full.
    """

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    placed: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode) + sum(chunk.num_tokens for chunk in self.prefill)

    def __bool__(self) -> bool:
        """Whether the device has something to do."""
        return bool(self.prefill or self.decode or self.swap_out or self.swap_in)


class RowScores(NamedTuple):
    """What a step says about every next token, a row for each of Schedule.decode.

    top_ids: int [num_seqs, k], the most likely tokens, best first, equals in order of their ids;
    top_logprobs: float32 of the same shape. logits: the model's own, float32 [vocab_size], of a row; brought
    to the host when they are called for.
    """

    top_ids: np.ndarray
    top_logprobs: np.ndarray
    logits: Callable[[int], np.ndarray]


class Sampled(NamedTuple):
    """What a step gives back: a token for each of Schedule.decode, in order.

    logprobs: one for each of them too, where any of them wants logprobs, else None. scores: where any of them
    is a beam, whose next token is chosen on the host.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    scores: RowScores | None = None
