"""The ledger as files: every row comes back, also in another database, and numbers are counted on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_common.audit import START, AuditRow
from fl_server.backup import EPOCHS, read_tables, tables, write_tables
from fl_server.store.database.engines import engine_for
from fl_server.store.database.migrations.schema_version import migrate
from fl_server.store.database.store import Store, open_ledger, open_sqlite
from fl_server.store.database.transactions import Home
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why
from tests.postgres_server import PostgresServer


def filled(path: Path) -> Store:
    """A ledger with a run, a commit, updates, a client, history and the audit log."""
    store = open_sqlite(path, home=Home("here"))
    store.create_run(a_run(), why("created"))
    store.open_attempt(an_attempt())
    store.record_update(an_update())
    store.fix_accepted("r1", 0, 0, [("a", b"1")])
    store.commit(a_commit(), why("committed"))
    store.put_clients([a_client()])
    row = AuditRow(1, 2, "operator:alice", "", "BanClient", "c", "ok", "")
    store.add_audit_rows([row], START, fsynced=False)
    return store


@pytest.fixture(params=["sqlite", "postgres"])
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Store]:
    """Restores a folder of tables into a new database, and opens it."""
    postgres: PostgresServer | None = request.getfixturevalue("postgres") if request.param == "postgres" else None
    url = f"sqlite:///{tmp_path}/restored.sqlite" if postgres is None else postgres.new_ledger()

    def restore(folder: Path) -> Store:
        engine = engine_for(url)
        with engine.begin() as db:
            migrate(db)
            read_tables(db, folder, "s3://other/place")
        engine.dispose()
        home = Home("there", storage="s3://other/place")
        return open_sqlite(tmp_path / "restored.sqlite", home=home) if postgres is None else open_ledger(
            url, tmp_path / "there", home=home
        )  # fmt: skip

    return restore


def test_all_rows_come_back(tmp_path: Path, restored: Callable[[Path], Store]) -> None:
    """In another directory and store, with epochs that no coordinator of before has."""
    before = filled(tmp_path / "ledger.sqlite")
    with before.snapshot() as db:
        write_tables(db, tmp_path)
    after = restored(tmp_path)
    assert after.coordinator_id == before.coordinator_id
    assert after.claim.epoch == before.claim.epoch + EPOCHS + 1
    for read in (Store.runs, Store.clients, Store.history):
        assert read(after) == read(before)
    assert after.updates("r1", 0, 0) == before.updates("r1", 0, 0)
    assert after.commits("r1") == before.commits("r1")
    assert after.newest_audit_rows(9) == before.newest_audit_rows(9)
    after.add_history(why("goes on"))
    assert [entry.event for entry in after.history()][-1] == "goes on"
    after.close()
    before.close()


def test_every_table_is_in_a_backup_but_those_of_the_moment(tmp_path: Path) -> None:
    """Who leads and who waits is not restored."""
    store = filled(tmp_path / "ledger.sqlite")
    with store.snapshot() as db:
        write_tables(db, tmp_path)
    store.close()
    names = {path.stem for path in tmp_path.glob("*.jsonl")}
    assert names == {table.name for table in tables()}
    assert {"charges", "objects", "audit", "runs"} <= names
    assert not {"leadership", "standbys"} & names
