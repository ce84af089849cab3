"""The ledger in a SQLite file: durability, schema versions, and errors of the file."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from fl_server.store.database.store import Store, open_sqlite
from fl_server.store.errors import StoreError, StoreFull
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why

KILLED_WRITER = """
import os, signal, sys
from fl_server.store.database.store import open_sqlite
from tests.fl_server.store.records import *
store = open_sqlite(sys.argv[1])
store.create_run(a_run(), why())
store.open_attempt(an_attempt())
for client_id in "abcd":
    store.record_update(an_update(client_id))
    print(client_id, flush=True)
with store._transaction("write") as db:
    db.exec_driver_sql("DELETE FROM updates")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the ledger."""
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """A ledger with a run "r1"."""
    store = open_sqlite(path)
    store.create_run(a_run(), why("created"))
    yield store
    store.close()


def run_sql(path: Path, *statements: str) -> None:
    """Execute statements without the store."""
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def synchronous_levels(store: Store) -> list[str]:
    """Record the synchronous level of each transaction from now on."""
    levels: list[str] = []

    @event.listens_for(store._engine, "commit")
    def note(connection: Connection) -> None:
        levels.append({1: "NORMAL", 2: "FULL"}[connection.exec_driver_sql("PRAGMA synchronous").scalar_one()])

    return levels


def test_a_killed_process_loses_nothing_it_acknowledged(path: Path) -> None:
    """SIGKILL in a transaction: everything before it is stored, the unfinished one is not."""
    command = [sys.executable, "-c", KILLED_WRITER, str(path)]
    writer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (writer.returncode, writer.stdout.split()) == (-signal.SIGKILL, ["a", "b", "c", "d"]), writer.stderr
    store = open_sqlite(path)
    assert store.runs() == [a_run()]
    assert store.attempts("r1", 0) == [an_attempt()]
    assert store.updates("r1", 0, 0) == [an_update(client_id) for client_id in "abcd"]
    store.close()


def test_reopening_keeps_the_ledgers_id(path: Path, store: Store) -> None:
    """Clients recognise the coordinator by it."""
    again = open_sqlite(path)
    assert again.coordinator_id == store.coordinator_id
    again.close()


def test_a_commit_is_fsynced_and_an_update_is_not(store: Store) -> None:
    """synchronous=FULL makes SQLite fsync its log at the end of a transaction; NORMAL does not."""
    levels = synchronous_levels(store)
    store.record_update(an_update())
    store.commit(a_commit(), why())
    store.put_clients([a_client()])
    assert levels == ["NORMAL", "FULL", "NORMAL"]


def test_runs_and_accepted_lists_are_fsynced(store: Store) -> None:
    """An operator's change of a run and the list on which a checkpoint depends do not wait for the next commit."""
    levels = synchronous_levels(store)
    store.create_run(replace(a_run(), run_id="r2"), why())
    store.update_run(a_run(), why())
    store.fix_accepted("r1", 0, 0, [("a", b"digest")])
    assert levels == ["FULL"] * 3


def test_durability_power_fsyncs_every_write(path: Path) -> None:
    """With this setting a power cut loses nothing: each transaction is fsynced."""
    store = open_sqlite(path, durability="power")
    levels = synchronous_levels(store)
    store.create_run(a_run(), why())
    store.record_update(an_update())
    assert levels == ["FULL", "FULL"]
    store.close()


def test_sqlite_uses_the_level_of_the_transaction(store: Store) -> None:
    """Read inside the transactions: 2 is FULL, 1 is NORMAL."""
    for fsynced, level in ((True, 2), (False, 1)):
        with store._transaction("read", fsynced=fsynced) as db:
            assert db.exec_driver_sql("PRAGMA synchronous").scalar() == level


def test_the_log_is_write_ahead(store: Store) -> None:
    """With WAL a reader never waits for the writer, and a commit is one append."""
    with store._reads.begin() as db:
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_another_programs_database_is_refused(path: Path) -> None:
    """A database with tables and no schema version belongs to another program."""
    run_sql(path, "CREATE TABLE accounts (id INTEGER)")
    with pytest.raises(StoreError, match=r"is not a ledger: it has tables \(accounts\)"):
        open_sqlite(path)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    """The error has a readable message, and the library's error as its cause."""
    path.write_text("not a database, but long enough to have a header of one" * 10)
    with pytest.raises(StoreError, match="could not open the ledger: file is not a database") as caught:
        open_sqlite(path)
    assert caught.value.__cause__ is not None


def test_an_interrupted_creation_is_finished(path: Path) -> None:
    """A coordinator that is killed while it creates the ledger leaves an empty file, which becomes a new ledger."""
    path.touch()
    store = open_sqlite(path)
    assert store.runs() == []
    store.close()


def test_a_folder_that_cannot_be_written_is_store_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing permission is StoreFull, which an operator can resolve, and not the system's error."""

    def refuse(self: Path, mode: int = 0) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(StoreFull, match="could not open the ledger .*Permission denied"):
        open_sqlite(path)


@pytest.mark.parametrize("pragma", ["max_page_count=1", "query_only=ON"], ids=["disk full", "read-only"])
def test_a_full_disk_is_store_full_and_loses_nothing(store: Store, pragma: str) -> None:
    """At its size limit SQLite fails as on a full disk. Stored data stays, and writing works again with more space."""
    with store._reads.begin() as db:
        db.exec_driver_sql(f"PRAGMA {pragma}")
    big = why("x" * 100_000)
    with pytest.raises(StoreFull, match="could not write history: .*; make room"):
        store.add_history(big)
    assert [entry.event for entry in store.history()] == ["created"]
    with store._reads.begin() as db:
        db.exec_driver_sql("PRAGMA max_page_count=100000")
        db.exec_driver_sql("PRAGMA query_only=OFF")
    store.add_history(big)
    assert len(store.history()) == 2


def test_a_failed_write_leaves_nothing_behind(store: Store) -> None:
    """A method is one transaction: if its history entry cannot be written, its change is undone."""
    with store._transaction("break the history") as db:
        db.exec_driver_sql("ALTER TABLE history RENAME TO gone")
    with pytest.raises(StoreError, match="no such table: history"):
        store.update_run(a_run(state="paused"), why("paused"))
    assert store.runs() == [a_run()]


def test_ledgers_in_memory_are_separate(tmp_path: Path) -> None:
    """Each ":memory:" is a separate ledger without a file."""
    first, second = open_sqlite(":memory:"), open_sqlite(":memory:")
    assert first.coordinator_id != second.coordinator_id
    assert list(tmp_path.iterdir()) == []
    first.close()
    second.close()
