"""A scheduler that never has to set anybody back: it admits a request once all it may need is free."""

from __future__ import annotations

from paged_jax.capacity import blocks_for_samples
from paged_jax.errors import PoolTooSmall
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request


class QueueOnlyScheduler(Scheduler):
    """What a request may need is told by its max_new_tokens, which here is the answer's true length."""

    def add(self, request: Request) -> None:
        """Queue a new request. PoolTooSmall, and nothing changes, if the pool can never hold all of it."""
        needed, usable = self._in_all(request), self.allocator.num_blocks - 1
        if needed > usable:
            raise PoolTooSmall(
                f"request {request.request_id!r}: its prompt and answer need {needed} blocks of"
                f" {self.allocator.block_size} tokens, the pool has {usable}."
            )
        super().add(request)

    def _missing(self, request: Request) -> int:
        tables = [sequence.table.blocks for sequence in request.sequences]
        held = len(tables[0]) if len(tables) == 1 else len(set().union(*tables))
        return max(self._in_all(request) - held, 0)

    def _kept_free(self, num_seqs: int) -> int:
        return sum(self._missing(request) for request in self.queues.running)

    def _in_all(self, request: Request) -> int:
        """Blocks at the end of all of its sequences."""
        return blocks_for_samples(
            len(request.prompt_token_ids),
            request.max_new_tokens,
            request.max_sequences,
            self.allocator.block_size,
        )
