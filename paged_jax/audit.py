"""The audit log: what happened to every block, when, for whom and why.

Pass an AuditLog as `audit=` to a BlockAllocator to switch it on (or `kv_audit=` to an LLM). The allocator and
its tables then write one record for each event; preemption adds the swaps, and the engine when requests
arrive and end. This file only keeps records: it never decides anything, and nothing may depend on whether it
is there. AuditFile (audit_file) writes them to disk; `paged-jax audit` and audit_replay look for faults.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence

from paged_jax.audit_lines import Header, header_line, line_of
from paged_jax.audit_record import Action, AuditRecord
from paged_jax.errors import InvalidArgument

__all__ = ["Action", "AuditLog", "AuditRecord", "key_name"]


class AuditLog:
    """Records in the order in which they were written; iterate to read them, oldest first.

    `max_records`: keep only the newest that many (a ring of bounded memory); None keeps all.
    `step`: the number that new records carry; whoever drives the engine sets it.
    `num_blocks`, `block_size`: of the pool; None before there is one.

    Writing costs O(1); a history scans what is kept. Not thread safe.
    """

    __slots__ = ("_live", "_num_recorded", "_records", "block_size", "num_blocks", "step")

    def __init__(self, max_records: int | None = None) -> None:
        if max_records is not None and (type(max_records) is not int or max_records < 1):
            raise InvalidArgument.of("max_records", max_records, "an int of at least 1, or None to keep all")
        self._records: deque[AuditRecord] = deque(maxlen=max_records)
        self._start_over(None, None)

    def _start_over(self, num_blocks: int | None, block_size: int | None) -> None:
        self.step = 0
        self.num_blocks, self.block_size = num_blocks, block_size
        self._records.clear()
        self._num_recorded = 0
        self._live: dict[Hashable, None] = {}

    def record(
        self,
        action: Action,
        block: int,
        owner: Hashable,
        ref_cnt_before: int,
        ref_cnt_after: int,
        reason: str = "",
        *,
        start: int | None = None,
        end: int | None = None,
        other: int | None = None,
    ) -> None:
        """Write one record, stamped with the time and the step."""
        self._num_recorded += 1
        now, step, before, after = time.monotonic(), self.step, ref_cnt_before, ref_cnt_after
        self._keep(AuditRecord(now, step, action, block, owner, before, after, reason, start, end, other))

    def _keep(self, record: AuditRecord) -> None:
        self._records.append(record)

    # -- what the allocator tells --------------------------------------------------------------------------

    def begin(self, num_blocks: int, block_size: int) -> None:
        """A new pool: the log starts over, for its block ids now name other blocks."""
        self._start_over(num_blocks, block_size)

    def taken(
        self,
        blocks: list[int],
        counts: Sequence[int],
        owner: Hashable,
        reason: str,
        registered: Container[int],
    ) -> None:
        """A count was taken for each occurrence; `counts` by block id, as they are now."""
        later = Counter(blocks)
        for block in blocks:
            later[block] -= 1
            after = counts[block] - later[block]
            is_hit = block in registered and reason in ("", "prefix hit")
            self.record("hit" if is_hit else "incref", block, owner, after - 1, after, reason)

    def given_back(self, blocks: list[int], counts: Sequence[int], owner: Hashable, reason: str) -> None:
        """A count was given back for each occurrence; `counts` by block id, as they are now."""
        later = Counter(blocks)
        for block in blocks:
            later[block] -= 1
            after = counts[block] + later[block]
            self.record("decref" if after else "free", block, owner, after + 1, after, reason)

    def reset(self, counts: Sequence[int]) -> None:
        """Nobody holds anything any more; `counts` by block id, as they were."""
        if counts:
            self.record("reset", 0, None, 0, 0)
        for block, count in enumerate(counts):
            if count:
                self.record("free", block, None, count, 0, "reset")

    # -- what the engine tells -----------------------------------------------------------------------------

    def arrive(self, request_id: Hashable) -> None:
        """A request was queued; what its sequences hold is theirs until it ends."""
        self._live[request_id] = None
        self.record("arrive", 0, request_id, 0, 0)

    def settle(self, unfinished: Container[Hashable], reason: str = "") -> None:
        """A step has ended, or a call between steps: requests that are not unfinished any more have ended."""
        for request_id in [name for name in self._live if name not in unfinished]:
            del self._live[request_id]
            self.record("end", 0, request_id, 0, 0, reason)
        self.flush()

    def fetched(self, swap_out: Iterable[tuple[int, int]], ref_cnt: Callable[[int], int]) -> None:
        """The bytes of these (block, host block) have arrived on the host."""
        for block, host in swap_out:
            count = ref_cnt(block)
            self.record("fetched", block, None, count, count, f"in host block {host}", other=host)

    def flush(self) -> None:
        """Have what was recorded so far outlive the process, where the log is on disk."""

    def close(self) -> None:
        """No more is recorded on disk; harmless when repeated."""

    # -- reading -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[AuditRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_dropped(self) -> int:
        """How many records the ring has forgotten: histories lack these, the oldest ones."""
        return self._num_recorded - len(self._records)

    @property
    def live_at_start(self) -> list[Hashable]:
        """The requests that had arrived and not ended when the oldest record was written."""
        live = dict(self._live)
        for record in reversed(self._records):
            if record.action == "end":
                live[record.owner] = None
            elif record.action == "arrive":
                live.pop(record.owner, None)
        return list(live)

    def of_block(self, block: int) -> list[AuditRecord]:
        """The history of one block, oldest first."""
        return [record for record in self._records if record.block == block]

    def of_owner(self, owner: Hashable) -> list[AuditRecord]:
        """Everything that was done in the name of one owner, oldest first."""
        return [record for record in self._records if record.owner == owner]

    def write_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write a line on the log, then one JSON object for each record: what `paged-jax audit` reads.

        The object has AuditRecord's fields, without those that are None; the owner as its repr where JSON
        lacks it.
        """
        with open(path, "w", encoding="utf-8") as file:
            live = tuple(self.live_at_start)
            file.write(header_line(Header(self.num_blocks, self.block_size, not self.num_dropped, live)))
            file.writelines(map(line_of, self._records))


def key_name(key: Hashable) -> str:
    """A prefix's key as a reason; of a hash the first digits."""
    return f"key {key.hex()[:12] if isinstance(key, bytes) else repr(key)}"
