"""Reads an audit log from disk: every file that belongs to it, in order, each line checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paged_jax.audit_file import part_of
from paged_jax.audit_lines import Header, header_of, json_of, record_of
from paged_jax.audit_record import AuditRecord
from paged_jax.audit_state import PoolState
from paged_jax.errors import AuditLogUnreadable


class Part(NamedTuple):
    """One file, and its first line."""

    path: Path
    header: Header


class AuditReader:
    """A log as it lies on disk; iterate to read its records, oldest first.

    parts: its files, the oldest first: `path`, and those before it that were moved to `path.1`, `path.2`, ..
    as far back as they are there. header: of the oldest. state: what is held when its records begin;
    carried: the records that say so. is_cut: whether its last line was cut off, as by a crash, known once
    it was read; that line is left out.

    AuditLogUnreadable, with file and line, for whatever is no log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = _parts(path)
        self.header = self.parts[0].header
        self.is_cut = False
        self.carried: list[AuditRecord] = []
        self.state = PoolState(self.header)
        lines = _lines(self.parts[0].path)
        next(lines)
        for _ in range(self.header.num_carried):
            number, line = next(lines, (0, None))
            if line is None:
                raise AuditLogUnreadable(f"{self.parts[0].path}: cut off in what was held when it began.")
            try:
                self.carried += self.state.carry(json_of(line))
            except ValueError as error:
                raise _damaged(self.parts[0].path, number, error) from error
        self.carried.sort(key=lambda record: record.time)

    def __iter__(self) -> Iterator[AuditRecord]:
        for part in self.parts:
            lines = _lines(part.path)
            is_last = part is self.parts[-1]
            for number, line in lines:
                if number <= 1 + part.header.num_carried:
                    continue
                if is_last and not line.endswith(b"\n") and not _is_json(line):
                    self.is_cut = True
                    return
                try:
                    yield record_of(json_of(line))
                except ValueError as error:
                    raise _damaged(part.path, number, error) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """With their numbers, from 1."""
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        moved = " Its older part is there as " + str(part_of(path, 1)) if part_of(path, 1).exists() else ""
        raise AuditLogUnreadable(
            f"{path}: {error.strerror}: give the path of an audit log.{moved}"
        ) from error


def _header(path: Path) -> Header:
    number, line = next(_lines(path), (0, b""))
    if not number:
        raise AuditLogUnreadable(f"{path}: empty; expected the line that an audit log begins with.")
    try:
        return header_of(json_of(line))
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            error = ValueError("not a KV audit log: its first line is no JSON")
        raise _damaged(path, number, error) from error


def _parts(path: Path) -> list[Part]:
    parts = [Part(path, _header(path))]
    while parts[0].header.part:
        older = part_of(path, len(parts))
        try:
            header = _header(older)
        except AuditLogUnreadable:
            break
        if (header.run, header.part) != (parts[0].header.run, parts[0].header.part - 1):
            break
        parts.insert(0, Part(older, header))
    return parts


def _is_json(line: bytes) -> bool:
    try:
        json_of(line)
    except ValueError:
        return False
    return True


def _damaged(path: Path, number: int, error: ValueError) -> AuditLogUnreadable:
    what = "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
    return AuditLogUnreadable(f"{path} line {number}: {what}.")
