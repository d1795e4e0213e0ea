"""What an audit log says about the pool at one moment: who holds what since when, and what lies where.

It follows the records alone and knows nothing of the allocator's code. The file writer keeps one, to say at
the top of a new file what is held; the replay keeps one, to judge each record before it takes it in. A record
that can not be right is taken at its word, so that one fault does not look like many.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from paged_jax.audit_lines import Header, fields_of, plain, record_of
from paged_jax.audit_record import GIVES, OF_NO_BLOCK, TAKES, AuditRecord

MOST_GIVEN = 32
"""So many of the last counts given back are kept of each block."""

UNKNOWN = AuditRecord(0.0, -1, "allocate", 0, "(unknown)", 0, 1, "before the log begins")
"""Stands for the taking of a count that the log does not go back to."""


class BlockState:
    """takers: the record that took it, for each count, oldest first. stolen: (a record that took a count,
    the one by which somebody else gave it back). given: the last counts given back. changed: what changed
    its count last. filled: tokens it holds, None if unknown; written: the last write. registered: whether a
    prefix leads to it, None if unknown. pending: the swap-out that has yet to be fetched.
    """

    __slots__ = ("changed", "filled", "given", "pending", "registered", "stolen", "takers", "written")

    def __init__(self, *, unknown_takers: int = 0, is_known: bool = True) -> None:
        self.takers: list[AuditRecord] = [UNKNOWN] * unknown_takers
        self.stolen: list[tuple[AuditRecord, AuditRecord]] = []
        self.given: list[AuditRecord] = []
        self.changed: AuditRecord | None = None
        self.filled: int | None = 0 if is_known else None
        self.written: AuditRecord | None = None
        self.registered: bool | None = False if is_known else None
        self.pending: AuditRecord | None = None


class PoolState:
    """Of a log that begins as its header says.

    live: the requests that have arrived and not ended. ended: those that have ended and still hold
    something, with the record of their end. held: counts by owner. writing: by owner, the block that it wrote
    into last, while it holds that. hosts: by host block, the swap-out into it that has yet to be fetched.
    """

    def __init__(self, header: Header) -> None:
        self.is_complete = header.is_complete
        self.blocks: dict[int, BlockState] = {}
        self.live: dict[Hashable, None] = dict.fromkeys(header.live)
        self.ended: dict[Hashable, AuditRecord] = {}
        self.held: dict[Hashable, int] = {}
        self.writing: dict[Hashable, int] = {}
        self.hosts: dict[int, AuditRecord] = {}

    def block(self, record: AuditRecord) -> BlockState:
        """The state of a record's block, before that record."""
        state = self.blocks.get(record.block)
        if state is None:
            unknown = 0 if self.is_complete else record.ref_cnt_before
            state = self.blocks[record.block] = BlockState(
                unknown_takers=unknown, is_known=self.is_complete or record.action == "allocate"
            )
            if unknown:
                self.held[UNKNOWN.owner] = self.held.get(UNKNOWN.owner, 0) + unknown
        return state

    def requests_of(self, owner: Hashable) -> tuple[Hashable, ...]:
        """The requests whose sequence an owner may be, the likeliest first; itself where there is none.

        Sequences of a request `r` are called `r`, `r/1`, `r/7.2`. Another request may have such a name too.
        """
        if not isinstance(owner, str) or "/" not in owner:
            return (owner,)
        cuts = [len(owner), *(at for at in range(len(owner) - 1, 0, -1) if owner[at] == "/")]
        names = (owner[:cut] for cut in cuts)
        return tuple(name for name in names if name in self.live or name in self.ended) or (owner,)

    def are_related(self, one: Hashable, other: Hashable) -> bool:
        """Whether two owners may be sequences of the same request."""
        return one == other or not set(self.requests_of(one)).isdisjoint(self.requests_of(other))

    def count_of(self, state: BlockState, owner: Hashable, *, family: bool = False) -> int | None:
        """Which of a block's counts is an owner's: its place in `takers`. family: a sibling's does too."""
        unknown = None
        for place in range(len(state.takers) - 1, -1, -1):
            taker = state.takers[place]
            if taker.owner == owner or (family and self.are_related(taker.owner, owner)):
                return place
            if taker is UNKNOWN:
                unknown = place
        return unknown

    def owners_of(self, request: Hashable) -> list[Hashable]:
        """Those that hold something and are sequences of this request, and of none that still runs."""
        owners = []
        for owner in self.held:
            requests = self.requests_of(owner)
            if request in requests and not any(name in self.live for name in requests if name != request):
                owners.append(owner)
        return owners

    # -- events --------------------------------------------------------------------------------------------

    def apply(self, record: AuditRecord) -> None:
        """Take a record in."""
        action = record.action
        if action in OF_NO_BLOCK:
            self._apply_to_all(record)
            return
        state = self.blocks.get(record.block) or self.block(record)
        if action == "write":
            assert record.end is not None
            state.written = record
            state.filled = max(state.filled or 0, record.end)
            self.writing[record.owner] = record.block
        elif action in TAKES:
            if action == "allocate":
                self._drop_all(state)
                state.filled, state.registered, state.written = 0, False, None
            self._take(state, record)
            self._agree(state, record)
        elif action in GIVES:
            self._give(state, record)
            self._agree(state, record)
        elif action == "copy":
            copied = record._replace(block=record.other or 0, ref_cnt_before=1)
            self.block(copied).filled = state.filled
        elif action == "swap-out":
            state.pending = record
            self.hosts[record.other or 0] = record
        elif action == "fetched":
            self.hosts.pop(record.other or 0, None)
            if state.pending is not None and state.pending.other == record.other:
                state.pending = None
        elif action == "adopt":
            state.filled = record.end
        elif action in ("register", "evict"):
            state.registered = action == "register"

    def _apply_to_all(self, record: AuditRecord) -> None:
        if record.action == "arrive":
            self.live[record.owner] = None
            self.ended.pop(record.owner, None)
        elif record.action == "end":
            leftovers = self.owners_of(record.owner)
            self.live.pop(record.owner, None)
            if leftovers:
                self.ended[record.owner] = record
        elif record.action == "forget":
            for state in self.blocks.values():
                state.registered = False
        else:  # reset: the records on each block that was held follow, and find it free
            self.is_complete = True
            self.hosts.clear()
            self.writing.clear()
            for state in self.blocks.values():
                state.pending, state.registered, state.written = None, False, None
                state.filled = 0
                state.stolen.clear()

    def _take(self, state: BlockState, record: AuditRecord) -> None:
        state.takers.append(record)
        state.changed = record
        self.held[record.owner] = self.held.get(record.owner, 0) + 1

    def _give(self, state: BlockState, record: AuditRecord) -> None:
        state.changed = record
        if record.reason == "reset" and record.owner is None:
            self._drop_all(state)
            return
        place = self.count_of(state, record.owner)
        if place is not None:
            self._drop(state, place)
        elif (mine := self.stolen_from(state, record.owner)) is not None:
            state.stolen.remove(mine)
        elif state.takers:
            state.stolen.append((state.takers[0], record))
            self._drop(state, 0)
        state.given.append(record)
        if len(state.given) > MOST_GIVEN:
            del state.given[: MOST_GIVEN // 2]
        if self.writing.get(record.owner) == record.block:
            del self.writing[record.owner]

    def stolen_from(self, state: BlockState, owner: Hashable) -> tuple[AuditRecord, AuditRecord] | None:
        """The count of an owner's that somebody else has given back, if there is one."""
        mine = (pair for pair in state.stolen if pair[0].owner == owner)
        return next(mine, None)

    def _agree(self, state: BlockState, record: AuditRecord) -> None:
        while len(state.takers) > max(record.ref_cnt_after, 0):
            state.stolen.append((state.takers[0], record))
            self._drop(state, 0)
        missing = record.ref_cnt_after - len(state.takers)
        if missing > 0:
            state.takers[:0] = [UNKNOWN] * missing
            self.held[UNKNOWN.owner] = self.held.get(UNKNOWN.owner, 0) + missing

    def _drop(self, state: BlockState, place: int) -> None:
        owner = state.takers.pop(place).owner
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]

    def _drop_all(self, state: BlockState) -> None:
        while state.takers:
            self._drop(state, 0)

    # -- from one file to the next -------------------------------------------------------------------------

    def carried(self) -> Iterator[dict[str, object]]:
        """Everything that a later record may have to do with, as JSON objects; `carry` takes them in."""
        yield {"writing": [[plain(owner), block] for owner, block in self.writing.items()]}
        for record in self.ended.values():
            yield {"ended": fields_of(record)}
        for block, state in self.blocks.items():
            if state.takers or state.registered is not False or state.pending is not None:
                yield {
                    "block": block,
                    "takers": [fields_of(record) for record in state.takers],
                    "given": [fields_of(record) for record in state.given[-2:]],
                    "filled": state.filled,
                    "registered": state.registered,
                    "written": state.written and fields_of(state.written),
                    "pending": state.pending and fields_of(state.pending),
                }

    def carry(self, fields: object) -> list[AuditRecord]:
        """Take in a line of `carried`; the records that it brings. ValueError where it is none."""
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        try:
            if "writing" in fields:
                self.writing = dict(fields["writing"])
                return []
            if "ended" in fields:
                end = record_of(fields["ended"])
                self.ended[end.owner] = end
                return [end]
            state = self.blocks[fields["block"]] = BlockState()
            for taker in map(record_of, fields["takers"]):
                self._take(state, UNKNOWN if taker == UNKNOWN else taker)
            state.given = [record_of(given) for given in fields["given"]]
            state.filled, state.registered = fields["filled"], fields["registered"]
            state.written = fields["written"] and record_of(fields["written"])
            state.pending = fields["pending"] and record_of(fields["pending"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"a line on what is held that lacks something: {error}") from error
        if state.pending is not None:
            self.hosts[state.pending.other or 0] = state.pending
        return [*state.given, *state.takers]
