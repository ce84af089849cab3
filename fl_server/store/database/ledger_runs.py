"""Runs and history in the ledger, and the removal of old rounds and whole runs.

Removals are transactions that are short however many rounds there are.
"""

from __future__ import annotations

from sqlalchemy import delete, func, insert, select
from sqlalchemy import update as change

from fl_server.store.database import rows, schema
from fl_server.store.database.rows import (
    replace_run,
    rows_where,
    write_history,
)
from fl_server.store.database.transactions import Transactions
from fl_server.store.errors import StoreError
from fl_server.store.records import (
    DELETING,
    HistoryRecord,
    RunRecord,
)

ROUNDS_AT_ONCE = 10
LINES_AT_ONCE = 1000
DELETED = "deleted"
"""State of the row that stays of a deleted run, so that its id is never used again."""
_DETAILS = (schema.attempts, schema.updates, schema.failures, schema.accepted, schema.client_evaluations)


class Removal(Transactions):
    """The part of the `Store` that removes."""

    def deleted_runs(self) -> list[str]:
        """Ids of deleted runs, which are never used again."""
        deleted = self._read("deleted runs", select(schema.runs.c.run_id).where(schema.runs.c.state == DELETED))
        return [row["run_id"] for row in deleted]

    def remove_rounds(self, run_id: str, before: int) -> bool:
        """Remove everything but the commits of a few rounds before this one, the oldest. Returns whether some are left.

        Everything: attempts, updates, accepted lists and clients' evaluations.
        """
        with self._transaction(f"remove old rounds of run {run_id!r}") as db:
            oldest = [
                db.execute(select(func.min(table.c.round)).where(table.c.run_id == run_id)).scalar()
                for table in _DETAILS
            ]
            first = min((round_ for round_ in oldest if round_ is not None), default=before)
            end = min(before, first + ROUNDS_AT_ONCE)
            for table in _DETAILS if first < end else ():
                db.execute(delete(table).where(table.c.run_id == run_id, table.c.round < end))
            return end < before

    def remove_run_history(self, run_id: str) -> bool:
        """Remove some lines that the coordinator wrote about a run. Returns whether some are left.

        Operators' lines stay, and the line that explains the deletion.
        """
        table = schema.history
        lines = select(table.c.id).where(table.c.subject == run_id, table.c.actor == "coordinator")
        lines = lines.where(table.c.event != "run_deleted")
        with self._transaction(f"remove the history of run {run_id!r}") as db:
            numbers = list(db.execute(lines.order_by(table.c.id).limit(LINES_AT_ONCE)).scalars())
            db.execute(delete(table).where(table.c.id.in_(numbers)))
            return len(numbers) == LINES_AT_ONCE

    def remove_run(self, run_id: str, why: HistoryRecord) -> None:
        """Remove the rest of a run in state DELETING, except its id; fsynced. The same call again changes nothing."""
        with self._transaction(f"remove run {run_id!r}", fsynced=True) as db:
            state = db.execute(select(schema.runs.c.state).where(schema.runs.c.run_id == run_id)).scalar()
            if state == DELETED:
                return
            if state != DELETING:
                raise StoreError(f"run {run_id!r} is {state or 'unknown'}: only one that is being deleted is removed")
            for table in (*_DETAILS, schema.commits, schema.run_totals, schema.client_states):
                db.execute(delete(table).where(table.c.run_id == run_id))
            row = change(schema.runs).where(schema.runs.c.run_id == run_id)
            db.execute(row.values(state=DELETED, spec={}, reason=""))
            write_history(db, why)


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
        runs = map(rows.run, self._read("runs", select(schema.runs).where(schema.runs.c.state != DELETED)))
        return sorted(runs, key=lambda run: (run.created_at, run.run_id))

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
