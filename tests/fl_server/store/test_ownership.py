"""Which ledger goes with which state directory, and that of two who opened one the last alone can write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_server.store.base import StoreError, StoreTaken
from fl_server.store.lock import lock_directory
from fl_server.store.ownership import Home
from fl_server.store.sql import LEDGER, SqlStore, open_ledger, open_sqlite
from tests.fl_server.store.records import a_run, why
from tests.postgres_server import PostgresServer

Open = Callable[[str | None, str], SqlStore]


@pytest.fixture
def start(tmp_path: Path) -> Open:
    """Opens a ledger (None: in the directory) as a coordinator does, on the state directory of a name."""

    def open_it(url: str | None, name: str) -> SqlStore:
        with lock_directory(tmp_path / name) as lock:
            store = open_ledger(url, tmp_path / name, home=lock.home)
            lock.keep_ledger(store.coordinator_id)
        return store

    return open_it


def test_the_last_to_open_a_ledger_writes(tmp_path: Path) -> None:
    """The first reads on, and whatever it would write is refused and leaves nothing."""
    first = open_sqlite(tmp_path / LEDGER)
    first.create_run(a_run(), why("created"))
    second = open_sqlite(tmp_path / LEDGER)
    with pytest.raises(StoreTaken, match="this one has changed nothing since"):
        first.update_run(a_run(state="failed"), why("failed"))
    second.update_run(a_run(state="paused"), why("paused"))
    assert first.runs() == [a_run(state="paused")]
    assert [entry.event for entry in first.history()] == ["created", "paused"]
    first.close()
    second.close()


def test_a_directory_goes_on_with_its_ledger(start: Open) -> None:
    """A restart finds what belongs together."""
    first = start(None, "here")
    first.close()
    again = start(None, "here")
    assert again.coordinator_id == first.coordinator_id
    again.close()


def test_a_directory_whose_ledger_is_gone_is_refused(start: Open, tmp_path: Path) -> None:
    """No empty ledger takes the place of the one that is missing, and none is made."""
    start(None, "here").close()
    (tmp_path / "here" / LEDGER).rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"the ledger of .*here is not there: .* or its {LEDGER} was lost"):
        start(None, "here")
    assert not (tmp_path / "here" / LEDGER).exists()


def test_a_ledger_of_another_directory_is_refused(start: Open, tmp_path: Path) -> None:
    """A file that was copied into a directory is not its ledger, and is left to the one that it belongs to."""
    owner = start(None, "here")
    (tmp_path / "there").mkdir()
    with lock_directory(tmp_path / "there") as lock:
        home = lock.home
    with pytest.raises(StoreError, match=f"the ledger belongs to the state directory with the id .* {home.id}"):
        open_sqlite(tmp_path / "here" / LEDGER, home=home)
    owner.create_run(a_run(), why())
    owner.close()


def test_a_directory_with_a_ledger_in_postgres_needs_that_one(start: Open, postgres: PostgresServer) -> None:
    """Started without the setting, or with another database, it is refused; nothing is made, and its own still does."""
    url, other = postgres.new_ledger(), postgres.new_ledger()
    first = start(url, "here")
    first.close()
    with pytest.raises(StoreError, match=r"it was in PostgreSQL, and then `ledger` must name it"):
        start(None, "here")
    with pytest.raises(StoreError, match=f"the state directory belongs to the ledger {first.coordinator_id}"):
        start(other, "here")
    schema = other.rpartition("%3D")[2]
    made = f"SELECT 1 FROM pg_tables WHERE schemaname = '{schema}'"  # noqa: S608 - a name of the tests' own
    assert postgres.execute(made) == []
    start(url, "here").close()


def test_a_ledger_in_postgres_needs_its_directory(start: Open, postgres: PostgresServer) -> None:
    """A new directory has none of the checkpoints: it is refused, and no run is harmed."""
    url = postgres.new_ledger()
    owner = start(url, "here")
    owner.create_run(a_run(), why())
    owner.close()
    with pytest.raises(StoreError, match="name that directory, or an empty database or schema for this one"):
        start(url, "there")
    again = start(url, "here")
    assert again.runs() == [a_run()]
    again.close()


def test_an_older_ledger_takes_its_directory(tmp_path: Path) -> None:
    """One that was opened before directories had ids belongs to the first that comes, and then to no other."""
    open_sqlite(tmp_path / LEDGER).close()
    open_sqlite(tmp_path / LEDGER, home=Home("first")).close()
    with pytest.raises(StoreError, match="the ledger belongs to the state directory with the id first"):
        open_sqlite(tmp_path / LEDGER, home=Home("second"))
