"""What the replay of an audit log comes to: faults, and what is still held at the end."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paged_jax.audit_record import AuditRecord

Kind = Literal[
    "leak",
    "double free",
    "use after free",
    "write into a shared block",
    "write into a full block",
    "write out of place",
    "copy without need",
    "ref_cnt disagrees",
    "handed out twice",
    "reused during its swap-out",
    "swapped too early",
    "no such block",
]


class Finding(NamedTuple):
    """A fault. step: at which it happened, the second event's; first: what it disagrees with, if anything."""

    kind: Kind
    block: int
    request: Hashable
    step: int
    message: str
    first: AuditRecord | None
    second: AuditRecord

    def __str__(self) -> str:
        lines = [f"{self.kind}: block {self.block}, request {self.request}, step {self.step}", self.message]
        lines += [f"  {event}" for event in (self.first, self.second) if event is not None]
        return "\n  ".join(lines)


@dataclass
class Report:
    """What a whole log came to. running: blocks by request, of those that still run; others: by owner, of
    those that are no request. failed_steps: the steps after which everything was reset.
    """

    findings: list[Finding] = field(default_factory=list)
    num_records: int = 0
    first_step: int = 0
    last_step: int = 0
    num_arrived: int = 0
    num_ended: int = 0
    running: dict[Hashable, int] = field(default_factory=dict)
    others: dict[Hashable, int] = field(default_factory=dict)
    failed_steps: list[int] = field(default_factory=list)
    is_complete: bool = True
