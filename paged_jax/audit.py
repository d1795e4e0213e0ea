"""The audit log: what happened to every block, when, for whom and why.

Pass an AuditLog as `audit=` to a BlockAllocator to switch it on. The allocator and its tables then write one
record for each event; the scheduler adds the swaps, which change no count, through `record`. This file only
keeps records: it never decides anything, and nothing may depend on whether it is there.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

from paged_jax.errors import InvalidArgument

__all__ = ["Action", "AuditLog", "AuditRecord"]

Action = Literal["allocate", "incref", "hit", "decref", "free", "evict", "copy", "swap"]


class AuditRecord(NamedTuple):
    """One event of one block.

    `allocate`, `incref`, `hit` (an incref through the prefix cache), `decref` and `free` (the decref that
    reaches 0) change the count by one; `evict`, `copy` (copy-on-write, written for its source) and `swap` do
    not. So the changes of a block's records add up to its ref_cnt.
    """

    time: float  # time.monotonic(), in seconds
    step: int  # AuditLog.step at that moment
    action: Action
    block: int
    owner: Hashable
    ref_cnt_before: int
    ref_cnt_after: int
    reason: str

    def __str__(self) -> str:
        where = f"step {self.step}  block {self.block}"
        counts = f"{self.ref_cnt_before} -> {self.ref_cnt_after}"
        return f"{where}  {self.action:<8}  {counts}  {self.owner}  {self.reason}".rstrip()


class AuditLog:
    """Records in the order in which they were written; iterate to read them, oldest first.

    `max_records`: keep only the newest that many (a ring of bounded memory); None keeps all.
    `step`: the number that new records carry; whoever drives the engine sets it.

    Writing costs O(1); a history scans what is kept. Not thread safe.
    """

    __slots__ = ("_num_recorded", "_records", "step")

    def __init__(self, max_records: int | None = None) -> None:
        if max_records is not None and (type(max_records) is not int or max_records < 1):
            raise InvalidArgument.of("max_records", max_records, "an int of at least 1, or None to keep all")
        self.step = 0
        self._records: deque[AuditRecord] = deque(maxlen=max_records)
        self._num_recorded = 0

    def record(
        self,
        action: Action,
        block: int,
        owner: Hashable,
        ref_cnt_before: int,
        ref_cnt_after: int,
        reason: str = "",
    ) -> None:
        """Write one record, stamped with the time and the step."""
        self._num_recorded += 1
        self._records.append(
            AuditRecord(
                time.monotonic(), self.step, action, block, owner, ref_cnt_before, ref_cnt_after, reason
            )
        )

    def __iter__(self) -> Iterator[AuditRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_dropped(self) -> int:
        """How many records the ring has forgotten: histories lack these, the oldest ones."""
        return self._num_recorded - len(self._records)

    def of_block(self, block: int) -> list[AuditRecord]:
        """The history of one block, oldest first."""
        return [record for record in self._records if record.block == block]

    def of_owner(self, owner: Hashable) -> list[AuditRecord]:
        """Everything that was done in the name of one owner, oldest first."""
        return [record for record in self._records if record.owner == owner]

    def write_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write one JSON object a line: AuditRecord's fields, the owner as its repr where JSON lacks it."""
        with open(path, "w", encoding="utf-8") as file:
            for record in self._records:
                owner = record.owner
                plain = owner if owner is None or isinstance(owner, str | int) else repr(owner)
                file.write(json.dumps(record._asdict() | {"owner": plain}) + "\n")
