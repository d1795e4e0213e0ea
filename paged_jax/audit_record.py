"""One event of one block."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple, get_args

__all__ = ["Action", "AuditRecord"]

Action = Literal[
    "allocate",
    "incref",
    "hit",
    "decref",
    "free",
    "write",
    "adopt",
    "copy",
    "swap-out",
    "fetched",
    "swap-in",
    "register",
    "evict",
    "refused",
    "arrive",
    "end",
    "forget",
    "reset",
]
ACTIONS = frozenset(get_args(Action))
TAKES = frozenset(["allocate", "incref", "hit"])
GIVES = frozenset(["decref", "free"])
OF_NO_BLOCK = frozenset(["arrive", "end", "forget", "reset"])
"""The actions of a request, or of the whole pool: their block is 0."""


class AuditRecord(NamedTuple):
    """One event of one block.

    `allocate`, `incref`, `hit` (an incref through the prefix cache), `decref` and `free` (the decref that
    reaches 0) change the count by one; no other action does. So the changes of a block's records add up to
    its ref_cnt. `reason` says what for: append, fork, prefix hit, shared again, swap-in; copy-on-write,
    finish, abort, failure, preempt, swap-out, beam dropped, reset.

    `write`: tokens got their slots, at the offsets `start` to `end` - 1. `adopt`: a table begins with it, and
    with the tokens that it holds. `copy`: copy-on-write, written for its source; `other` is the destination.
    `swap-out`: its bytes are to be read into the host block `other`; `fetched`: they have arrived there;
    `swap-in`: they are to come from there.
    `register`: a prefix leads to it from now on, until `evict`. `refused`: a double free, or the use of a
    free block, that the allocator did not let through.

    Of no block are: `arrive` and `end`, of a request (the owner); `forget`: no prefix leads anywhere any
    more; `reset`: after a failed step nobody holds anything.
    """

    time: float  # time.monotonic(), in seconds
    step: int  # AuditLog.step at that moment
    action: Action
    block: int
    owner: Hashable
    ref_cnt_before: int
    ref_cnt_after: int
    reason: str
    start: int | None = None
    end: int | None = None
    other: int | None = None

    def __str__(self) -> str:
        if self.action in OF_NO_BLOCK:
            owner = "" if self.owner is None else f"  {self.owner}"
            return f"step {self.step}  {self.action:<8}{owner}  {self.reason}".rstrip()
        where = f"step {self.step}  block {self.block}"
        who = "" if self.owner is None else self.owner
        counts = f"{self.ref_cnt_before} -> {self.ref_cnt_after}"
        reason = self.reason
        if self.start is not None and self.end is not None:
            reason = f"{reason} {offsets(self.start, self.end)}".lstrip()
        return f"{where}  {self.action:<8}  {counts}  {who}  {reason}".rstrip()


def offsets(start: int, end: int) -> str:
    """Offsets from start up to, not including, end in words."""
    return f"offset {start}" if end - start == 1 else f"offsets {start} to {end - 1}"
