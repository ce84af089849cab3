"""The ledger in PostgreSQL: durability, one coordinator at a time, lost connections, and what its errors become."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event

from fl_server.store import postgres as backend
from fl_server.store import schema
from fl_server.store.base import StoreAway, StoreError, StoreFull, StoreTaken
from fl_server.store.sql import SqlStore, look_at_postgres, open_ledger
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why
from tests.postgres_server import PostgresServer

UNREACHABLE = "postgresql://eve:secret@127.0.0.1:9/fl?sslpassword=secret"

KILLED_WRITER = """
import os, signal, sys
from fl_server.store.sql import open_ledger
from pathlib import Path
from tests.fl_server.store.records import *
store = open_ledger(sys.argv[1], Path("nowhere"))
store.create_run(a_run(), why())
for client_id in "abcd":
    store.record_update(an_update(client_id))
    print(client_id, flush=True)
with store._transaction("write") as db:
    db.exec_driver_sql("DELETE FROM updates")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """Where the ledger lies."""
    return postgres.new_ledger()


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[SqlStore]:
    """A ledger with a run "r1"."""
    store = open_ledger(url, tmp_path)
    store.create_run(a_run(), why("created"))
    yield store
    store.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock that will not be free."""
    monkeypatch.setattr(backend, "LOCK_WAIT_S", 0.05)


def synchronous_levels(store: SqlStore) -> list[str]:
    """From now on, the level that PostgreSQL had at the end of each transaction."""
    levels: list[str] = []

    @event.listens_for(store._engine, "commit")
    def note(connection: object) -> None:
        levels.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar())  # type: ignore[attr-defined]

    return levels


def test_a_killed_process_loses_nothing_it_acknowledged(url: str, tmp_path: Path) -> None:
    """SIGKILL in a transaction: what came before is there, the unfinished one is not, and the lock is free."""
    command = [sys.executable, "-c", KILLED_WRITER, url]
    writer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (writer.returncode, writer.stdout.split()) == (-signal.SIGKILL, ["a", "b", "c", "d"]), writer.stderr
    store = open_ledger(url, tmp_path)
    assert store.runs() == [a_run()]
    assert store.updates("r1", 0, 0) == [an_update(client_id) for client_id in "abcd"]
    store.close()


def test_reopening_keeps_the_ledger(url: str, store: SqlStore, tmp_path: Path) -> None:
    """Its id, by which clients know the coordinator, and what was written; the lock went with the first."""
    store.close()
    again = open_ledger(url, tmp_path)
    assert again.coordinator_id == store.coordinator_id
    assert again.runs() == [a_run()]
    again.close()


def test_a_commit_is_flushed_and_an_update_is_not(store: SqlStore) -> None:
    """With synchronous_commit the server's log is flushed at the end of a transaction."""
    levels = synchronous_levels(store)
    store.record_update(an_update())
    store.commit(a_commit(), why())
    store.put_clients([a_client()])
    assert levels == ["off", "on", "off"]


def test_durability_power_flushes_every_write(url: str, tmp_path: Path) -> None:
    """Where a power cut must lose nothing, no transaction ends before the log is flushed."""
    store = open_ledger(url, tmp_path, "power")
    levels = synchronous_levels(store)
    store.create_run(a_run(), why())
    store.record_update(an_update())
    assert levels == ["on", "on"]
    store.close()


def test_migrations_make_the_schema(store: SqlStore) -> None:
    """What the versions build, one after the other, is what schema.py says."""
    with store._reads.begin() as db:
        assert compare_metadata(MigrationContext.configure(db), schema.metadata) == []


def test_an_unknown_schema_version_is_refused(url: str, store: SqlStore, tmp_path: Path) -> None:
    """A ledger of a newer program is named, and what to do is said."""
    with store._transaction("meddle") as db:
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    with pytest.raises(StoreError, match=r"schema version 9999; this program knows .* or name another database"):
        open_ledger(url, tmp_path)


