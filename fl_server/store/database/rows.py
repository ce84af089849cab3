"""Rows of the ledger: records to rows and back, and the statements that the ledger's parts share.

Column names are field names; the few values that differ are here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, bindparam, delete, insert, select
from sqlalchemy import update as change

from fl_server.run_settings import privacy
from fl_server.store.certificates import CertificateRecord, EnrollmentRecord, RevocationRecord
from fl_server.store.client_work import ClientWork
from fl_server.store.database import schema
from fl_server.store.errors import StoreError
from fl_server.store.records import (
    AnswerRecord,
    AttemptRecord,
    ChargeRecord,
    ClientEvaluation,
    ClientRecord,
    ClientStateRecord,
    CommitRecord,
    FailureRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    TotalsRecord,
    UpdateRecord,
)

Record = (
    RunRecord | AttemptRecord | UpdateRecord | FailureRecord | CommitRecord | TotalsRecord | ClientEvaluation
    | ClientRecord | QuarantineRecord | ClientStateRecord | HistoryRecord | EnrollmentRecord | CertificateRecord
    | RevocationRecord | ChargeRecord | StageRecord | AnswerRecord
)  # fmt: skip
Row = RowMapping


def to_row(record: Record) -> dict[str, Any]:
    """Field values by name, with mappings and tuples as the dicts and lists that JSON knows."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, ClientWork):
        value = value.to_values()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value


def attempt(row: Row) -> AttemptRecord:
    """Row of `attempts` -> record."""
    return AttemptRecord(**{**row, "cohort": tuple(row["cohort"])})


def stage(row: Row) -> StageRecord:
    """Row of `secure_stages` -> record."""
    return StageRecord(**{**row, "members": tuple(row["members"]), "closed": tuple(row["closed"])})


def update(row: Row) -> UpdateRecord:
    """Row of `updates` -> record. A norm that was NaN is NULL in the table; so is a loss, which is then None."""
    norm = math.nan if row["norm"] is None else row["norm"]
    return UpdateRecord(**{**row, "norm": norm, "epochs": tuple(row["epochs"] or ())})


def client(row: Row) -> ClientRecord:
    """Row of `clients` -> record."""
    work = ClientWork.of(row["work"])
    return ClientRecord(**{**row, "tasks": tuple(row["tasks"]), "methods": tuple(row["methods"]), "work": work})


def history(row: Row) -> HistoryRecord:
    """Row of `history` -> record."""
    return HistoryRecord(**{key: value for key, value in row.items() if key != "id"})


LARGEST = 2**31 - 1
"""Largest number of a round or exchange in a ledger. Clients may send larger ones, which PostgreSQL cannot compare."""


def rows_where(table: Table, **key: object) -> Select[tuple[object, ...]]:
    """The rows of a table with these values."""
    return select(table).filter_by(**key)


@cache
def rows_with(table: Table, *columns: str) -> Select[tuple[object, ...]]:
    """The rows of a table whose columns have the values that come with the execution; none is None.

    To make a statement costs more than to execute it, so the frequent ones are made once.
    """
    return select(table).where(*(table.c[name] == bindparam(name) for name in columns))


def find(db: Connection, table: Table, **key: object) -> Row | None:
    """A row with these values, none of which is None."""
    return db.execute(rows_with(table, *key), key).mappings().first()


def replace_run(db: Connection, run: RunRecord) -> None:
    """Replace a run's record. Raises StoreError if there is none."""
    table = schema.runs
    if not db.execute(change(table).where(table.c.run_id == run.run_id).values(to_row(run))).rowcount:
        raise StoreError(f"there is no run {run.run_id!r} to update; create it first")


def replace_quarantine_record(db: Connection, quarantine: QuarantineRecord | None, why: HistoryRecord | None) -> None:
    """Replace the quarantine record of a known client, with a line of history. An unknown client is ignored."""
    if quarantine is not None and find(db, schema.clients, client_id=quarantine.client_id):
        db.execute(delete(schema.quarantines).filter_by(client_id=quarantine.client_id))
        db.execute(insert(schema.quarantines), to_row(quarantine))
        write_history(db, why)


HISTORY = "history"
"""The key in the `info` of a connection while its transaction has lines of history."""


def hides_cohorts(db: Connection, run_id: str) -> bool:
    """Whether the run's cohorts are hidden, as `RunConfig.hides_cohorts`: its clients' work does not name it."""
    run = find(db, schema.runs, run_id=run_id)
    return run is not None and privacy.hides_cohorts(run["spec"])


def write_history(db: Connection, *whys: HistoryRecord | None) -> None:
    """Write the lines of history that explain a change, if there are any."""
    if lines := [to_row(why) for why in whys if why is not None]:
        db.execute(insert(schema.history), lines)
        db.info[HISTORY] = True


Counted = Callable[[ClientWork], ClientWork]
"""The work of a client before and after an event."""
_WORK = select(schema.clients.c.client_id, schema.clients.c.work).where(
    schema.clients.c.client_id.in_(bindparam("ids", expanding=True))
)
_CHANGE_WORK = change(schema.clients).where(schema.clients.c.client_id == bindparam("of")).values(work=bindparam("new"))


def count_work(db: Connection, events: Mapping[str, Counted]) -> None:
    """Count what happened to the work of clients, by client. Forgotten clients are ignored."""
    known = db.execute(_WORK, {"ids": list(events)}).all()
    changed = [{"of": client, "new": events[client](ClientWork.of(work)).to_values()} for client, work in known]
    if changed:
        db.execute(_CHANGE_WORK, changed)


def increment(db: Connection, client_ids: Sequence[str], counter: str) -> None:
    """Add 1 to a counter of clients for each time that they are named. Forgotten clients are ignored."""
    table, times = schema.clients, Counter(client_ids)
    for number in set(times.values()):
        clients = [client for client, count in times.items() if count == number]
        db.execute(change(table).where(table.c.client_id.in_(clients)).values({counter: table.c[counter] + number}))
