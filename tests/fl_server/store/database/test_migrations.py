"""This version opens ledgers of all older versions, with records in every table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, MetaData, insert

from fl_server.store.database import rows
from fl_server.store.database.connection import engine_for
from fl_server.store.database.migrations import versions
from fl_server.store.database.store import SqlStore
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why
from tests.marks import slow_except

REVISIONS = sorted(path.name[:4] for path in Path(versions.__path__[0]).glob("[0-9]*.py"))
RECORDS: dict[str, Any] = {
    "runs": a_run(),
    "attempts": an_attempt(),
    "updates": an_update(),
    "commits": a_commit(metrics={"accuracy": 0.5}),
    "clients": a_client(labels={"site": "north"}),
    "history": why(),
}
"""One record for each table of the first version. Columns of later versions have their defaults."""


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty database of each kind."""
    local = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    engine = engine_for(local if request.param == "sqlite" else request.getfixturevalue("postgres").new_ledger())
    yield engine
    engine.dispose()


def write_as_of(db: Connection, revision: str) -> None:
    """Write a ledger as the program of this version did."""
    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", "fl_server.store.database:migrations")
    command.upgrade(config, revision)
    tables = MetaData()
    tables.reflect(db)
    db.execute(insert(tables.tables["identity"]).values(coordinator_id="f" * 32))
    for name, record in RECORDS.items():
        table, values = tables.tables[name], rows.to_row(record)
        known = {key: _text(value) for key, value in values.items() if key in table.columns}
        db.execute(insert(table).values(known))
    key = {"run_id": "r1", "round": 0, "exchange": 0, "entries": '[["a","01"]]'}
    db.execute(insert(tables.tables["accepted"]).values(key))


def _text(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list) else value


@pytest.mark.parametrize("revision", slow_except(REVISIONS, *REVISIONS[:1], *REVISIONS[-2:]))
def test_an_older_ledger_is_migrated(engine: Engine, revision: str) -> None:
    """Its records are unchanged, new columns have their defaults, and it can be written."""
    with engine.begin() as db:
        write_as_of(db, revision)
    store = SqlStore(engine)
    assert store.coordinator_id == "f" * 32
    assert (store.runs(), store.attempts("r1", 0)) == ([a_run()], [an_attempt()])
    assert (store.updates("r1", 0, 0), store.commits("r1")) == ([an_update()], [RECORDS["commits"]])
    assert (store.clients(), store.history()) == ([RECORDS["clients"]], [why()])
    assert store.accepted("r1", 0, 0) == [("a", b"\1")]
    store.commit(a_commit(1), why("committed"))
    assert [commit.round for commit in store.commits("r1")] == [0, 1]
