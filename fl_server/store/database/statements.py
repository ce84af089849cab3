"""Statements that the parts of the ledger share."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Select, Table, delete, insert, select
from sqlalchemy import update as change

from fl_server.store.database import rows, schema
from fl_server.store.errors import StoreError
from fl_server.store.records import HistoryRecord, QuarantineRecord, RunRecord

LARGEST = 2**31 - 1
"""Largest number of a round or exchange in a ledger. Clients may send larger ones, which PostgreSQL cannot compare."""


def rows_where(table: Table, **key: object) -> Select[tuple[object, ...]]:
    """The rows of a table with these values."""
    return select(table).filter_by(**key)


def replace_run(db: Connection, run: RunRecord) -> None:
    """Replace a run's record. Raises StoreError if there is none."""
    table = schema.runs
    if not db.execute(change(table).where(table.c.run_id == run.run_id).values(rows.to_row(run))).rowcount:
        raise StoreError(f"there is no run {run.run_id!r} to update; create it first")


def replace_quarantine_record(db: Connection, quarantine: QuarantineRecord | None, why: HistoryRecord | None) -> None:
    """Replace the quarantine record of a known client, with a line of history. An unknown client is ignored."""
    if quarantine is not None and db.execute(rows_where(schema.clients, client_id=quarantine.client_id)).first():
        db.execute(delete(schema.quarantines).filter_by(client_id=quarantine.client_id))
        db.execute(insert(schema.quarantines), rows.to_row(quarantine))
        write_history(db, why)


HISTORY = "history"
"""In the `info` of a connection while its transaction has lines of history."""


def write_history(db: Connection, *whys: HistoryRecord | None) -> None:
    """Write the lines of history that explain a change, if there are any."""
    if lines := [rows.to_row(why) for why in whys if why is not None]:
        db.execute(insert(schema.history), lines)
        db.info[HISTORY] = True


def increment(db: Connection, client_ids: Sequence[str], counter: str) -> None:
    """Add 1 to a counter of clients. Forgotten clients are ignored."""
    table = schema.clients
    db.execute(change(table).where(table.c.client_id.in_(client_ids)).values({counter: table.c[counter] + 1}))
