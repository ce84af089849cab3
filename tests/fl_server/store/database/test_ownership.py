"""A ledger belongs to one state directory, and only the last process that opened it can write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_server.store.database.store import LEDGER, Store, open_ledger, open_sqlite
from fl_server.store.database.transactions import Home
from fl_server.store.errors import StoreError, StoreTakenOver
from fl_server.store.state_directory import lock_directory
from tests.fl_server.store.records import a_run, why
from tests.postgres_server import PostgresServer

Open = Callable[[str | None, str], Store]


@pytest.fixture
def start(tmp_path: Path) -> Open:
    """Opens a ledger (None: the one in the directory) as a coordinator does, with the state directory of this name."""

    def open_ledger_of(url: str | None, name: str) -> Store:
        with lock_directory(tmp_path / name) as lock:
            store = open_ledger(url, tmp_path / name, home=lock.home)
            lock.keep_ledger(store.coordinator_id)
        return store

    return open_ledger_of


def test_only_the_last_process_to_open_a_ledger_writes(tmp_path: Path) -> None:
    """The first one can still read. Its writes are refused and change nothing."""
    first = open_sqlite(tmp_path / LEDGER)
    first.create_run(a_run(), why("created"))
    second = open_sqlite(tmp_path / LEDGER)
    with pytest.raises(StoreTakenOver, match="this one has changed nothing since"):
        first.update_run(a_run(state="failed"), why("failed"))
    second.update_run(a_run(state="paused"), why("paused"))
    assert first.runs() == [a_run(state="paused")]
    assert [entry.event for entry in first.history()] == ["created", "paused"]
    first.close()
    second.close()


def test_a_directory_keeps_its_ledger(start: Open) -> None:
    """A restart opens the same ledger."""
    first = start(None, "here")
    first.close()
    again = start(None, "here")
    assert again.coordinator_id == first.coordinator_id
    again.close()


def test_a_directory_with_a_missing_ledger_is_refused(start: Open, tmp_path: Path) -> None:
    """No empty ledger replaces the missing one."""
    start(None, "here").close()
    (tmp_path / "here" / LEDGER).rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"the ledger of .*here is not there. .* if its {LEDGER} was lost"):
        start(None, "here")
    assert not (tmp_path / "here" / LEDGER).exists()


def test_a_ledger_of_another_directory_is_refused(start: Open, tmp_path: Path) -> None:
    """A file copied from another directory is refused, and its owner can still write."""
    owner = start(None, "here")
    (tmp_path / "there").mkdir()
    with lock_directory(tmp_path / "there") as lock:
        home = lock.home
    with pytest.raises(StoreError, match=f"the ledger belongs to the state directory with the id .* {home.id}"):
        open_sqlite(tmp_path / "here" / LEDGER, home=home)
    owner.create_run(a_run(), why())
    owner.close()


def test_a_directory_with_a_ledger_in_postgres_requires_it(start: Open, postgres: PostgresServer) -> None:
    """Without the setting or with another database it is refused, and nothing is created. Its own ledger works."""
    url, other = postgres.new_ledger(), postgres.new_ledger()
    first = start(url, "here")
    first.close()
    with pytest.raises(StoreError, match=r"If it was in PostgreSQL, `ledger` must name it"):
        start(None, "here")
    with pytest.raises(StoreError, match=f"the state directory belongs to the ledger {first.coordinator_id}"):
        start(other, "here")
    schema = other.rpartition("%3D")[2]
    query = f"SELECT 1 FROM pg_tables WHERE schemaname = '{schema}'"  # noqa: S608 - a name of the tests' own
    assert postgres.execute(query) == []
    start(url, "here").close()


def test_a_ledger_in_postgres_requires_its_directory(start: Open, postgres: PostgresServer) -> None:
    """A new directory has no checkpoints: it is refused, and the runs are unchanged."""
    url = postgres.new_ledger()
    owner = start(url, "here")
    owner.create_run(a_run(), why())
    owner.close()
    with pytest.raises(StoreError, match="name that directory, or an empty database or schema for this one"):
        start(url, "there")
    again = start(url, "here")
    assert again.runs() == [a_run()]
    again.close()


def test_an_older_ledger_belongs_to_its_first_directory(tmp_path: Path) -> None:
    """A ledger from before directories had ids belongs to the first that opens it, and then to no other."""
    open_sqlite(tmp_path / LEDGER).close()
    open_sqlite(tmp_path / LEDGER, home=Home("first")).close()
    with pytest.raises(StoreError, match="the ledger belongs to the state directory with the id first"):
        open_sqlite(tmp_path / LEDGER, home=Home("second"))