def test_another_programs_database_is_refused(url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    """Tables without a schema version are somebody else's."""
    postgres.execute(f"CREATE TABLE {url.rpartition('%3D')[2]}.accounts (id INTEGER)")
    with pytest.raises(StoreError, match=r"is not a ledger: it has tables \(accounts\)"):
        open_ledger(url, tmp_path)


@pytest.mark.usefixtures("impatient", "store")
def test_a_second_coordinator_is_refused(url: str, tmp_path: Path) -> None:
    """It is told which process on which host has the ledger, and since when."""
    words = r"another coordinator has the ledger: impetus process \d+ on host .+, connected since 2.*; stop it first"
    with pytest.raises(StoreAway, match=words):
        open_ledger(url, tmp_path)


@pytest.mark.usefixtures("impatient", "store")
def test_ledgers_in_other_schemas_are_others(postgres: PostgresServer, tmp_path: Path) -> None:
    """Two coordinators may share a database, each in its own schema."""
    open_ledger(postgres.new_ledger(), tmp_path).close()


def test_a_lost_connection_is_made_anew(postgres: PostgresServer, store: SqlStore) -> None:
    """After a restart of the server the next call works, with the lock and the settings of before."""
    postgres.cut_connections()
    levels = synchronous_levels(store)
    store.add_history(why("after"))
    assert [entry.event for entry in store.history()] == ["created", "after"]
    assert levels[0] == "off"


def test_a_database_that_is_away_is_waited_for(postgres: PostgresServer, store: SqlStore) -> None:
    """Reads and writes are StoreAway, which is tried again, and go on when it is back."""
    with postgres.away():
        with pytest.raises(StoreAway, match="could not read runs: .*not currently accepting connections"):
            store.runs()
        with pytest.raises(StoreAway, match="could not write history: "):
            store.add_history(why())
    assert store.runs() == [a_run()]


@pytest.mark.usefixtures("impatient")
def test_who_lost_the_lock_never_writes_again(
    postgres: PostgresServer, url: str, store: SqlStore, tmp_path: Path
) -> None:
    """Another took the ledger while the connection was gone: the first cannot write then, nor once the other ended."""
    postgres.cut_connections()
    other = open_ledger(url, tmp_path)
    with pytest.raises(StoreAway, match="another coordinator has the ledger"):
        store.add_history(why("mine"))
    other.add_history(why("the other's"))
    other.close()
    with pytest.raises(StoreTaken, match="another coordinator has opened the ledger since"):
        store.add_history(why("mine"))
    assert [entry.event for entry in store.history()] == ["created", "the other's"]


def test_without_its_lock_there_is_one_writer_all_the_same(
    url: str, store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler that shares connections: both hold a connection, and who came later alone can write."""
    monkeypatch.setattr(backend, "_LOCK", "SELECT %s::int")
    other = open_ledger(url, tmp_path)
    with pytest.raises(StoreTaken):
        store.create_run(a_run("r2"), why())
    assert other.runs() == [a_run()]
    other.create_run(a_run("r2"), why())
    other.close()


def test_a_connection_lost_in_a_transaction_keeps_none_of_it(postgres: PostgresServer, store: SqlStore) -> None:
    """The transaction is not there, what to do is said, and the next one works."""

    def half() -> None:
        with store._transaction("write") as db:
            db.exec_driver_sql("DELETE FROM history")
            postgres.cut_connections()
            db.exec_driver_sql("DELETE FROM runs")

    with pytest.raises(StoreAway, match="could not write: .*; see that PostgreSQL runs where `ledger` says"):
        half()
    assert store.runs() == [a_run()]
    assert len(store.history()) == 1


def test_no_server_is_told_without_the_password(tmp_path: Path) -> None:
    """Where it was looked for and what to do, but no secret, neither here nor in the causes."""
    pytest.importorskip("psycopg")
    with pytest.raises(StoreAway, match="could not open the ledger: .*127.0.0.1.*; see that PostgreSQL runs") as caught:
        open_ledger(UNREACHABLE, tmp_path)
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("url", ["mysql://eve:secret@h/d", "secret", "postgresql://eve:secret", "sqlite:"])
def test_a_wrong_url_is_told_without_the_password(tmp_path: Path, url: str) -> None:
    """Another database, no URL at all, no host, so that the password stands where a port would."""
    with pytest.raises(StoreError, match="expected the URL of a ledger") as caught:
        open_ledger(url, tmp_path)
    assert "secret" not in str(caught.value)


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"needs the driver psycopg .*pip install '.\[postgres\]'"):
        open_ledger(UNREACHABLE, tmp_path)


def test_a_directory_with_a_ledger_of_its_own_is_refused(tmp_path: Path) -> None:
    """Its checkpoints belong to the SQLite file beside them."""
    open_ledger(None, tmp_path).close()
    with pytest.raises(StoreError, match=r"has a ledger of its own, ledger.sqlite, and `ledger` names another"):
        open_ledger(UNREACHABLE, tmp_path)


def test_no_right_to_write_is_store_full(store: SqlStore) -> None:
    """A database that was made read-only is the operator's to mend; writing goes on afterwards."""
    with store._reads.connect() as db:
        db.exec_driver_sql("SET default_transaction_read_only = on")
        db.commit()
    with pytest.raises(
        StoreFull, match="could not write history: .*read-only transaction; make room or give the right"
    ):
        store.add_history(why())
    with store._reads.connect() as db:
        db.exec_driver_sql("SET default_transaction_read_only = off")
        db.commit()
    store.add_history(why())
    assert len(store.history()) == 2


def test_a_failed_write_leaves_nothing_behind(store: SqlStore) -> None:
    """A method is one transaction: when its history cannot be written, its change is not there either."""
    with store._transaction("break the history") as db:
        db.exec_driver_sql("ALTER TABLE history RENAME TO gone")
    with pytest.raises(StoreError, match='relation "history" does not exist'):
        store.update_run(a_run(state="paused"), why("paused"))
    assert store.runs() == [a_run()]


def test_a_ledger_is_read_while_a_coordinator_has_it(url: str, store: SqlStore) -> None:
    """A reader needs no lock, sees what is written, and can change nothing."""
    reader = look_at_postgres(url)
    store.open_attempt(an_attempt())
    assert reader.attempts("r1", 0) == [an_attempt()]
    with pytest.raises(StoreFull, match="read-only transaction"):
        reader.add_history(why())
    reader.close()


def test_an_empty_database_is_not_made_a_ledger_by_looking(url: str, postgres: PostgresServer) -> None:
    """Whoever reads makes no tables."""
    with pytest.raises(StoreError, match="could not open the ledger: .*read-only transaction"):
        look_at_postgres(url)
    tables = postgres.execute("SELECT schemaname FROM pg_tables")
    assert (url.rpartition("%3D")[2],) not in tables
