"""Rows of an audit log from the places that have them: a coordinator, an export, or the ledger itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_common.audit import START, AuditRow, Head, rows_of_lines
from fl_ops.admin.client import AdminClient
from fl_ops.errors import Refused, UsageError
from protos.fl.v1 import admin_pb2

_LEAST, _LARGEST = -(2**63), 2**63 - 1
_ROWS = 1000


class CoordinatorLog:
    """The audit log of a coordinator, page by page. Rows that come after the first page are left out."""

    def __init__(self, client: AdminClient, request: admin_pb2.ListAuditRequest) -> None:
        self._client, self._request = client, request
        self.newest: Head | None = None
        """The newest row, which the coordinator names with the first page."""

    def __iter__(self) -> Iterator[AuditRow]:
        """The rows. Raises OpsError."""
        for page in self._client.history.list_audit(self._request):
            if self.newest is None:
                self.newest = Head(page.head_number, page.head_hash) if page.head_number else START
            for entry in page.entries:
                yield audit_row(entry)


def audit_row(entry: admin_pb2.AuditEntry) -> AuditRow:
    """A row from its message."""
    time_us = entry.time.seconds * 10**6 + entry.time.nanos // 1000
    texts = (entry.actor, entry.address, entry.method, entry.subject, entry.result, entry.detail)
    return AuditRow(entry.number, time_us, *texts, entry.hash)


def rows_in_files(files: Sequence[Path]) -> Iterator[AuditRow]:
    """The rows of exports, in the order of the files. Raises UsageError for a file that is none."""
    for path in files:
        try:
            with path.open("rb") as file:
                yield from rows_of_lines(file)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Refused(f"{path}: {error}") from error


def heads_beside(state_dir: Path, *, needed: bool) -> list[Head]:
    """The newest row that the coordinator of a state directory has written.

    needed: raise Refused if it is not known, as there is no other head to compare with.
    """
    from fl_server.audit.log import HEAD_FILE

    path = state_dir / HEAD_FILE
    todo = "without it rows that were removed from the end are not found: give a head of before with --head NUMBER:HASH"
    try:
        return [Head.parse(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError) as error:
        if not needed:
            return []
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise Refused(f"{path} {why}; {todo}") from None


def rows_in_ledger(place: Path | str) -> Iterator[AuditRow]:
    """The rows of a ledger, which is only read. place: a state directory, or the URL of a database in PostgreSQL.

    Raises Refused if it cannot be read.
    """
    # Imported here: other commands need no database.
    from fl_server.store.database.store import open_read_only
    from fl_server.store.errors import StoreError

    try:
        store = open_read_only(place)
        try:
            begin = _LEAST
            while begin <= _LARGEST:
                rows, begin = store.audit_rows(begin, _LARGEST, _ROWS, {})
                yield from rows
        finally:
            store.close()
    except StoreError as error:
        raise Refused(str(error)) from error
