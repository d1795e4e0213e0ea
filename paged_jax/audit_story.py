"""Life stories out of an audit log: all that happened to a block, or to a request."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from paged_jax.audit_record import OF_NO_BLOCK, AuditRecord, offsets
from paged_jax.audit_state import PoolState


def is_of_block(record: AuditRecord, block: int) -> bool:
    """Whether it happened to a block: also a copy into it."""
    return (record.block == block and record.action not in OF_NO_BLOCK) or (
        record.action == "copy" and record.other == block
    )


def is_of_request(record: AuditRecord, request: Hashable, state: PoolState) -> bool:
    """Whether a request did it, or one of its sequences, or a failed step did it to all that ran.

    state: of the log up to there.
    """
    if record.action in OF_NO_BLOCK:
        return record.owner == request or (record.action == "reset" and request in state.live)
    return record.owner == request or request in state.requests_of(record.owner)


def lines(records: Iterable[AuditRecord]) -> Iterator[str]:
    """A line each; what a sequence writes into a block, token by token, is one line."""
    open_: dict[tuple[Hashable, int], tuple[AuditRecord, AuditRecord]] = {}
    for record in records:
        key = record.owner, record.block
        if record.action == "write":
            first, last = open_.get(key, (record, None))
            if last is None or last.end == record.start:
                open_[key] = first, record
                continue
        yield from map(_written, open_.values())
        open_.clear()
        if record.action == "write":
            open_[key] = record, record
        else:
            yield str(record)
    yield from map(_written, open_.values())


def _written(writes: tuple[AuditRecord, AuditRecord]) -> str:
    first, last = writes
    if first is last:
        return str(first)
    assert first.start is not None
    assert last.end is not None
    steps = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
    where = f"{steps}  block {first.block}  write"
    return f"{where}     {first.owner}  {offsets(first.start, last.end)}"
