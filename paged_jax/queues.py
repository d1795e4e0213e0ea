"""Where each request stands: waiting, amid its prefill, or decoding; and which device rows are taken."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from paged_jax.block_allocator import BlockAllocator
from paged_jax.capacity import blocks_for_tokens
from paged_jax.errors import PoolTooSmall
from paged_jax.sequence import Request, Sequence


class Queues:
    """The unfinished requests by where they stand. waiting is in order; a running request's unfinished
    sequences have a row each, 0 <= row < num_rows. by_id: every request that was not dropped.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.free_rows = list(reversed(range(num_rows)))
        self._arrivals = 0

    @property
    def running(self) -> list[Request]:
        """The requests that hold rows, first in order first."""
        return sorted([*self.decoding, *self.prefilling], key=order)

    @property
    def running_sequences(self) -> list[Sequence]:
        """Their unfinished sequences."""
        return [*unfinished(self.decoding), *unfinished(self.prefilling)]

    def arrive(self, request: Request) -> None:
        """Queue a new request at the place of its priority, behind its equals."""
        request.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, request, key=order)
        self.by_id[request.request_id] = request

    def seat(self, request: Request) -> None:
        """Take the first waiting request in; there are rows enough."""
        self.waiting.remove(request)
        self.prefilling.append(request)
        for sequence in unfinished([request]):
            sequence.row = self.free_rows.pop()

    def unseat(self, request: Request) -> None:
        """Have a running request wait again, at its place."""
        (self.decoding if request in self.decoding else self.prefilling).remove(request)
        self.give_rows_back(request)
        insort(self.waiting, request, key=order)

    def start_decoding(self, request: Request) -> None:
        """A request's prefill is done."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    def unseat_all(self) -> None:
        """Have every unfinished request wait, each at its place; right whatever state the queues are in."""
        for request in self.by_id.values():
            for sequence in request.sequences:
                sequence.row = None
        self.free_rows = list(reversed(range(self.num_rows)))
        self.prefilling.clear()
        self.decoding.clear()
        self.waiting[:] = sorted((r for r in self.by_id.values() if not r.is_finished), key=order)

    def take_out(self, request: Request) -> None:
        """A finished request stands nowhere; its id stays known."""
        self.give_rows_back(request)
        for queue in (self.waiting, self.prefilling, self.decoding):
            if request in queue:
                queue.remove(request)

    def drop(self, request: Request) -> None:
        """Forget a finished request."""
        del self.by_id[request.request_id]
        self.take_out(request)

    def give_rows_back(self, request: Request) -> None:
        """Its finished sequences' rows too."""
        for sequence in request.sequences:
            self.give_row_back(sequence)

    def give_row_back(self, sequence: Sequence) -> None:
        """Free a sequence's row; harmless where it has none."""
        if sequence.row is not None:
            self.free_rows.append(sequence.row)
            sequence.row = None


order = attrgetter("order")
"""What requests are sorted by, the first to be served first."""


def unfinished(requests: Iterable[Request]) -> list[Sequence]:
    """The sequences of these requests that want more tokens."""
    return [s for request in requests for s in request.sequences if s.finish_reason is None]


def check_can_begin(request: Request, allocator: BlockAllocator) -> None:
    """PoolTooSmall if the pool can never hold a request's prompt, or its sequences' first two tokens."""
    num_tokens, size = len(request.prompt_token_ids), allocator.block_size
    needed, usable = blocks_for_tokens(num_tokens, size), allocator.num_blocks - 1
    what = f"its {num_tokens} tokens need"
    width = request.max_sequences
    if width > 1 and request.max_new_tokens > 1:
        needed = num_tokens // size + width
        what = f"{width} sequences after its {num_tokens} tokens need"
    if needed > usable:
        raise PoolTooSmall(
            f"request {request.request_id!r}: {what} {needed} blocks of {size} tokens, the pool has {usable}:"
            f" raise num_blocks to {needed + 1} or more (or kv_cache_gib),"
            f" or {'ask for fewer' if width > 1 else 'shorten the prompt'}."
        )


def missing_blocks(request: Request, block_size: int) -> int:
    """Blocks that a request still takes until all of its tokens have a slot, the last one too.

    Of siblings that share a partly filled last block, all but one will copy it. A swapped request's blocks
    are those that it will come back to.
    """
    missing = 0
    lasts: Counter[int] = Counter()
    for place, sequence in enumerate(request.sequences):
        if sequence.finish_reason is not None:
            continue
        if request.swapped is not None and not sequence.table.blocks:
            blocks, num_tokens = request.swapped.tables[place]
        else:
            blocks, num_tokens = sequence.table.blocks, sequence.table.num_tokens
        has = len(blocks)
        if not has and sequence.shared_with is not None:
            has = sequence.shared_with[1] // block_size
        missing += max(blocks_for_tokens(len(sequence.token_ids), block_size) - has, 0)
        if num_tokens % block_size:
            lasts[blocks[-1]] += 1
    return missing + sum(lasts.values()) - len(lasts)
