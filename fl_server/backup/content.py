"""The folder of a backup: what it has, and that nothing of it was damaged.

backup.json            ledger, time, and the digest of each file
ledger/TABLE.jsonl     the rows of the ledger, a JSON array for each, the same for SQLite and PostgreSQL
objects/KEY            objects that the ledger counts, below its own folder in the object store
state/...              files of the state directory: secrets of private runs, counts of charges, denials, the head of
                       the audit log; without an object store checkpoints and updates too
keys/NAME              the PEM files that the settings name
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, LargeBinary, Table, insert, select

from fl_common.files import atomic_writer, fsync_path
from fl_common.settings import parse_json
from fl_server.store.database import ownership
from fl_server.store.database.ledger_objects import StoredFile, objects
from fl_server.store.database.postgres import count_on
from fl_server.store.database.schema import charges, identity, metadata
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors, file_digest

CONTENT = "backup.json"
FORMAT = 1


AT_ONCE = 500
"""Rows in one statement."""
EPOCHS = 1000
"""A restored ledger counts its openings from so many more on: no coordinator of before has such an epoch."""
_PASSING = {ownership.leadership.name, ownership.standbys.name}
"""Tables that say who leads now."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a backup says of itself."""

    ledger: str
    """Id of the ledger."""
    epoch: int
    has_objects: bool
    """Whether checkpoints and updates were in an object store."""
    made_at: float
    digests: dict[str, str]
    """BLAKE3-256 of each file, in hex, by its path in the folder."""


def write_content(folder: Path, ledger: str, epoch: int, *, has_objects: bool) -> Content:
    """Make the files of a backup durable, and write what they are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CONTENT)
    with disk_errors(f"write the backup {folder}"):
        for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
            fsync_path(path)
        digests = {path.relative_to(folder).as_posix(): file_digest(path).hex() for path in paths}
        content = Content(ledger, epoch, has_objects, time.time(), digests)
        with atomic_writer(folder / CONTENT) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(content)}, indent=1).encode())
    return content


def read_content(folder: Path) -> Content:
    """What a backup is. Raises StoreError if a file of it is missing or has other bytes."""
    try:
        values = parse_json((folder / CONTENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"expected a whole backup in {folder}, got no {CONTENT} ({error})") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise StoreError(f"{folder} has another format than {FORMAT}: use the version of fl-server that made it")
    content = Content(**values)
    for name, digest in content.digests.items():
        path = folder / name
        if not path.is_file() or file_digest(path).hex() != digest:
            raise StoreError(f"the backup is damaged: {path} is missing or has other bytes than were written")
    return content


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
        count_on(db, table)
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
