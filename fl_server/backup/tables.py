"""The ledger as files: one for each table, with one JSON array for each row. The same for SQLite and PostgreSQL."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, LargeBinary, Table, func, insert, select, text

from fl_server.store.database import lease
from fl_server.store.database.ledger_objects import StoredFile, objects
from fl_server.store.database.schema import charges, identity, metadata
from fl_server.store.errors import StoreError

AT_ONCE = 500
"""Rows in one statement."""
EPOCHS = 1000
"""A restored ledger counts its openings from so many more on: no coordinator of before has such an epoch."""
_PASSING = {lease.leadership.name, lease.standbys.name}
"""Tables that say who leads now."""


def tables() -> list[Table]:
    """The tables of a backup; one comes after those that it refers to."""
    return [table for table in metadata.sorted_tables if table.name not in _PASSING]


def write_tables(db: Connection, folder: Path) -> None:
    """Write all tables of one transaction."""
    for table in tables():
        with (folder / f"{table.name}.jsonl").open("w", encoding="utf-8") as file:
            json.dump([column.name for column in table.columns], file)
            file.write("\n")
            for row in db.execution_options(yield_per=AT_ONCE).execute(select(table)):
                json.dump([_plain(column, value) for column, value in zip(table.columns, row, strict=True)], file)
                file.write("\n")


def read_tables(db: Connection, folder: Path, storage: str) -> None:
    """Fill the empty tables of a ledger, whose files are in `storage` from now on, and which has no directory yet."""
    for table in tables():
        rows = _rows(table, folder)
        while some := list(islice(rows, AT_ONCE)):
            db.execute(insert(table), some)
        _count_on(db, table)
    db.execute(identity.update().values(epoch=identity.c.epoch + EPOCHS, directory="", storage=storage))


def stored_files(folder: Path) -> list[StoredFile]:
    """The files in the object store that a backup's ledger counts."""
    return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in _rows(objects, folder)]


def charged_accounts(folder: Path) -> set[str]:
    """The privacy accounts with charges."""
    return {row["account"] for row in _rows(charges, folder)}


def _rows(table: Table, folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / f"{table.name}.jsonl").open(encoding="utf-8") as file:
        names = json.loads(file.readline())
        if unknown := set(names) - set(table.columns.keys()):
            raise StoreError(f"the backup's table {table.name} has the columns {', '.join(sorted(unknown))}: use the "
                             "version of fl-server that made it")  # fmt: skip
        for line in file:
            values = zip(names, json.loads(line), strict=True)
            yield {name: _value(table.columns[name], value) for name, value in values}


def _plain(column: Column[Any], value: Any) -> Any:
    if isinstance(column.type, LargeBinary) and value is not None:
        return base64.b64encode(value).decode()
    return value


def _value(column: Column[Any], value: Any) -> Any:
    if isinstance(column.type, LargeBinary) and value is not None:
        return base64.b64decode(value)
    return value


def _count_on(db: Connection, table: Table) -> None:
    """Let PostgreSQL count numbers on behind the restored ones."""
    column = table.autoincrement_column
    if column is None or db.dialect.name != "postgresql":
        return
    sequence = db.execute(
        text("SELECT pg_get_serial_sequence(:table, :name)"), {"table": table.name, "name": column.name}
    ).scalar()
    last = db.execute(select(func.max(column))).scalar()
    if sequence is not None and last is not None:
        db.execute(text("SELECT setval(:sequence, :last)"), {"sequence": sequence, "last": last})
