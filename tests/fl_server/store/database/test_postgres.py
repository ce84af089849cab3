"""The ledger in PostgreSQL: durability, one coordinator at a time, lost connections, and errors."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.store import Store, open_ledger, open_read_only
from fl_server.store.errors import LedgerHeld, StoreError, StoreFull, StoreUnavailable
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why
from tests.postgres_server import PostgresServer

UNREACHABLE = "postgresql://eve:secret@127.0.0.1:9/fl?sslpassword=secret"

KILLED_WRITER = """
import os, signal, sys
from fl_server.store.database.store import open_ledger
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
    """URL of the ledger."""
    return postgres.new_ledger()


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[Store]:
    """A ledger with a run "r1"."""
    store = open_ledger(url, tmp_path)
    store.create_run(a_run(), why("created"))
    yield store
    store.close()


def synchronous_levels(store: Store) -> list[str]:
    """Record the level at the end of each transaction from now on."""
    levels: list[str] = []

    @event.listens_for(store._engine, "commit")
    def note(connection: Connection) -> None:
        levels.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())

    return levels


def test_a_killed_process_loses_nothing_it_acknowledged(url: str, tmp_path: Path) -> None:
    """SIGKILL in a transaction: everything before it is stored, and the unfinished one is not."""
    command = [sys.executable, "-c", KILLED_WRITER, url]
    writer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (writer.returncode, writer.stdout.split()) == (-signal.SIGKILL, ["a", "b", "c", "d"]), writer.stderr
    store = open_ledger(url, tmp_path, terms=LeaseTerms(gone=1))
    assert store.runs() == [a_run()]
    assert store.updates("r1", 0, 0) == [an_update(client_id) for client_id in "abcd"]
    store.close()


def test_reopening_keeps_the_ledger(url: str, store: Store, tmp_path: Path) -> None:
    """Its id, by which clients recognise the coordinator, and its records. Closing gave the lease back."""
    store.close()
    again = open_ledger(url, tmp_path)
    assert again.coordinator_id == store.coordinator_id
    assert again.runs() == [a_run()]
    again.close()


def test_a_commit_is_flushed_and_an_update_is_not(store: Store) -> None:
    """With synchronous_commit the server flushes its log at the end of a transaction."""
    levels = synchronous_levels(store)
    store.record_update(an_update())
    store.commit(a_commit(), why())
    store.put_clients([a_client()])
    assert levels == ["off", "on", "off"]


def test_durability_power_flushes_every_write(url: str, tmp_path: Path) -> None:
    """With this setting a power cut loses nothing: no transaction ends before the log is flushed."""
    store = open_ledger(url, tmp_path, "power")
    levels = synchronous_levels(store)
    store.create_run(a_run(), why())
    store.record_update(an_update())
    assert levels == ["on", "on"]
    store.close()


