"""The audit log as text: a line on the log, lines on what is held when it begins, then a line a record.

Each line is a JSON object. What a log that was cut off still says is for audit_reader to judge.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable
from typing import NamedTuple

from paged_jax.audit_record import ACTIONS, AuditRecord

FORMAT, VERSION = "paged_jax kv audit", 1
MOST_QUOTES = 1 << 13
MOST_COUNTS = 1 << 20
"""Of a block; an engine has fewer sequences by far."""
_NUMBER, _OFFSET, _OWNER = (int, float), (int, type(None)), (str, int, type(None))


class Header(NamedTuple):
    """A log's first line.

    num_blocks, block_size: of the pool, if they are known. is_complete: what is not said to be held when it
    begins is not held; else records before it were forgotten. live: the requests that ran then. run, part:
    of a log in several files, which belong together, and which is which. num_carried: how many lines follow
    on what is held.
    """

    num_blocks: int | None
    block_size: int | None
    is_complete: bool = True
    live: tuple[Hashable, ...] = ()
    run: str = ""
    part: int = 0
    num_carried: int = 0


def plain(owner: Hashable) -> str | int | None:
    """An owner as JSON has it: its repr where that lacks it."""
    return owner if owner is None or isinstance(owner, str | int) else repr(owner)


_quotes: dict[str, str] = {}
"""JSON of the texts that came up lately."""


def _quoted(value: Hashable) -> str:
    if type(value) is not str:
        return json.dumps(plain(value))
    quoted = _quotes.get(value)
    if quoted is None:
        if len(_quotes) == MOST_QUOTES:
            _quotes.clear()
        quoted = _quotes[value] = json.dumps(value)
    return quoted


def json_of(line: bytes) -> object:
    """What a line says; ValueError where it is no JSON, or nested too deeply to be read."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error


def header_line(header: Header) -> str:
    """With the wall clock's time beside the monotonic one, so that a reader can tell the day."""
    fields = header._asdict() | {"live": [plain(name) for name in header.live]}
    stamps = {"wall_time": time.time(), "time": time.monotonic()}
    return json.dumps({"format": FORMAT, "version": VERSION} | fields | stamps) + "\n"


def header_of(fields: object) -> Header:
    """ValueError where it is none."""
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError("not a KV audit log: its first line is another one's")
    if fields.get("version") != VERSION:
        raise ValueError(f"version {fields.get('version')!r} of the format; this program reads {VERSION}")
    known = {name: fields[name] for name in Header._fields if name in fields}
    try:
        header = Header(**known)
    except TypeError as error:
        raise ValueError("its first line lacks num_blocks or block_size") from error
    for name in ("num_blocks", "block_size"):
        if not isinstance(getattr(header, name), int | None):
            raise ValueError(f"{name}={getattr(header, name)!r}: expected an integer")
    if type(header.part) is not int or type(header.num_carried) is not int:
        raise ValueError("part and num_carried: expected integers")
    if not isinstance(header.live, list | tuple) or not all(isinstance(one, _OWNER) for one in header.live):
        raise ValueError(f"live={header.live!r}: expected a list of texts or integers")
    return header._replace(live=tuple(header.live))


def line_of(record: AuditRecord) -> str:
    """A JSON object with the record's fields, and the line's end.

    The time is rounded to microseconds. Fields that are None are left out.
    """
    time, step, action, block, owner, before, after, reason, start, end, other = record
    line = (
        f'{{"time": {time:.6f}, "step": {step}, "action": "{action}", "block": {block}, "owner": '
        f'{_quoted(owner)}, "ref_cnt_before": {before}, "ref_cnt_after": {after}, "reason": {_quoted(reason)}'
    )
    if start is not None:
        line += f', "start": {start}'
    if end is not None:
        line += f', "end": {end}'
    if other is not None:
        line += f', "other": {other}'
    return line + "}\n"


def fields_of(record: AuditRecord) -> dict[str, object]:
    """What the line has, as an object."""
    fields = {name: value for name, value in record._asdict().items() if value is not None}
    return fields | {"owner": plain(record.owner)}


def record_of(fields: object) -> AuditRecord:
    """The record that a line's JSON stands for; ValueError says what is wrong with it."""
    if not isinstance(fields, dict):
        raise ValueError("expected a JSON object")
    try:
        record = AuditRecord(**fields)
    except TypeError:
        names = set(AuditRecord._fields)
        lacking = names - set(AuditRecord._field_defaults) - fields.keys()
        what, which = ("lacks", lacking) if lacking else ("has unknown", fields.keys() - names)
        raise ValueError(f"{what} {', '.join(sorted(which))}") from None
    time, step, action, block, owner, before, after, reason, start, end, other = record
    if action not in ACTIONS:
        raise ValueError(f"action={action!r}: none that this program knows")
    if not (type(step) is type(block) is type(before) is type(after) is int):
        raise ValueError("expected integers: step, block, ref_cnt_before, ref_cnt_after")
    if max(abs(before), abs(after)) > MOST_COUNTS:
        raise ValueError(f"ref_cnt from {before} to {after}: none is over {MOST_COUNTS:,}")
    if not isinstance(time, _NUMBER) or not isinstance(reason, str):
        raise ValueError("expected a number, time, and a text, reason")
    if not isinstance(owner, _OWNER):
        raise ValueError(f"owner={owner!r}: expected a text or an integer")
    if not (isinstance(start, _OFFSET) and isinstance(end, _OFFSET) and isinstance(other, _OFFSET)):
        raise ValueError("expected integers: start, end, other")
    if action in ("write", "adopt") and (start is None or end is None):
        raise ValueError(f"a record of {action} that lacks start or end")
    if action in ("copy", "swap-out", "swap-in") and other is None:
        raise ValueError(f"a record of {action} that lacks other")
    return record
