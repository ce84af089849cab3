"""Runs and history in the ledger."""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy import update as change

from fl_server.store.database import rows, schema
from fl_server.store.database.ledger_removal import DELETED
from fl_server.store.database.statements import (
    replace_run,
    rows_where,
    write_history,
)
from fl_server.store.database.transactions import Transactions
from fl_server.store.errors import StoreError
from fl_server.store.records import (
    HistoryRecord,
    RunRecord,
)


class RunLedger(Transactions):
    """The part of the `Store` for runs and history."""

    def create_run(self, run: RunRecord, why: HistoryRecord) -> None:
        """Add a run; fsynced. Raises StoreError if the id exists."""
        with self._transaction(f"create run {run.run_id!r}", fsynced=True) as db:
            if db.execute(rows_where(schema.runs, run_id=run.run_id)).first():
                raise StoreError(f"there is a run {run.run_id!r} already; choose another id")
            db.execute(insert(schema.runs), rows.to_row(run))
            write_history(db, why)

    def update_run(self, run: RunRecord, why: HistoryRecord | None = None) -> None:
        """Replace the record of run.run_id; fsynced. Raises StoreError if there is no such run."""
        with self._transaction(f"update run {run.run_id!r}", fsynced=True) as db:
            replace_run(db, run)
            write_history(db, why)

    def set_usage(self, run_id: str, elapsed_s: float, bytes_down: int, bytes_up: int) -> None:
        """Write the time and the bytes that a run has used. This is no change of state."""
        with self._transaction(f"write the usage of run {run_id!r}") as db:
            values = {"elapsed_s": elapsed_s, "bytes_down": bytes_down, "bytes_up": bytes_up}
            db.execute(change(schema.runs).filter_by(run_id=run_id).values(**values))

    def runs(self) -> list[RunRecord]:
        """All runs that were not deleted, oldest first."""
        found = map(rows.run, self._read("runs", select(schema.runs).where(schema.runs.c.state != DELETED)))
        return sorted(found, key=lambda run: (run.created_at, run.run_id))

    def add_history(self, entry: HistoryRecord) -> None:
        """Write a line of history without any other change."""
        with self._transaction("write history") as db:
            write_history(db, entry)

    def history(self, subject: str = "", limit: int = 1000) -> list[HistoryRecord]:
        """The newest `limit` lines about a subject ("" for all), oldest first."""
        query = rows_where(schema.history, **({"subject": subject} if subject else {}))
        newest = query.order_by(schema.history.c.id.desc()).limit(max(limit, 0))
        return [rows.history(row) for row in reversed(self._read("history", newest))]

    def history_details(self, subject: str, event: str) -> list[str]:
        """The details of all lines of an event about a subject, oldest first."""
        query = rows_where(schema.history, subject=subject, event=event).order_by(schema.history.c.id)
        return [row["detail"] for row in self._read("history", query)]

    def history_span(self, subject: str, limit: int, before: int = 2**63 - 1) -> tuple[int, int]:
        """Numbers of the first and the last of the newest `limit` lines about a subject with numbers under `before`.

        (0, -1) if there are none. The first is 0 if there are fewer than `limit`.
        """
        table = schema.history
        about = select(table.c.id).filter_by(**({"subject": subject} if subject else {})).where(table.c.id < before)
        about = about.order_by(table.c.id.desc())
        newest = self._read("history", about.limit(1))
        if not newest or limit <= 0:
            return 0, -1
        first = self._read("history", about.offset(limit - 1).limit(1))
        return (first[0]["id"] if first else 0), newest[0]["id"]

    def history_between(self, subject: str, span: tuple[int, int], limit: int) -> list[tuple[int, HistoryRecord]]:
        """The first `limit` lines about a subject with numbers from and to those of the span, each with its number."""
        table = schema.history
        query = rows_where(table, **({"subject": subject} if subject else {}))
        query = query.where(table.c.id.between(*span)).order_by(table.c.id).limit(limit)
        return [(row["id"], rows.history(row)) for row in self._read("history", query)]