def test_another_programs_database_is_refused(url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    """A database with tables and no schema version belongs to another program."""
    postgres.execute(f"CREATE TABLE {url.rpartition('%3D')[2]}.accounts (id INTEGER)")
    with pytest.raises(StoreError, match=r"is not a ledger: it has tables \(accounts\)"):
        open_ledger(url, tmp_path)


@pytest.mark.usefixtures("store")
def test_a_second_coordinator_is_refused(url: str, tmp_path: Path) -> None:
    """The error names process and host of the coordinator that leads."""
    with pytest.raises(LedgerHeld, match=r"another coordinator has the ledger: impetus process \d+ on host .+; stop"):
        open_ledger(url, tmp_path)


def test_ledgers_in_different_schemas_are_separate(postgres: PostgresServer, store: Store, tmp_path: Path) -> None:
    """Two coordinators may share a database, each in its own schema."""
    with closing(open_ledger(postgres.new_ledger(), tmp_path)) as other:
        assert other.coordinator_id != store.coordinator_id


def test_a_lost_connection_is_replaced(postgres: PostgresServer, store: Store) -> None:
    """After a restart of the server the next call works, with the same settings."""
    postgres.cut_connections()
    levels = synchronous_levels(store)
    store.add_history(why("after"))
    assert [entry.event for entry in store.history()] == ["created", "after"]
    assert levels[0] == "off"


def test_an_unreachable_database_is_store_unavailable(postgres: PostgresServer, store: Store) -> None:
    """Reads and writes raise StoreUnavailable, which callers retry, and work again when the database is back."""
    with postgres.away():
        with pytest.raises(StoreUnavailable, match="could not read runs: .*not currently accepting connections"):
            store.runs()
        with pytest.raises(StoreUnavailable, match="could not write history: "):
            store.add_history(why())
    assert store.runs() == [a_run()]


def test_a_connection_lost_in_a_transaction_keeps_none_of_it(postgres: PostgresServer, store: Store) -> None:
    """The transaction is undone, the error advises what to do, and the next transaction works."""

    def interrupted_write() -> None:
        with store._transaction("write") as db:
            db.exec_driver_sql("DELETE FROM history")
            postgres.cut_connections()
            db.exec_driver_sql("DELETE FROM runs")

    with pytest.raises(StoreUnavailable, match="could not write: .*; check that PostgreSQL runs at the address in"):
        interrupted_write()
    assert store.runs() == [a_run()]
    assert len(store.history()) == 1


def test_the_error_for_a_missing_server_has_no_password(tmp_path: Path) -> None:
    """The message has the address and advice. Neither it nor its causes have the password."""
    pytest.importorskip("psycopg")
    with pytest.raises(
        StoreUnavailable, match="could not open the ledger: .*127.0.0.1.*; check that PostgreSQL runs"
    ) as caught:
        open_ledger(UNREACHABLE, tmp_path)
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("url", ["mysql://eve:secret@h/d", "secret", "postgresql://eve:secret", "sqlite:"])
def test_the_error_for_a_wrong_url_has_no_password(tmp_path: Path, url: str) -> None:
    """Another database, no URL at all, and no host, so that the password is in the place of a port."""
    with pytest.raises(StoreError, match="expected the URL of a ledger") as caught:
        open_ledger(url, tmp_path)
    assert "secret" not in str(caught.value)


def test_a_missing_driver_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"needs the driver psycopg .*pip install '.\[postgres\]'"):
        open_ledger(UNREACHABLE, tmp_path)


def test_a_directory_with_a_sqlite_ledger_is_refused(tmp_path: Path) -> None:
    """Its checkpoints belong to its SQLite file."""
    open_ledger(None, tmp_path).close()
    with pytest.raises(StoreError, match=r"has a ledger of its own, ledger.sqlite, and `ledger` names another"):
        open_ledger(UNREACHABLE, tmp_path)


def test_a_read_only_database_is_store_full(store: Store) -> None:
    """An operator can resolve it, and writing works again afterwards."""
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


def test_a_failed_write_leaves_nothing_behind(store: Store) -> None:
    """A method is one transaction: if its history entry cannot be written, its change is undone."""
    with store._transaction("break the history") as db:
        db.exec_driver_sql("ALTER TABLE history RENAME TO gone")
    with pytest.raises(StoreError, match='relation "history" does not exist'):
        store.update_run(a_run(state="paused"), why("paused"))
    assert store.runs() == [a_run()]


def test_a_ledger_can_be_read_while_a_coordinator_writes_it(url: str, store: Store) -> None:
    """A reader needs no lock, sees every write, and can change nothing."""
    reader = open_read_only(url)
    store.open_attempt(an_attempt())
    assert reader.attempts("r1", 0) == [an_attempt()]
    with pytest.raises(StoreFull, match="read-only transaction"):
        reader.add_history(why())
    reader.close()


def test_reading_an_empty_database_does_not_make_it_a_ledger(url: str, postgres: PostgresServer) -> None:
    """A reader creates no tables."""
    with pytest.raises(StoreError, match="could not open the ledger: .*read-only transaction"):
        open_read_only(url)
    tables = postgres.execute("SELECT schemaname FROM pg_tables")
    assert (url.rpartition("%3D")[2],) not in tables
