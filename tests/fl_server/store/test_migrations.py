"""Ledgers of every older version, with lines in every table, opened by this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, MetaData, insert

from fl_server.store import rows
from fl_server.store.engine import engine_for
from fl_server.store.migrations import versions
from fl_server.store.sql import SqlStore
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why

REVISIONS = sorted(path.name[:4] for path in Path(versions.__path__[0]).glob("[0-9]*.py"))
LINES: dict[str, Any] = {
    "runs": a_run(),
    "attempts": an_attempt(),
    "updates": an_update(),
    "commits": a_commit(metrics={"accuracy": 0.5}),
    "clients": a_client(labels={"site": "north"}),
    "history": why(),
}
"""One record of each table that the first version has; what later ones added to it has its default."""


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty database of each kind."""
    local = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    engine = engine_for(local if request.param == "sqlite" else request.getfixturevalue("postgres").new_ledger())
    yield engine
    engine.dispose()


def write_as_of(db: Connection, revision: str) -> None:
    """A ledger as the program of that version left it."""
    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", "fl_server.store:migrations")
    command.upgrade(config, revision)
    tables = MetaData()
    tables.reflect(db)
    db.execute(insert(tables.tables["identity"]).values(coordinator_id="f" * 32))
    for name, record in LINES.items():
        table, values = tables.tables[name], rows.to_row(record)
        known = {key: _text(value) for key, value in values.items() if key in table.columns}
        db.execute(insert(table).values(known))
    key = {"run_id": "r1", "round": 0, "exchange": 0, "entries": '[["a","01"]]'}
    db.execute(insert(tables.tables["accepted"]).values(key))


def _text(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list) else value


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_older_ledger_is_brought_up_to_date(engine: Engine, revision: str) -> None:
    """Every line of it stays as it was, what it does not say has its default, and it can be written."""
    with engine.begin() as db:
        write_as_of(db, revision)
    store = SqlStore(engine)
    assert store.coordinator_id == "f" * 32
    assert (store.runs(), store.attempts("r1", 0)) == ([a_run()], [an_attempt()])
    assert (store.updates("r1", 0, 0), store.commits("r1")) == ([an_update()], [LINES["commits"]])
    assert (store.clients(), store.history()) == ([LINES["clients"]], [why()])
    assert store.accepted("r1", 0, 0) == [("a", b"\1")]
    store.commit(a_commit(1), why("committed"))
    assert [commit.round for commit in store.commits("r1")] == [0, 1]
