"""The audit log in the ledger: rows are only added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, LargeBinary, RowMapping, Table, insert, select

from fl_common.audit import START, AuditRow, Head
from fl_server.store.database.schema import BigId, Words, metadata
from fl_server.store.database.transactions import Transactions, database_errors

SCANNED = 5000
"""Rows that one call looks at: other calls of the ledger need their turn."""
_COLUMNS = tuple(field.name for field in fields(AuditRow))


audit = Table(
    "audit",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=False),
    Column("time_us", BigId, nullable=False),
    Column("actor", Words, nullable=False),
    Column("address", Words, nullable=False),
    Column("method", Words, nullable=False),
    Column("subject", Words, nullable=False),
    Column("result", Words, nullable=False),
    Column("detail", Words, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""Rows are only added. `hash` is SHA-256 over the previous row's hash and this row's other columns."""


class AuditPage(NamedTuple):
    """Some rows, and where to continue."""

    rows: list[AuditRow]
    next: int
    """Number from which on rows were not looked at."""


class AuditLedger(Transactions):
    """The part of the `Store` for the audit log."""

    def add_audit_rows(self, rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
        """Add rows, which have numbers and hashes, if `after` is the newest row. Returns the newest row.

        Nothing is added if another row is the newest; the caller compares. The same rows again change nothing.
        """
        with self._transaction("write the audit log", fsynced=fsynced) as db:
            head = newest_head(db)
            if head != after or not rows:
                return head
            db.execute(insert(audit), [{name: getattr(row, name) for name in _COLUMNS} for row in rows])
            return rows[-1].head

    def audit_rows(self, first: int, last: int, limit: int, matching: Mapping[str, str | int]) -> AuditPage:
        """At most `limit` rows with numbers from `first` to `last`, in order; at most SCANNED rows are looked at.

        matching: only rows with these values of actor, method, subject or result; "since_us": not before this time.
        """
        number, wanted = audit.c.number, dict(matching)
        since_us = wanted.pop("since_us", None)
        scanned = select(audit).where(number.between(first, last)).order_by(number)
        beyond = scanned.with_only_columns(number).offset(SCANNED).limit(1)
        with database_errors("read the audit log"), self._reads.begin() as db:
            end = db.execute(beyond).scalar()
            query = scanned.filter_by(**wanted).limit(limit)
            if end is not None:
                query = query.where(number < end)
            if since_us is not None:
                query = query.where(audit.c.time_us >= since_us)
            rows = [_row(row) for row in db.execute(query).mappings()]
        if len(rows) == limit:
            return AuditPage(rows, rows[-1].number + 1)
        return AuditPage(rows, last + 1 if end is None else end)

    def newest_audit_rows(self, count: int) -> list[AuditRow]:
        """The newest rows, in order of number."""
        query = select(audit).order_by(audit.c.number.desc()).limit(count)
        return [_row(row) for row in reversed(self._read("the audit log", query))]


def newest_head(db: Connection) -> Head:
    """The newest row."""
    newest = db.execute(select(audit.c.number, audit.c.hash).order_by(audit.c.number.desc()).limit(1)).first()
    return START if newest is None else Head(newest.number, bytes(newest.hash))


def _row(row: RowMapping) -> AuditRow:
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    return AuditRow(**{**values, "hash": bytes(values["hash"])})
