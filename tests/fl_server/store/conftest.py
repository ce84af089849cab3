"""Ledgers to test: every backend runs the same tests."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fl_server.store.database.schema import metadata
from fl_server.store.database.store import Store, open_ledger, open_sqlite
from tests.fl_server.harness import ledger_file
from tests.fl_server.store.records import a_client, a_run, why
from tests.postgres_server import PostgresServer

BACKENDS: Mapping[str, Callable[[pytest.FixtureRequest, Path], Store]] = {
    "sqlite-file": lambda request, folder: open_sqlite(ledger_file(folder)),
    "sqlite-memory": lambda request, folder: open_sqlite(":memory:"),
    "postgres": lambda request, folder: open_ledger(request.getfixturevalue("emptied_ledger"), folder),
}
"""A new backend is added here."""


# The code for both SQLite ledgers is the same, and only tests use one in memory.
REPEATED = {"sqlite-memory": pytest.mark.slow}


NO_ROWS = "; ".join(str(table.delete()) for table in reversed(metadata.sorted_tables))
FROM_ONE = "ALTER SEQUENCE history_id_seq RESTART"


@pytest.fixture(scope="session")
def used_ledger(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a ledger for one test after the other. Making its tables costs four times as much as emptying them."""
    url = postgres.new_ledger()
    open_ledger(url, tmp_path_factory.mktemp("ledger")).close()
    return url


@pytest.fixture
def emptied_ledger(postgres: PostgresServer, used_ledger: str) -> str:
    """URL of a ledger in PostgreSQL with its tables, and without a row."""
    postgres.execute(f"SET search_path = {used_ledger.rpartition('%3D')[2]}; {NO_ROWS}; {FROM_ONE}")
    return used_ledger


@pytest.fixture(params=[pytest.param(name, marks=REPEATED.get(name, ())) for name in BACKENDS])
def empty_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A new ledger of each backend."""
    store = BACKENDS[request.param](request, tmp_path)
    yield store
    store.close()


@pytest.fixture
def store(empty_store: Store) -> Store:
    """A ledger with a run "r1", clients "a" and "b", and one history entry."""
    empty_store.create_run(a_run(), why("created"))
    for client_id in ("b", "a"):
        empty_store.put_clients([a_client(client_id)])
    return empty_store
