"""Removes old rounds and whole runs from the ledger, in transactions that are short however many rounds there are."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy import update as change

from fl_server.store.database import schema
from fl_server.store.database.statements import write_history
from fl_server.store.database.transactions import Transactions
from fl_server.store.errors import StoreError
from fl_server.store.records import DELETING, HistoryRecord

ROUNDS_AT_ONCE = 10
LINES_AT_ONCE = 1000
DELETED = "deleted"
"""State of the row that stays of a deleted run, so that its id is never used again."""
_DETAILS = (schema.attempts, schema.updates, schema.failures, schema.accepted, schema.client_evaluations)


class Removal(Transactions):
    """The part of the `Store` that removes."""

    def deleted_runs(self) -> list[str]:
        """Ids of deleted runs, which are never used again."""
        found = self._read("deleted runs", select(schema.runs.c.run_id).where(schema.runs.c.state == DELETED))
        return [row["run_id"] for row in found]

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
            found = list(db.execute(lines.order_by(table.c.id).limit(LINES_AT_ONCE)).scalars())
            db.execute(delete(table).where(table.c.id.in_(found)))
            return len(found) == LINES_AT_ONCE

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
