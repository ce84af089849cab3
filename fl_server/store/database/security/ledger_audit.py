"""The audit log in the ledger: rows are only added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, RowMapping, insert, select

from fl_common.audit.rows import START, AuditRow, Head
from fl_server.store.database.security.schema import audit
from fl_server.store.database.transactions import Transactions

_COLUMNS = tuple(field.name for field in fields(AuditRow))


class AuditLedger(Transactions):
    """The part of the `Store` for the audit log."""

    def add_audit_rows(self, rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
        """Add rows if `after` is the newest row. Returns the newest row."""
        with self._transaction("write the audit log", fsynced=fsynced) as db:
            found = _head(db)
            if found != after or not rows:
                return found
            db.execute(insert(audit), [{name: getattr(row, name) for name in _COLUMNS} for row in rows])
            return rows[-1].head

    def audit_rows(self, first: int, last: int, limit: int, matching: Mapping[str, str | int]) -> list[AuditRow]:
        """The first `limit` rows with numbers from `first` to `last`, in order."""
        wanted = dict(matching)
        since_us = wanted.pop("since_us", None)
        query = select(audit).where(audit.c.number.between(first, last)).filter_by(**wanted)
        if since_us is not None:
            query = query.where(audit.c.time_us >= since_us)
        return [_row(found) for found in self._read("the audit log", query.order_by(audit.c.number).limit(limit))]

    def newest_audit_rows(self, count: int) -> list[AuditRow]:
        """The newest rows, in order of number."""
        query = select(audit).order_by(audit.c.number.desc()).limit(count)
        return [_row(found) for found in reversed(self._read("the audit log", query))]


def _head(db: Connection) -> Head:
    found = db.execute(select(audit.c.number, audit.c.hash).order_by(audit.c.number.desc()).limit(1)).first()
    return START if found is None else Head(found.number, bytes(found.hash))


def _row(found: RowMapping) -> AuditRow:
    values: dict[str, Any] = {name: found[name] for name in _COLUMNS}
    return AuditRow(**{**values, "hash": bytes(values["hash"])})
