"""The audit log on disk: lines of JSON in files of bounded size, readable whenever the process dies."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from io import FileIO
from pathlib import Path

from paged_jax.audit import AuditLog
from paged_jax.audit_lines import Header, header_line, line_of
from paged_jax.audit_record import AuditRecord
from paged_jax.audit_state import PoolState
from paged_jax.errors import InvalidArgument

MOST_WAITING = 1024
"""So many lines wait for `flush` at most."""


class AuditFile(AuditLog):
    """An AuditLog that writes to `path`.

    When `max_bytes` of records are in it, the file becomes `path.1`, that one `path.2` and so on, up to
    `max_files` in all, and a new one begins with a snapshot: who holds what, since which record. So every
    file can be replayed by itself, and the oldest ones may go. A log that lies there when a pool begins is
    moved aside in the same way, not overwritten. The newest `max_records` are kept in memory too.

    The engine flushes before the device computes a step, and after it: what was flushed outlives the
    process, though not the machine. A disk that fails ends the log with a warning, and disturbs nothing else.
    """

    __slots__ = ("_file", "_header", "_lines", "_num_bytes", "_state", "max_bytes", "max_files", "path")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        max_files: int = 4,
        max_records: int = 10_000,
    ) -> None:
        """InvalidArgument if the path can not be written to; nothing is written before `begin`."""
        self.path = Path(path)
        if self.path.is_dir() or not os.access(self.path.absolute().parent, os.W_OK):
            raise InvalidArgument.of("kv_audit", str(path), "a file in a folder that can be written to")
        for name, value in (("max_bytes", max_bytes), ("max_files", max_files)):
            if type(value) is not int or value < 1:
                raise InvalidArgument.of(name, value, "an int of at least 1")
        self.max_bytes, self.max_files = max_bytes, max_files
        self._file: FileIO | None = None
        self._lines: list[str] = []
        super().__init__(max_records)

    def begin(self, num_blocks: int, block_size: int) -> None:
        """A new pool: a new file."""
        self.close()
        super().begin(num_blocks, block_size)
        self._header = Header(num_blocks, block_size, run=uuid.uuid4().hex[:12])
        self._state = PoolState(self._header)
        try:
            self._open()
        except OSError as error:
            raise InvalidArgument.of("kv_audit", str(self.path), f"a file to write to: {error}") from error

    def _keep(self, record: AuditRecord) -> None:
        self._records.append(record)
        if self._file is not None:
            self._state.apply(record)
            self._lines.append(line_of(record))
            if len(self._lines) >= MOST_WAITING:
                self.flush()

    def flush(self) -> None:
        """Hand the records so far to the operating system; begin a new file where this one is full."""
        if self._file is None or not self._lines:
            return
        text, self._lines = "".join(self._lines), []
        try:
            self._num_bytes += _write(self._file, text)
            if self._num_bytes >= self.max_bytes:
                self._file.close()
                live = tuple(self._state.live)
                self._header = self._header._replace(part=self._header.part + 1, live=live)
                self._open()
        except OSError as error:
            self._file = None
            warnings.warn(f"the audit log {self.path} ends here: {error}", stacklevel=2)

    def close(self) -> None:
        """Flush and close the file; later records stay in memory alone."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Move the files on by one, and begin a new one with what is held."""
        carried = [json.dumps(fields) + "\n" for fields in self._state.carried()]
        header = header_line(self._header._replace(num_carried=len(carried)))
        unnamed = self.path.with_name(f"{self.path.name}.new")
        self._file = open(unnamed, "wb", buffering=0)  # noqa: SIM115  # it stays open
        _write(self._file, header + "".join(carried))
        self._num_bytes = 0
        names = [self.path, *(part_of(self.path, number) for number in range(1, self.max_files))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                os.replace(newer, older)
        os.replace(unnamed, self.path)  # last, so that whatever lies there has its beginning


def _write(file: FileIO, text: str) -> int:
    """Write all of a text; the bytes that it took."""
    data = memoryview(text.encode())
    written = 0
    while written < len(data):
        written += file.write(data[written:]) or 0
    return written


def part_of(path: Path, number: int) -> Path:
    """Where the file lies that was moved on so many times."""
    return path.with_name(f"{path.name}.{number}") if number else path


def audit_log(kv_audit: AuditLog | str | os.PathLike[str] | None) -> AuditLog | None:
    """Of what an LLM is given: a path becomes the log that writes there; anything else stays what it is."""
    return AuditFile(kv_audit) if isinstance(kv_audit, str | os.PathLike) else kv_audit
