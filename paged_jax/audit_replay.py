"""Finds faults in an audit log by replaying it: who did what to which block that was not theirs to do.

It counts for itself, from the records alone, and shares no code with the allocator. Nothing that a record
claims is believed, its ref_cnt neither; each fault is named with the two events that disagree.

What a request still holds when the log says that it has ended is leaked; what the requests hold that still
run where the log stops is not. A step's swap-outs are read on the device before anything is written in that
step, so their blocks may be taken again at once; in a later step only once they have been fetched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from paged_jax.audit import AuditLog
from paged_jax.audit_lines import Header
from paged_jax.audit_record import GIVES, OF_NO_BLOCK, TAKES, AuditRecord, offsets
from paged_jax.audit_report import Finding, Kind, Report
from paged_jax.audit_state import BlockState, PoolState


class Replay:
    """Takes the records one by one, in order. header: of the log that they are of."""

    def __init__(self, header: Header, state: PoolState | None = None) -> None:
        self.block_size = header.block_size
        self.num_blocks = header.num_blocks
        self.state = state or PoolState(header)
        self.report = Report(is_complete=header.is_complete)
        self._step_is_told = False

    def feed(self, record: AuditRecord) -> None:
        """Judge the next record."""
        report = self.report
        if not report.num_records:
            report.first_step = record.step
        report.num_records += 1
        report.last_step = record.step
        num_findings = len(report.findings)
        action = record.action
        if action in OF_NO_BLOCK:
            self._of_no_block(record)
        elif not 0 < record.block < (self.num_blocks or record.block + 1):
            self._find(
                "no such block", record, None, "only block ids from 1 to num_blocks - 1 are handed out"
            )
        else:
            self._of_block(record, self.state.block(record))
        found = len(report.findings) > num_findings
        self.state.apply(record)
        if found and action == "write":  # what it holds now is anybody's guess, and told
            self.state.block(record).filled = None

    def finish(self) -> Report:
        """The report, with what is still held."""
        state = self.state
        running: dict[Hashable, set[int]] = {name: set() for name in state.live}
        others: dict[Hashable, set[int]] = {}
        for block, held in state.blocks.items():
            for taker in held.takers:
                requests = state.requests_of(taker.owner)
                name = next((name for name in requests if name in state.live), None)
                if name is not None:
                    running[name].add(block)
                elif not any(name in state.ended for name in requests):
                    others.setdefault(taker.owner, set()).add(block)
        self.report.running = {name: len(blocks) for name, blocks in running.items()}
        self.report.others = {name: len(blocks) for name, blocks in others.items()}
        return self.report

    def _find(self, kind: Kind, record: AuditRecord, first: AuditRecord | None, message: str) -> None:
        request = self.state.requests_of(record.owner)[0]
        self.report.findings.append(Finding(kind, record.block, request, record.step, message, first, record))

    # -- by action -----------------------------------------------------------------------------------------

    def _of_no_block(self, record: AuditRecord) -> None:
        if record.action == "arrive":
            self.report.num_arrived += 1
        elif record.action == "reset":
            self.report.failed_steps.append(record.step)
        elif record.action == "end":
            self.report.num_ended += 1
            owners = set(self.state.owners_of(record.owner))
            if not owners:
                return
            for block, state in self.state.blocks.items():
                for taker in state.takers:
                    if taker.owner in owners:
                        end = record._replace(block=block)
                        who = "" if taker.owner == record.owner else f", {taker.owner} of it,"
                        message = f"{record.owner} has ended; it{who} never gave the block back"
                        self._find("leak", end, taker, message)

    def _of_block(self, record: AuditRecord, state: BlockState) -> None:
        action, count = record.action, len(state.takers)
        found = len(self.report.findings)
        if action == "write":
            self._write(record, state)
        elif action in GIVES:
            self._give(record, state)
        elif action == "allocate":
            if count:
                self._find("handed out twice", record, state.takers[-1], f"{_who_has(state)} it still")
            self._reuse(record, state)
        elif action == "refused":
            self._refused(record, state)
        elif action == "copy":
            self._copy(record, state)
        elif action in TAKES:
            self._share(record, state)
        elif action == "swap-out":
            self._swap_out(record, state)
        elif action == "swap-in":
            self._swap_in(record, state)
        elif action == "adopt":
            self._holds(record, state, "begins with")
        elif action == "register" and not count:
            self._find("use after free", record, state.changed, "a free block is offered to the prefix cache")
        if len(self.report.findings) == found:
            self._count(record, state)

    def _count(self, record: AuditRecord, state: BlockState) -> None:
        """Whether the numbers that the record claims are the counts, where nothing else is wrong with it."""
        count = len(state.takers)
        after = count + (record.action in TAKES) - (record.action in GIVES)
        if record.action in GIVES and record.reason == "reset":
            after = 0
        claimed = record.ref_cnt_before, record.ref_cnt_after
        if claimed != (count, after):
            message = f"the records before it add up to {count} -> {after}"
            self._find("ref_cnt disagrees", record, state.changed, message)
        elif (record.action == "free") != (after == 0) and record.action in GIVES:
            self._find("ref_cnt disagrees", record, state.changed, f"a {record.action} that leaves {after}")

    def _reuse(self, record: AuditRecord, state: BlockState) -> None:
        pending = state.pending
        if pending is not None and record.step > pending.step:
            message = f"its bytes have yet to reach host block {pending.other}, for {pending.owner}"
            self._find("reused during its swap-out", record, pending, message)

    def _share(self, record: AuditRecord, state: BlockState) -> None:
        is_cached = state.registered is not False
        if not is_cached and not state.takers:
            self._find("use after free", record, state.changed, "it is free, and no prefix leads to it")
        elif not is_cached and (record.action == "hit" or record.reason == "prefix hit"):
            self._find("use after free", record, state.changed, "a hit, but no prefix leads to it any more")

    def _give(self, record: AuditRecord, state: BlockState) -> None:
        owner = record.owner
        if (record.reason == "reset" and owner is None) or self.state.count_of(state, owner) is not None:
            return
        if self.state.stolen_from(state, owner) is not None:
            return  # told when somebody else gave it back
        self._gave_twice(record, state, "gives back a count")

    def _refused(self, record: AuditRecord, state: BlockState) -> None:
        if record.reason != "double free":
            self._find("use after free", record, state.changed, "it is free; the allocator refused it")
            return
        stolen = self.state.stolen_from(state, record.owner)
        if stolen is not None:
            message = f"{record.owner} had one count, which {stolen[1].owner} has given back already; refused"
            self._find("double free", record, stolen[1], message)
        else:
            self._gave_twice(record, state, "was refused when it gave back a count")

    def _gave_twice(self, record: AuditRecord, state: BlockState, what: str) -> None:
        owner = record.owner
        first = next((gave for gave in reversed(state.given) if gave.owner == owner), None)
        if first is not None:
            message = f"{owner} {what} that {first.owner} gave back before"
        elif state.takers:
            first, message = state.takers[-1], f"{owner} {what} that it never took; {_who_has(state)} it"
        else:
            first = state.changed
            message = f"{owner} {what} that it never took"
        self._find("double free", record, first, message)

    def _holds(self, record: AuditRecord, state: BlockState, what: str, *, family: bool = False) -> bool:
        """Whether the record's owner, or its family, has a count of the block: for this it must."""
        if self.state.count_of(state, record.owner, family=family) is not None:
            return True
        mine = (gave for gave in reversed(state.given) if self.state.are_related(gave.owner, record.owner))
        stolen = self.state.stolen_from(state, record.owner)
        first = stolen[1] if stolen is not None else next(mine, state.changed)
        whose = f"{_who_has(state)} it" if state.takers else "it is free"
        self._find("use after free", record, first, f"{record.owner} {what} it and does not hold it: {whose}")
        return False

    def _write(self, record: AuditRecord, state: BlockState) -> None:
        start, end, size, owner = record.start, record.end, self.block_size, record.owner
        assert start is not None
        assert end is not None
        if not self._holds(record, state, "writes into"):
            return
        if len(state.takers) > 1:
            others = [taker for taker in state.takers if taker.owner != owner] or state.takers
            message = f"{_who_has(state)} it; {owner} should have copied it first"
            self._find("write into a shared block", record, others[-1], message)
        self._reuse(record, state)
        if state.filled is not None and start < state.filled:
            is_full = state.filled == size
            message = f"it holds {state.filled} tokens; {offsets(start, end)} written again"
            kind: Kind = "write into a full block" if is_full else "write out of place"
            self._find(kind, record, state.written, message)
        elif (state.filled is not None and start > state.filled) or start >= end or end > (size or end):
            message = f"it holds {state.filled} tokens of {size}; {offsets(start, end)} are not the next ones"
            self._find("write out of place", record, state.written, message)
        elif start == 0 and (last := self.state.writing.get(owner, record.block)) != record.block:
            before = self.state.blocks[last]
            if size is not None and before.filled is not None and before.filled < size:
                message = f"{owner} goes on here, but its block {last} holds {before.filled} tokens of {size}"
                self._find("write out of place", record, before.written, message)

    def _copy(self, record: AuditRecord, state: BlockState) -> None:
        if not self._holds(record, state, "copies"):
            return
        target = record._replace(block=record.other or 0, ref_cnt_before=1)
        into = self.state.block(target)
        if len(state.takers) == 1:
            message = f"{record.owner} alone holds it and could have written in place"
            self._find("copy without need", record, state.takers[0], message)
        elif state.filled is not None and state.filled == self.block_size:
            self._find("copy without need", record, state.written, "it is full: nobody writes into it again")
        if self._holds(target, into, "copies into") and len(into.takers) > 1:
            message = f"{_who_has(into)} the destination of a copy"
            self._find("write into a shared block", target, into.takers[0], message)

    def _swap_out(self, record: AuditRecord, state: BlockState) -> None:
        written = state.written
        if not self._holds(record, state, "swaps out", family=True):
            return
        if written is not None and written.step == record.step > 0:
            message = "the device reads it before it writes what the same step has appended"
            self._find("swapped too early", record, written, message)

    def _swap_in(self, record: AuditRecord, state: BlockState) -> None:
        pending = self.state.hosts.get(record.other or 0)
        if self._holds(record, state, "swaps in", family=True) and pending is not None:
            message = f"the bytes have yet to reach host block {record.other}"
            self._find("swapped too early", record, pending, message)


def _who_has(state: BlockState) -> str:
    """The beginning of a sentence."""
    owners = list(dict.fromkeys(str(taker.owner) for taker in state.takers))
    return f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'}"


def header_of(log: AuditLog) -> Header:
    """What is known when the oldest record of a log in memory was written."""
    return Header(log.num_blocks, log.block_size, not log.num_dropped, tuple(log.live_at_start))


def replay(log: AuditLog | Iterable[AuditRecord], header: Header | None = None) -> Report:
    """Judge all records of a log. header: needed where it is none in memory."""
    if header is None:
        if not isinstance(log, AuditLog):
            raise TypeError("replay: records without a log need its header")
        header = header_of(log)
    judge = Replay(header)
    for record in log:
        judge.feed(record)
    return judge.finish()
