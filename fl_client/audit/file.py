"""The file of the audit log: rows are added at its end, and it is rotated at a size.

audit.jsonl has the newest rows, audit.1.jsonl those before, and so on; the oldest file is removed. Numbers and hashes
continue from file to file. A line that was cut by the end of the process is removed at the next start, and a row names
it. Everything here is blocking.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from fl_client.storage.state import AUDIT
from fl_common.audit import START, AuditRow, Head, limited, rows_of_lines
from fl_common.units import counted

NAME = AUDIT[0]
MOST_BYTES = 8 << 20
"""The most bytes of one file: some 30,000 rows."""
RECOVERED = "audit_recovered"
"""Method of the row that names removed or unreadable lines."""
_TAIL_BYTES = 64 << 10
"""More than any row has."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row before it has a number."""

    time_us: int
    fields: Mapping[str, str]


class AuditFile:
    """The end of the log in one state directory. Used by one thread at a time."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._head: Head | None = None
        """None before the first row, and after a failure: then the file is read."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Add rows: all of them, or none and an OSError. They survive the end of the process, not a power cut."""
        rows = list(entries)
        if self._head is None:
            self._head, noticed = self._recover()
            if noticed:
                fields = {"actor": "daemon", "method": RECOVERED, "result": "ok", "detail": noticed}
                rows.insert(0, Entry(rows[0].time_us if rows else 0, fields))
        linked = list(_linked(self._head, rows))
        data = b"".join(row.to_json().encode() + b"\n" for row in linked)
        self._head = None
        self._rotate(len(data))
        _write(self._folder / NAME, data)
        self._head = linked[-1].head

    def _rotate(self, more: int) -> None:
        """Begin a new file if these bytes have no room."""
        size = _size(self._folder / NAME)
        if not size or size + more <= self._most_bytes:
            return
        for newer, older in reversed([*pairwise(AUDIT)]):
            with suppress(FileNotFoundError):
                (self._folder / newer).replace(self._folder / older)

    def _recover(self) -> tuple[Head, str]:
        """The newest row on disk, and what is wrong with the lines behind it, or ""."""
        noticed = []
        if cut := _remove_torn_line(self._folder / NAME):
            noticed.append(f"{cut} bytes of an incomplete line were removed")
        for name in AUDIT:
            row, unreadable = _last_row(self._folder / name)
            if unreadable:
                noticed.append(f"the end of {name} has {counted(unreadable, 'line')} that cannot be read")
            if row is not None:
                return row.head, "; ".join(noticed)
        return START, "; ".join(noticed)


def rows_in(folder: Path) -> Iterator[AuditRow]:
    """All rows on disk, the oldest first. A last line that is being written is left out.

    Raises:
        ValueError: a line is no row; the message names file and line.
        OSError: a file cannot be read.
    """
    for name in reversed(AUDIT):
        path = folder / name
        if not path.exists():
            continue
        with path.open("rb") as file:
            lines = (line for line in file if line.endswith(b"\n"))
            try:
                yield from rows_of_lines(lines)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error


def _linked(head: Head, entries: Sequence[Entry]) -> Iterator[AuditRow]:
    empty = dict.fromkeys(("actor", "address", "method", "subject", "result", "detail"), "")
    for entry in entries:
        row = AuditRow(head.number + 1, entry.time_us, **limited({**empty, **entry.fields}))
        row = replace(row, hash=row.linked(head.hash))
        head = row.head
        yield row


def _write(path: Path, data: bytes) -> None:
    """Add bytes to a file, which is opened each time: its folder may have been removed and made again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(None, f"wrote {written} of {len(data)} bytes", str(path))
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - _TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def _remove_torn_line(path: Path) -> int:
    """Remove what follows the last line break. Returns its bytes."""
    tail = _tail(path)
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.truncate(path, _size(path) - torn)
    return torn


def _last_row(path: Path) -> tuple[AuditRow | None, int]:
    """The last row of a file, and the number of lines behind it that are none."""
    lines = _tail(path).splitlines()
    for unreadable, line in enumerate(reversed(lines)):
        try:
            return AuditRow.from_json(line), unreadable
        except (ValueError, RecursionError):
            continue
    return None, len(lines)
